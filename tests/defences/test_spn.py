"""SPN, our re-implementation: what is sent, what is kept, and that nothing else differs from plain training."""

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.defences.runs import CLASSES, NETS, federation, reachable, same
from tests.oracle import Network, built, worst
from tests.sessions import Session
from torch import nn
from torch.nn import functional as F

from fedveil.defences import Samples
from fedveil.defences.plain import PlainClient
from fedveil.defences.spn import SPN, Split, draw_head
from fedveil.errors import BadArgument
from fedveil.federation import checkpoint
from fedveil.models import mlp, resnet
from fedveil.scheme import Entropy, find_loss

NORMED = (
    lambda: nn.Sequential(nn.Linear(6, 10, bias=False), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, CLASSES)),
    (6,),
)


def wide():
    """Two answers a sample, of one head."""
    layers = {"body": nn.Linear(3, 5), "head": nn.Linear(5, 1)}
    return Network(lambda m, x: m.head(m.body(x.reshape(-1, 2, 3)).tanh()).flatten(1), **layers)


def records(shape, samples=8, seed=0, classes=CLASSES):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, *shape, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, classes, (samples,), generator=generator)


def hot_records():
    inputs, targets = records((6,))
    return inputs, F.one_hot(targets, CLASSES).double()


def prepared(net, loss="squared_error", **options):
    build, shape = net
    model = built(build)
    return model, Session(SPN(**{"seed": 1, **options}), model, torch.zeros(2, *shape, dtype=torch.float64), loss)


def rounding(model, inputs):
    """No entry of a gradient has more additions behind it than the model has weights and the batch has numbers."""
    return torch.finfo(torch.float64).eps * (sum(p.numel() for p in model.parameters()) + inputs.numel())


def naive(model, path, inputs, hot, head, codes, *, loss, weight=0.1, margin=1.0, weights=None):
    """The whole loss written out, sample by sample and bit by bit; gradients of the model's parameters and of P."""
    model, head = copy.deepcopy(model), head.clone().requires_grad_()
    classifier = model.get_submodule(path)
    setattr(model, path, nn.Identity())
    h = model(inputs)
    u, v = classifier(h), h @ head.T
    total = 0
    for i, row in enumerate(hot):
        task = F.cross_entropy(u[i], row) if loss == "cross_entropy" else 0.5 * (u[i] - row).pow(2).sum()
        y = int(row.argmax()) if len(row) > 1 else int(row[0] > 0.5)
        polar = sum(torch.clamp(margin - v[i, j] * codes[y, j], min=0) for j in range(len(head)))
        total = total + (1 / len(hot) if weights is None else weights[i]) * (task + weight * polar)
    setattr(model, path, classifier)
    wanted = dict(model.named_parameters())
    *found, own = torch.autograd.grad(total, [*wanted.values(), head])
    return dict(zip(wanted, found, strict=True)), own


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("loss", ["squared_error", "cross_entropy"])
@pytest.mark.parametrize("weighted", [False, True], ids=["mean", "weights"])
def test_what_is_uploaded_is_the_gradient_of_the_whole_loss(net, loss, weighted):
    model, spn = prepared(NETS[net], loss, weight=0.3, bits=5, margin=0.7)
    inputs, targets = records(NETS[net][1])
    hot, weights = F.one_hot(targets, CLASSES).double(), torch.linspace(0.05, 0.4, 8).double() if weighted else None
    update = spn.step(spn.broadcast(model), Samples(inputs, hot, weights), 3)
    private = spn.client.state(3)
    expected, step = naive(
        model, spn.client.split.path, inputs, hot, *private.values(), loss=loss, weight=0.3, margin=0.7, weights=weights
    )
    assert worst(spn.upload(update, 3).gradients, expected) < rounding(model, inputs)
    assert worst({"P": update.step}, {"P": step}) < rounding(model, inputs)


def test_positions_of_a_sample_count_each_and_may_be_reshaped_behind_the_head():
    model, spn = prepared((wide, (6,)), bits=5, seed=2)
    inputs, targets = records((6,), samples=8, classes=2)
    both = torch.stack([targets, 1 - targets], 1).double()
    weights = torch.linspace(0.05, 0.4, 8).double()
    update = spn.step(model, Samples(inputs, both, weights))
    assert spn.client.state(0)["codes"].shape == (2, 5)  # of one output
    rows, hot, each = inputs.reshape(16, 3), both.reshape(16, 1), weights.repeat_interleave(2)

    flat = nn.Sequential(model.body, nn.Tanh(), model.head)
    expected, step = naive(flat, "2", rows, hot, *spn.client.state(0).values(), loss="squared_error", weights=each)
    names = dict(zip(update.gradients, expected, strict=True))
    found = {names[name]: gradient for name, gradient in update.gradients.items()}
    assert worst(found, expected) < rounding(model, inputs)
    assert worst({"P": update.step}, {"P": step}) < rounding(model, inputs)


@pytest.mark.parametrize("net", NETS)
def test_the_classifiers_gradient_is_plain_and_every_other_is_not(net):
    model, spn = prepared(NETS[net], "cross_entropy")
    plain = PlainClient(model, find_loss("cross_entropy"))
    batch = records(NETS[net][1])
    found = spn.upload(spn.step(model, Samples(*batch))).gradients
    expected = plain.step(model, Samples(*batch)).gradients
    clean = {name for name in found if torch.equal(found[name], expected[name])}
    assert clean == {f"{spn.client.split.path}.weight", f"{spn.client.split.path}.bias"}


def test_the_private_head_takes_a_step_of_sgd_when_its_gradient_is_uploaded_and_the_codes_stay():
    model, spn = prepared(NETS["mlp"], lr=0.5)
    batch = hot_records()
    spn.step(model, Samples(*batch), 7)
    for _ in range(3):
        before = spn.client.state(7)
        update = spn.step(model, Samples(*batch), 7)
        assert spn.client.state(7)["head"] is before["head"]
        spn.upload(update, 7)
        after = spn.client.state(7)
        assert update.step.abs().max() > 0
        assert torch.equal(after["head"], before["head"] - 0.5 * update.step)
        assert torch.equal(after["codes"], before["codes"])
        assert not after["head"].requires_grad  # nor holds a graph


def leaked(thing, secrets):
    """Which secrets are in the memory of its tensors: whole, transposed or negative; or any one of its real numbers."""
    numbers = torch.cat([t.new_empty(0).set_(t.untyped_storage()).double() for t in reachable(thing)])
    packed, single = numbers.numpy().tobytes(), set(numbers.abs().tolist()) - {0.0, 1.0}
    return [
        any((s * t).contiguous().numpy().tobytes() in packed for s in (secret, secret.T) for t in (1.0, -1.0))
        or not single.isdisjoint(secret.abs().flatten().tolist())
        for secret in secrets
    ]


@pytest.mark.parametrize("options", [{}, {"whole_shard": True}], ids=["batch", "shard"])
@pytest.mark.parametrize("net", [NETS["mlp"], NORMED], ids=["mlp", "BatchNorm"])
def test_no_secret_leaves_its_client(tmp_path, net, options):
    secrets, sent, kept = [], [], []

    run = federation(net, SPN(lr=0.1), optimizer=torch.optim.Adam, **options)
    clients, server, upload = run.clients.client, run.defence_server, run.clients.client.upload
    start = server.start_round

    def start_round(model, members=None):
        sent.append(copy.deepcopy(model))
        return start(model, members)

    def spy(update, client=0):
        before = clients.state(client)
        sent.append(upload(update, client))
        kept.append((before, update, clients.state(client)))
        secrets.extend([*before.values(), clients.state(client)["head"], update.step])
        return sent[-1]

    server.start_round, clients.upload = start_round, spy
    run.fit(rounds=3, folder=tmp_path, test=records(net[1]))
    assert len(secrets) == 4 * 3 * 3
    server = [sent, run.defence_server.state(), run.state(), checkpoint.load(tmp_path / "checkpoint.pt")]
    assert not any(leaked(server, secrets))
    assert all(leaked([server, kept], secrets))  # they would be seen
    assert not any(module._forward_pre_hooks for module in run.model.modules())
    assert not any(str(number) in repr((run.defence, kept[0][1])) for number in secrets[0].flatten().tolist())


def test_every_client_has_its_own_secrets_whoever_comes_first():
    def drawn(clients, **options):
        model, spn = prepared(NETS["mlp"], **options)
        assert spn.client.state(0) == {}
        batch = hot_records()
        for client in clients:
            spn.step(model, Samples(*batch), client)
        return [spn.client.state(client) for client in sorted(clients)]

    first, second = drawn([0, 1])
    assert same(drawn([1, 0])[0], first)
    system = [*drawn([0, 1], seed=None), *drawn([0, 1], seed=None)]
    others = [second, *system, *drawn([0], seed=1 + 2**32)]  # a torch.Generator takes 32 bits of a seed
    for number, other in enumerate(others):
        for kind in ("head", "codes"):
            assert not any(torch.equal(other[kind], known[kind]) for known in [first, *others[:number]])


def test_heads_are_normal_numbers_of_the_entropy_and_codes_are_fair():
    features, bits = 400, 100
    private = draw_head(Split("head", features, 400), bits, Entropy.for_tests(0))
    normal = torch.from_numpy(Entropy.for_tests(0).normal(features * bits))  # tests/defences/test_private.py
    assert torch.equal(private.head, normal.reshape(bits, features) / features**0.5)
    assert private.codes.abs().unique().tolist() == [1.0]
    assert abs(private.codes.mean()) < 6 / (400 * bits) ** 0.5  # standard errors of a mean of numbers of variance 1


def test_a_run_cannot_be_resumed_without_the_clients_private_states(tmp_path):
    run, again = (federation(NORMED, SPN(lr=0.1)) for _ in range(2))
    run.fit(rounds=2, folder=tmp_path)
    for private in (tmp_path / "clients").glob("*/*.pt"):
        private.unlink()
    with pytest.raises(BadArgument, match="client 0's private state is missing"):
        again.resume(tmp_path)


def test_a_function_takes_class_indices_and_soft_targets_have_the_code_of_their_largest_entry():
    inputs, targets = records((6,))
    hot = F.one_hot(targets, CLASSES).double()
    model, spn = prepared(NETS["mlp"], "cross_entropy")
    true, soft = (spn.step(model, Samples(inputs, rows)) for rows in (hot, 0.4 * hot + 0.15))
    assert torch.equal(true.step, soft.step)
    own = prepared(NETS["mlp"], partial(F.cross_entropy, reduction="none"))[1].step(model, Samples(inputs, targets))
    assert worst(own.gradients, true.gradients) < rounding(model, inputs)


def test_a_single_records_features_are_in_the_clean_gradient():
    model, spn = prepared(NETS["mlp"], weight=1.0)
    inputs, hot = (part[:1] for part in hot_records())
    gradients = spn.upload(spn.step(model, Samples(inputs, hot))).gradients
    seen = gradients["6.weight"] / gradients["6.bias"][:, None]
    features = model[:6](inputs)
    assert worst({"h": seen}, {"h": features.detach().expand_as(seen)}) < 4 * torch.finfo(torch.float64).eps


PAGE = Path(__file__).parents[2].joinpath("docs", "defences", "spn.md").read_text()


@pytest.mark.parametrize("code", ["mlp(63, 1)", "resnet(8)", "resnet(20)"])
def test_bytes_are_those_of_the_page(code):
    model, shape = eval(code, {"mlp": mlp, "resnet": resnet}), (63,) if code.startswith("mlp") else (3, 8, 8)
    spn = Session(SPN(), model, torch.zeros(2, *shape))
    targets = torch.eye(10)[:2] if spn.client.split.outputs > 1 else torch.tensor([0.0, 1.0])
    sent = spn.upload(spn.step(spn.broadcast(model), Samples(torch.randn(2, *shape), targets)))
    down, up, kept = (
        sum(tensor.numel() * tensor.element_size() for tensor in parts.values())
        for parts in (model.state_dict(), {**sent.gradients, **sent.buffers}, spn.client.state(0))
    )
    rows = [line for line in PAGE.splitlines() if line.startswith(f"| `{code}`")]
    assert any(row.endswith(f" | {up:,} | {down:,} | {kept:,} |") for row in rows)


def asking():
    return Network(lambda m, x: m.head(x if x.sum() > 0 else -x), head=nn.Linear(6, CLASSES))


LAST = "SPN needs a model that ends with a Linear that is used only once.*Fix: end the model with"
BODY = "only the last Linear is trained.*Fix: add a trainable hidden layer"


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: nn.Sequential(nn.Linear(6, 5), nn.Linear(5, CLASSES), nn.Softmax(1)), f"^1: {LAST}"),
        (lambda: nn.Sequential(nn.Linear(6, 5), nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 1, 2)), f"^2: {LAST}"),
        (lambda: nn.Sequential(*[nn.Linear(6, 6)] * 2), LAST),
        (asking, f"^Network.*: {LAST}"),
        (lambda: nn.Linear(6, CLASSES), f"^Linear: {BODY}"),
        (lambda: nn.Sequential(nn.Linear(6, CLASSES)), f"^0: {BODY}"),
    ],
    ids=["softmax", "conv", "twice", "untraceable", "bare", "no body"],
)
def test_models_without_body_and_last_linear_are_refused(build, text):
    with pytest.raises(BadArgument, match=f"(?s){text}"):
        prepared((build, (6,)))


def counted(outputs, targets):
    return outputs[:, 0] * targets


@pytest.mark.parametrize(
    ("outputs", "targets", "loss", "want"),
    [
        (1, torch.tensor([0.0, 0.3]), "squared_error", "0 or 1"),
        (1, torch.tensor([[1.0], [2.0]]), "poisson", "0 or 1"),
        (3, torch.tensor([[0.2, -1.0, 1.8], [0.0, 1.0, 0.0]]), "squared_error", "class indices from 0 to 2, or rows"),
        (3, torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 0.0]]), "binary_cross_entropy", "class indices from 0 to 2"),
        (3, torch.tensor([0, 3]), counted, "class indices from 0 to 2"),
        (3, torch.tensor([0.0, 1.0]), counted, "class indices from 0 to 2"),
    ],
    ids=["fraction", "count", "numbers", "several", "beyond", "float index"],
)
def test_targets_that_name_no_class_are_refused(outputs, targets, loss, want):
    data = [(torch.ones(2, 6).double(), targets if not targets.is_floating_point() else targets.double())]
    run = federation((lambda: mlp(6, outputs), (6,)), SPN(), data, loss=loss)
    with pytest.raises(BadArgument, match=rf"(?s)^SPN: client 0's targets must be {want}.*Fix: use"):
        run.step()


def test_states_of_another_model_are_refused(tmp_path):
    federation("mlp", SPN()).fit(rounds=1, folder=tmp_path)
    other = federation("mlp", SPN(bits=8))
    with pytest.raises(BadArgument, match=r"SPN: client 0's head and codes have shapes \(32, 10\) and \(4, 32\), not "):
        other.resume(tmp_path)
