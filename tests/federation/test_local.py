"""Training together: who takes which batch, with which loss, on inputs of any form, and what the server makes of it."""

import copy

import pytest
import torch
from tests.configs import config_of
from tests.federation.secured import net, normed
from tests.forms import FORMS, Apart, Whole, Words, network, pooled_descent, reformed
from tests.forms import records as parts
from tests.oracle import Network, built, plain, worst
from tests.sessions import Session
from torch import nn

from fedveil import BatchLoss, CrossEntropy, Entropy, Federation
from fedveil.defences import Plain, Samples, Veil
from fedveil.errors import BadArgument
from fedveil.federation.evaluate import predict
from fedveil.federation.local import LocalEngine
from fedveil.models import mlp
from fedveil.runs.folder import train

OPTIONS = [{}, {"fuse": False}, {"whole_shard": True}, {"participation": 0.5}]


def veil(seed=0, **noise):
    return Veil(entropy=Entropy.for_tests(seed), **noise)


def values(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if tensor.is_floating_point()}


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1)


def trained(build, defence, clients=None, rounds=10, batch_size=8, **options):
    model = build()
    federation = Federation(model, clients or parts(), defence, sgd, batch_size=batch_size, **options)
    federation.fit(rounds=rounds)
    return values(model)


def test_a_plain_round_is_a_step_along_the_weighted_mean_of_the_clients_gradients():
    model, data = net(), parts()
    federation = Federation(model, data, "plain", sgd, batch_size=8)
    start = copy.deepcopy(model)
    rows = [federation.shards.rows(client, 0) for client in range(3)]
    expected = {name: torch.zeros_like(p) for name, p in start.named_parameters()}
    for client, chosen in enumerate(rows):
        gradients, _ = plain(start, federation.shards.inputs[chosen], federation.shards.targets[chosen])
        for name, gradient in gradients.items():
            expected[name] += len(data[client][0]) / 60 * gradient
    federation.step()
    for name, parameter in start.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name], parameter - 0.1 * expected[name])


def test_one_client_is_central_training_bit_for_bit():
    model, (data,) = net(), parts((40,))
    federation = Federation(model, [data], "plain", sgd, batch_size=8, fuse=False)
    central = copy.deepcopy(model)
    optimizer = sgd(central.parameters())
    for number in range(7):
        rows = federation.shards.rows(0, number)
        optimizer.zero_grad()
        outputs = central(data[0][rows])
        outputs.backward((outputs.detach() - data[1][rows]) * (1 / len(rows)))
        optimizer.step()
    federation.fit(rounds=7)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), central.parameters(), strict=True))


@pytest.mark.parametrize("build", [net, normed])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_veiled_run_is_the_plain_run(build, options):
    expected = trained(build, "plain", **options)
    assert worst(trained(build, veil(groups=2, additive=100.0), **options), expected) < 1e-9


@pytest.mark.parametrize("defence", [Plain, veil])
def test_fused_clients_give_what_single_ones_give(defence):
    assert worst(trained(net, defence(), fuse=True), trained(net, defence(), fuse=False)) < 1e-12


def test_clients_are_fused_unless_the_model_or_the_loss_couples_samples():
    assert not Federation(normed(), parts(), "plain").clients.fused
    assert Federation(normed().eval(), parts(), "plain").clients.fused
    assert not Federation(net(), parts(), "plain", fuse=False).clients.fused
    assert not Federation(net(), parts(classes=True), "veil", loss=BatchLoss(ranked)).clients.fused
    assert Federation(net(), parts(classes=True), "veil", loss="cross_entropy").clients.fused


def test_a_whole_shard_in_batches_is_one_gradient_over_all_records():
    whole = trained(net, "plain", batch_size=100, rounds=3)
    assert worst(trained(net, "plain", whole_shard=True, rounds=3), whole) < 1e-12


def test_every_record_is_taken_once_an_epoch_in_another_order():
    shards = Federation(net(), parts((20,)), "plain", batch_size=8).shards
    epochs = [torch.cat([shards.rows(0, number) for number in range(3 * e, 3 * e + 3)]) for e in range(2)]
    assert all(sorted(rows.tolist()) == list(range(20)) for rows in epochs)
    assert not torch.equal(*epochs)


def test_a_hundred_clients_of_one_record_each_train():
    veiled, expected = (trained(net, defence, parts((1,) * 100), rounds=2) for defence in (veil(), "plain"))
    assert worst(veiled, expected) < 1e-9


def test_the_best_model_is_kept():
    data = parts(classes=True)
    federation = Federation(net(), data, "plain", sgd)
    history = federation.fit(10, test=data[0])
    best, state = federation.best
    assert best == max(value for _, value in history.curve("accuracy"))
    assert set(state) == set(federation.model.state_dict())


def test_a_rounding_control_parts_from_plain_by_rounding():
    assert 0 < worst(trained(net, Plain(rounding=1)), trained(net, "plain")) < 1e-13


class Keeping(LocalEngine):
    """Keeps the first broadcast with copies of its values, and who took part in each round."""

    def __init__(self, own):
        super().__init__(own.client, own.shards, own.dtype, whole_shard=False, fused=False)
        self.kept, self.chosen = None, []

    def updates(self, broadcast, clients, number):
        self.chosen.append(tuple(clients))
        self.kept = self.kept or (broadcast, {k: v.clone() for k, v in broadcast.parameters.items()})
        return super().updates(broadcast, clients, number)


def test_a_broadcast_that_a_subclass_keeps_is_not_overwritten():
    data = [(torch.randn(8, 300), torch.randn(8, 4)) for _ in range(2)]
    run = Federation(mlp(300, 4, hidden=200), data, Veil(), batch_size=4)
    run.use_engine(Keeping(run.clients))
    run.fit(rounds=3)
    broadcast, copies = run.clients.kept
    assert all(torch.equal(broadcast.parameters[name], value) for name, value in copies.items())


def test_clients_of_a_round_are_chosen_by_seed_and_number():
    runs = [Federation(net(), parts((5,) * 10), "veil", participation=0.3, seed=seed) for seed in (3, 3, 4)]
    for run in runs:
        run.use_engine(Keeping(run.clients))
        run.fit(rounds=50)
    first, again, other = (run.clients.chosen for run in runs)
    assert first == again != other
    assert {len(set(chosen)) for chosen in first} == {3}
    assert set(range(10)) == {client for chosen in first for client in chosen}


TENTH = 1e-6  # ten rounds whose gradients are off by at most 1e-6 each, steps of 0.1


@pytest.mark.parametrize("build", [net, normed], ids=["MLP", "BatchNorm"])
@pytest.mark.parametrize("options", [{}, {"fuse": False}, {"whole_shard": True}], ids=str)
@pytest.mark.parametrize("loss", ["cross_entropy", CrossEntropy(label_smoothing=0.1, weight=(1, 2, 1, 3))])
def test_a_veiled_run_with_cross_entropy_is_the_plain_one(build, loss, options):
    data = parts(classes=True)
    expected = trained(build, Plain(), data, loss=loss, **options)
    for settings in ({}, {"decoys": 1, "groups": 4}):
        assert worst(trained(build, veil(**settings), data, loss=loss, **options), expected) < TENTH


def ranked(outputs, targets):
    """A number for the batch: each pair of samples in the order of their targets, by a margin."""
    ahead = (targets.unsqueeze(0) > targets.unsqueeze(1)).to(outputs.dtype)
    behind = (1 - outputs[:, 0].unsqueeze(0) + outputs[:, 0].unsqueeze(1)).relu()
    return (ahead * behind).sum() / ahead.sum().clamp(min=1)


@pytest.mark.parametrize("whole_shard", [False, True])
def test_a_loss_of_the_whole_batch_is_plain_federated_training(whole_shard):
    how = {"clients": parts(classes=True), "loss": BatchLoss(ranked), "whole_shard": whole_shard}
    assert worst(trained(net, veil(), **how), trained(net, Plain(), **how)) < TENTH


def test_a_loss_of_the_whole_batch_takes_no_weights_of_samples():
    inputs, targets = (own[:4] for own in parts(classes=True)[0])
    for defence in (Plain(), veil()):
        session = Session(defence, net(), inputs, BatchLoss(ranked))
        with pytest.raises(BadArgument, match="ranked compares samples of a batch with each other"):
            session.step(session.broadcast(), Samples(inputs, targets, torch.tensor([0.3, 0.3, 0.2, 0.2]).double()))


def test_a_users_function_gets_targets_as_they_are():
    def loss(outputs, targets):
        assert targets.dtype == torch.int64
        return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")

    data = parts(classes=True)
    own = trained(net, veil(), data, loss=loss)
    assert worst(own, trained(net, Plain(), data, loss="cross_entropy")) < TENTH


def test_binary_cross_entropy_takes_classes_and_numbers():
    inputs = parts()[0][0]
    yes = (inputs[:, 0] > 0).long()
    for targets in (yes, yes.double(), yes.double().unsqueeze(1)):
        model = built(lambda: mlp(6, 1, hidden=10))
        federation = Federation(model, [(inputs, targets)], veil(), sgd, loss="binary_cross_entropy")
        assert federation.fit(20, test=(inputs, targets)).last["accuracy"] > 0.5


def test_smoothing_is_cross_entropys(tmp_path):
    with pytest.raises(BadArgument, match="label_smoothing does not apply"):
        train(config_of(data="diabetes", epochs=1, label_smoothing=0.1), tmp_path)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_inputs_is_the_run_with_one_tensor(form, options):
    kind, change = FORMS[form]
    clients, expected = reformed(parts(), change), trained(lambda: network(Whole), "plain", **options)
    for defence, most in (("plain", 1e-13), (veil(groups=2, additive=100.0), 1e-9)):
        assert worst(trained(lambda: network(kind), defence, clients, **options), expected) < most


def words(sizes=(5, 9, 3), classes=4):
    generator = torch.Generator().manual_seed(1)
    found = []
    for size in sizes:
        numbers = torch.randn(size, 6, generator=generator, dtype=torch.float64)
        ids = torch.randint(0, 7, (size, 3), generator=generator)
        found.append(({"ids": ids, "numbers": numbers}, torch.randint(0, classes, (size, 3), generator=generator)))
    return found


def test_token_ids_reach_the_model_as_whole_numbers_and_train_as_on_one_machine():
    clients = words()
    found = Federation(built(Words), clients, "plain", sgd, loss="cross_entropy")
    found.fit(rounds=5)
    pooled = [torch.cat([inputs[name] for inputs, _ in clients]) for name in ("numbers", "ids")]

    def loss(outputs, targets):
        return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")

    expected = pooled_descent(built(Words), pooled, torch.cat([y for _, y in clients]), loss, 5, 0.1)
    assert worst(values(found.model), expected) < 1e-12
    assert found.shards.inputs["ids"].dtype == torch.int64


def test_answers_come_in_batches_and_in_order():
    (inputs, _), model = words((10,))[0], built(Words)
    for batch_size in (3, 10, 1000):
        torch.testing.assert_close(predict(model, inputs, batch_size=batch_size), model(**inputs).detach())


def test_keys_in_another_order_are_the_same_form():
    clients = words()
    inputs, targets = clients[1]
    mixed = [clients[0], (dict(reversed(inputs.items())), targets), clients[2]]
    assert list(mixed[0][0]) != list(mixed[1][0])
    found, same = (trained(lambda: built(Words), "plain", own, loss="cross_entropy") for own in (clients, mixed))
    assert worst(same, found) < 1e-13


def test_a_parameter_that_a_form_leaves_unused_keeps_its_value():
    class Spare(Apart):
        def __init__(self):
            super().__init__()
            self.spare = nn.Linear(2, 2)

    found = trained(lambda: network(Spare), "plain", reformed(parts(), FORMS["dict"][1]))
    assert torch.equal(found["spare.weight"], network(Spare).spare.weight)
    assert not torch.equal(found["net.0.weight"], network(Spare).net[0].weight)


def test_a_model_that_returns_several_tensors_is_refused():
    several = Network(lambda own, x: {"a": own.net(x), "b": own.net(x)}, net=net())
    with pytest.raises(
        BadArgument, match="Network: its forward method returns a dict with several floating-point tensors"
    ):
        trained(lambda: several, "plain")
