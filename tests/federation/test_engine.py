"""Training together: who takes which batch, what the server makes of it."""

import copy

import pytest
import torch
from tests.oracle import built, squared_error, worst
from torch import nn

from fedveil import Entropy
from fedveil.defences import Plain, Veil
from fedveil.federation import Federation
from fedveil.federation.local import LocalEngine
from fedveil.models import mlp


def parts(sizes=(20, 33, 7), classes=None):
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(n, 6, generator=generator, dtype=torch.float64) for n in sizes]
    if classes:
        return [(x, torch.randint(0, classes, (len(x),), generator=generator)) for x in inputs]
    return [(x, torch.randn(len(x), 4, generator=generator, dtype=torch.float64)) for x in inputs]


def net():
    return built(lambda: mlp(6, 4, hidden=10))


def normed():
    return built(lambda: nn.Sequential(nn.Linear(6, 10, bias=False), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 4)))


def veil(seed=0, **noise):
    return Veil(entropy=Entropy.for_tests(seed), **noise)


def values(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if tensor.is_floating_point()}


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1)


def trained(build, defence, clients=None, rounds=10, **options):
    model = build()
    federation = Federation(model, clients or parts(), defence, sgd, batch_size=8, **options)
    federation.fit(rounds=rounds)
    return values(model)


def test_a_plain_round_is_a_step_along_the_weighted_mean_of_the_clients_gradients():
    model, data = net(), parts()
    federation = Federation(model, data, "plain", sgd, batch_size=8)
    start = copy.deepcopy(model)
    rows = [federation.shards.rows(client, 0) for client in range(3)]
    expected = {name: torch.zeros_like(p) for name, p in start.named_parameters()}
    for client, chosen in enumerate(rows):
        loss = squared_error(start(federation.shards.inputs[chosen]), federation.shards.targets[chosen])
        for (name, _), g in zip(
            start.named_parameters(), torch.autograd.grad(loss, list(start.parameters())), strict=True
        ):
            expected[name] += len(data[client][0]) / 60 * g
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
@pytest.mark.parametrize(
    "options",
    [{}, {"fuse": False}, {"whole_shard": True}, {"participation": 0.5}],
    ids=["fused", "apart", "shard", "part"],
)
def test_a_veiled_run_is_the_plain_run(build, options):
    plain = trained(build, "plain", **options)
    assert worst(trained(build, veil(groups=2, additive=100.0), **options), plain) < 1e-9


@pytest.mark.parametrize("defence", [Plain, veil])
def test_fused_clients_give_what_single_ones_give(defence):
    assert worst(trained(net, defence(), fuse=True), trained(net, defence(), fuse=False)) < 1e-12


def test_batch_norm_keeps_clients_apart_unless_it_uses_stored_statistics():
    assert not Federation(normed(), parts(), "plain").clients.fused
    assert Federation(normed().eval(), parts(), "plain").clients.fused
    assert not Federation(net(), parts(), "plain", fuse=False).clients.fused


def test_a_whole_shard_in_batches_is_one_gradient_over_all_records():
    small = trained(net, "plain", whole_shard=True, rounds=3)
    model = net()
    Federation(model, parts(), "plain", sgd, batch_size=100).fit(rounds=3)
    assert worst(values(model), small) < 1e-12


def test_every_record_is_taken_once_an_epoch_in_another_order():
    shards = Federation(net(), parts((20,)), "plain", batch_size=8).shards
    epochs = [torch.cat([shards.rows(0, number) for number in range(3 * e, 3 * e + 3)]) for e in range(2)]
    assert all(sorted(rows.tolist()) == list(range(20)) for rows in epochs)
    assert not torch.equal(*epochs)


def test_a_hundred_clients_of_one_record_each_train():
    model = net()
    Federation(model, parts((1,) * 100), veil(), sgd).fit(rounds=2)
    plain = net()
    Federation(plain, parts((1,) * 100), "plain", sgd).fit(rounds=2)
    assert worst(values(model), values(plain)) < 1e-9


def test_the_best_model_is_kept():
    data = parts(classes=4)
    federation = Federation(net(), data, "plain", sgd)
    history = federation.fit(10, test=data[0])
    best, state = federation.best
    assert best == max(value for _, value in history.curve("accuracy"))
    assert set(state) == set(federation.model.state_dict())


def test_a_rounding_control_parts_from_plain_by_rounding():
    control, plain = trained(net, Plain(rounding=1)), trained(net, "plain")
    assert 0 < worst(control, plain) < 1e-13


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
    runs = [Federation(net(), parts((5,) * 10), "plain", participation=0.3, seed=seed) for seed in (3, 3, 4)]
    for run in runs:
        run.use_engine(Keeping(run.clients))
        run.fit(rounds=50)
    first, again, other = (run.clients.chosen for run in runs)
    assert first == again != other
    assert {len(set(chosen)) for chosen in first} == {3}
    assert set(range(10)) == {client for chosen in first for client in chosen}
