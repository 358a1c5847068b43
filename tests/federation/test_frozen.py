"""With frozen="local", only what is trained travels; a client uses its own base only if told to, and only that one."""

import copy

import pytest
import torch
from tests.engines import Loopback, LoopbackServer
from tests.users import CLASSES, Encoder, adapted, batch
from torch.nn import functional as F

import fedveil
from fedveil import Federation
from fedveil.defences import Plain, Veil
from fedveil.errors import BadArgument, HeadNotLinear, ModelMismatch
from fedveil.federation.client import ClientSession
from fedveil.federation.frozen import digest_parameters, restore_local
from fedveil.federation.protocol import Request, read, write
from fedveil.graph.build import local_parameters

TRAINED = {"hidden.down.weight", "hidden.up.weight", "classifier.weight", "classifier.bias"}


def records(k):
    return {**batch(8, seed=k), "labels": torch.arange(8) % CLASSES}


def served(defence, change=lambda net: net, output=None, **options):
    """A server and two clients, whose models `change` alters."""
    net, asks = adapted(), []
    members = {}
    for k in range(2):
        session = ClientSession(change(copy.deepcopy(net)), records(k), client=k, **options)
        members[f"site-{k}"] = lambda message, extra, own=session: asks.append(message) or own.reply(message, extra)
    server = LoopbackServer(
        Loopback(members), net, batch(), defence, torch.optim.Adam,
        loss="cross_entropy", timeout=0.3, attempts=1, patience=0.1, output=output,
    )  # fmt: skip
    return server, asks


@pytest.mark.parametrize("kind", [Plain, Veil])
def test_only_what_is_trained_travels_and_training_is_the_same(kind):
    torch.manual_seed(0)
    server, asks = served(kind(frozen="local"), frozen="local")
    start = copy.deepcopy(server.model)
    server.fit(rounds=3)
    sent = {name.removeprefix("parameter/") for name in read(asks[0], Request).tensors if name.startswith("parameter/")}
    assert sent == TRAINED
    local = Federation(
        start, [records(0), records(1)], "plain", torch.optim.Adam, loss="cross_entropy", whole_shard=True
    )
    local.fit(rounds=3)
    for name, own in local.model.named_parameters():
        assert (own - server.model.get_parameter(name)).abs().max() < 1e-9


@pytest.mark.parametrize("kind", [Plain, Veil])
def test_without_the_option_everything_is_sent(kind):
    server, asks = served(kind(), frozen="local")
    server.step()
    ask = read(asks[0], Request)
    assert ask.local == ""
    assert {f"parameter/{name}" for name, _ in server.model.named_parameters()} <= ask.tensors.keys()


def flip(net):
    """Change one bit of one frozen number."""
    base = net.hidden.base.weight.data
    base.view(torch.int64)[0, 0] ^= 1
    return net


def thaw(net):
    net.embed.requires_grad_(True)
    return net


def freeze(net):
    net.classifier.requires_grad_(False)
    return net


@pytest.mark.parametrize(
    ("change", "options", "text"),
    [
        (flip, {"frozen": "local"}, "differ from the server's"),
        (thaw, {"frozen": "local"}, "differ from the server's"),
        (freeze, {"frozen": "local"}, "differ from those that are trainable"),
        (lambda net: net.float(), {"frozen": "local"}, "differ from the server's"),
        (lambda net: net, {}, "is not configured to use its own"),
    ],
)
def test_a_client_refuses_another_base_and_one_it_was_not_told_of(change, options, text):
    server, _ = served(Veil(frozen="local"), change, **options)
    with pytest.raises(fedveil.FedveilError, match=text):
        server.step()


def test_a_client_that_was_not_told_to_reads_none_of_its_values():
    """Otherwise, a server could test guesses of a client's values: the answer would depend on them."""
    server, asks = served(Veil(frozen="local"), frozen="local")
    server.step()
    ask, texts = read(asks[0], Request), set()
    for net in (server.model, flip(copy.deepcopy(server.model))):
        with pytest.raises(BadArgument) as caught:
            restore_local(ask, net, "sent")
        texts.add(str(caught.value))
    assert len(texts) == 1


def test_a_guess_of_a_part_of_the_base_reveals_nothing():
    server, asks = served(Veil(frozen="local"), frozen="local")
    server.step()
    ask, net = read(asks[0], Request), server.model
    own, texts = local_parameters(net), set()
    for name in own:  # a digest of one tensor, the others sent by the server
        part = Request(**{**vars(ask), "local": digest_parameters({name: own[name]})})
        others = {f"parameter/{other}": value for other, value in own.items() if other != name}
        for guess in (part, Request(**{**vars(part), "tensors": {**ask.tensors, **others}})):
            with pytest.raises(ModelMismatch) as caught:
                restore_local(guess, net, "local")
            texts.add(str(caught.value))
            assert digest_parameters(own) not in str(caught.value)
    assert len(texts) == 2  # the digest differs, or parameters are sent that the client has


@pytest.mark.parametrize("name", ["embed.weight", "hidden.base.weight"])
def test_a_server_cannot_train_what_the_client_has(name):
    server, asks = served(Veil(frozen="local"), frozen="local")
    server.step()
    ask = read(asks[0], Request)
    values = {**ask.values, "trainable": [*ask.values["trainable"], name]}
    with pytest.raises(ModelMismatch, match="differ from those that are trainable"):
        restore_local(read(write(Request(**{**vars(ask), "values": values})), Request), server.model, "local")


def test_the_digest_changes_with_every_name_dtype_shape_and_bit():
    one = {"a": torch.zeros(2, 3)}
    others = [{"b": torch.zeros(2, 3)}, {"a": torch.zeros(3, 2)}, {"a": torch.zeros(2, 3).double()}, {"a": -one["a"]}]
    others += [{"a": torch.zeros(2, 3).int()}, {}]
    assert len({digest_parameters(own) for own in (one, *others)}) == 7
    assert digest_parameters({"a": torch.zeros(3, 2).t()}) == digest_parameters(one)
    pair = {"a": torch.zeros(1), "b": torch.ones(1)}
    assert digest_parameters(pair) == digest_parameters(dict(reversed(pair.items())))


def test_local_parameters_are_not_perturbed_and_the_plan_says_so():
    net, inputs, targets = adapted(), batch(), torch.arange(5) % CLASSES
    plan = fedveil.analyse(net, inputs, frozen="local")
    assert {entry.name for entry in plan.layout.trainable} == TRAINED
    assert plan.layout.parameters == sum(net.get_parameter(name).numel() for name in TRAINED)
    assert "clients already have 160 more, which are frozen" in str(plan)
    assert plan.coverage == 1.0  # the rank space, and the head's offset
    perturbation = Veil(frozen="local").perturb(net, plan, "cross_entropy")
    sent = perturbation.broadcast.parameters
    assert all(torch.equal(sent[name], own) for name, own in local_parameters(net).items())
    assert not any(torch.equal(sent[name], net.get_parameter(name)) for name in TRAINED)
    result = perturbation.recover([fedveil.client_step(net, perturbation.broadcast, inputs, targets)])
    trained = [net.get_parameter(name) for name in result.gradients]
    true = torch.autograd.grad(F.cross_entropy(net(**inputs)["logits"], targets), trained)
    assert all((a - b).abs().max() < 1e-9 for a, b in zip(result.gradients.values(), true, strict=True))
    whole = Veil().perturb(net, fedveil.analyse(net, inputs), "cross_entropy")
    full = whole.recover([fedveil.client_step(net, whole.broadcast, inputs, targets)])
    assert full.figures["bytes_down"] - result.figures["bytes_down"] == 8 * 160
    assert full.figures["bytes_up"] == result.figures["bytes_up"]


def test_a_frozen_head_gets_no_noise():
    net = adapted()
    net.classifier.requires_grad_(False)
    assert fedveil.analyse(net, batch(), frozen="local").head.path == "hidden.up"
    plain = Encoder().requires_grad_(False)
    plain.embed.requires_grad_(True)
    with pytest.raises(HeadNotLinear, match="frozen, and clients have it"):
        fedveil.analyse(plain, batch(), frozen="local")


def test_other_values_of_the_option_are_refused():
    for make in (Plain, lambda frozen: fedveil.analyse(adapted(), batch(), frozen=frozen)):
        with pytest.raises(BadArgument, match='"sent" or "local"'):
            make(frozen="remote")
    with pytest.raises(BadArgument, match='"sent" or "local"'):
        ClientSession(adapted(), records(0), client=0, frozen="remote")


def features(found):
    return found["logits"]


def test_the_output_of_a_run_is_the_servers_and_a_function_is_given_on_both_sides():
    server, asks = served("plain", output="logits")
    server.step()
    assert read(asks[0], Request).output == "logits"
    server, asks = served("veil", output=features)
    with pytest.raises(fedveil.FedveilError, match="is a function, which is not sent"):
        server.step()
    assert "features()" in read(asks[0], Request).output
    served("veil", lambda net: net, features)[0].close()
    server, _ = served("veil", output=features)
    for name in server.engine.transport.answers:
        session = ClientSession(adapted(), records(0), client=0, output=features)
        server.engine.transport.answers[name] = session.reply
    server.step()
    server, _ = served("veil", output="logits")
    for name in server.engine.transport.answers:
        session = ClientSession(adapted(), records(0), client=0, output="hidden")
        server.engine.transport.answers[name] = session.reply
    with pytest.raises(fedveil.FedveilError, match="but the client's is 'hidden'"):
        server.step()


def test_a_base_that_the_server_changes_during_a_run_is_noticed():
    server, asks = served(Plain(frozen="local"), frozen="local")
    server.step()
    server.model.hidden.base.weight.data[0, 0] += 1
    with pytest.raises(fedveil.FedveilError, match="differ from the server's"):
        server.step()
    assert read(asks[0], Request).local != read(asks[-1], Request).local
