"""A run over Flower is the run of one process, for every defence."""

import copy

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedveil[flower]'")

from tests.federation.test_local import words
from tests.flower.grid import LocalGrid, parts
from tests.forms import FORMS, Words, network, records, reformed
from tests.oracle import built, worst
from torch import nn

from fedveil import Entropy
from fedveil.defences import DBCL, PPDL, SPN, Plain, Veil, dbcl
from fedveil.errors import BadArgument
from fedveil.federation import Federation
from fedveil.federation.client import ClientState
from fedveil.federation.evaluate import slice_inputs
from fedveil.flower import Server, answer, client, client_app
from fedveil.models import mlp
from fedveil.secagg import Identity, Memory, Party, Policy, Roster

ROUNDS = 5


def net():
    return built(lambda: mlp(6, 4, hidden=10))


def normed():
    return built(lambda: nn.Sequential(nn.Linear(6, 10, bias=False), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 4)))


def adam(parameters):
    return torch.optim.Adam(parameters, 1e-2)


def falling(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def app_of(data, build=net, **options):
    return client_app(lambda _: build(), lambda context: data[int(context.node_config["partition-id"])], **options)


def values(model):
    return {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}


def on_flower(defence, data, build=net, app=None, rounds=ROUNDS, example=None, **options):
    grid = LocalGrid(app or app_of(data, build), len(data))
    options = {"loss": "squared_error", "schedule": falling, **options}
    example = slice_inputs(data[0][0], 0, 2) if example is None else example
    server = Server(grid, build(), example, defence, adam, **options)
    server.fit(rounds=rounds)
    return server


def in_engine(defence, data, build=net, rounds=ROUNDS, **options):
    options = {"loss": "squared_error", "schedule": falling, "whole_shard": True, "fuse": False, **options}
    run = Federation(build(), data, defence, adam, **options)
    run.fit(rounds=rounds)
    return run


@pytest.mark.parametrize("build", [net, normed])
@pytest.mark.parametrize(
    "make",
    [
        Plain,
        lambda: Plain(local_epochs=2, local_lr=0.05, local_momentum=0.5),
        lambda: Veil(groups=2, additive=100.0),
        lambda: PPDL(0.1),
        lambda: PPDL(0.9),
        lambda: PPDL(1.0),
    ],
    ids=["plain", "local training", "veil", "ppdl a tenth", "ppdl most", "ppdl all"],
)
def test_whole_shards_over_flower_are_those_of_the_engine(make, build):
    data = parts()
    ours = on_flower(make(), data, build, batch_size=8)
    theirs = in_engine(make(), data, build, batch_size=8)
    assert worst(values(ours.model), values(theirs.model)) < 1e-9
    assert ours.optimizer.param_groups[0]["lr"] == theirs.optimizer.param_groups[0]["lr"] == 1e-2 / 4


def test_batches_over_flower_are_those_of_the_engine():
    data = parts((30, 21, 24))
    ours = on_flower("veil", data, whole_shard=False, batch_size=8, rounds_per_epoch=4, seed=3, rounds=9)
    theirs = in_engine("plain", data, whole_shard=False, batch_size=8, seed=3, rounds=9)
    assert theirs.rounds_per_epoch == 4
    assert worst(values(ours.model), values(theirs.model)) < 1e-9


def own_loss(outputs, targets):
    return (outputs - targets).pow(4).sum(1)


@pytest.mark.parametrize("defence", ["plain", "veil"])
def test_a_loss_of_the_users_own_is_given_to_both_sides(defence):
    data = parts()
    ours = on_flower(defence, data, loss=own_loss, app=app_of(data, loss=own_loss))
    theirs = in_engine("plain", data, loss=own_loss)
    assert worst(values(ours.model), values(theirs.model)) < 1e-4
    with pytest.raises(Exception, match="is a custom function"):
        on_flower(defence, data, loss=own_loss, attempts=1)


def test_dbcl_over_flower_is_that_of_the_engine(monkeypatch):
    data, drawn = parts(), []

    def same_in_both(seed=None):
        drawn.append(seed)
        return np.random.Generator(np.random.PCG64(len(drawn) % ROUNDS))

    monkeypatch.setattr(dbcl.np.random, "default_rng", same_in_both)
    ours = on_flower(DBCL(), data, batch_size=8)
    theirs = in_engine(DBCL(), data, batch_size=8)
    assert len(drawn) == 2 * ROUNDS
    assert worst(values(ours.model), values(theirs.model)) < 1e-9


@pytest.mark.parametrize("on_disk", [False, True], ids=["context", "disk"])
@pytest.mark.parametrize(
    "make", [lambda **seed: SPN(lr=1e-2, **seed), lambda **seed: PPDL(0.5, 1e-2, "median", **seed)], ids=["spn", "ppdl"]
)
def test_clients_keep_their_private_state_where_it_belongs(make, on_disk, tmp_path):
    """Each node begins with the state that the engine's client has, and must end with the same."""
    data = parts(classes=4)
    engine = Federation(net(), data, make(seed=7), adam, schedule=falling, loss="squared_error", whole_shard=True)
    first = Federation(net(), data, make(seed=7), adam, loss="squared_error", whole_shard=True)
    first.step()  # draws each client's state
    states = [first.clients.client.state(k) for k in range(3)]
    for k, state in enumerate(states):
        engine.clients.client.restore(k, copy.deepcopy(state))
    engine.fit(rounds=ROUNDS)

    app = app_of(data, folder=lambda _: tmp_path) if on_disk else app_of(data)
    grid = LocalGrid(app, 3)
    for k, (context, state) in enumerate(zip(grid.contexts.values(), states, strict=True)):
        file = tmp_path / f"fedveil-client-{k}.pt" if on_disk else None
        client._save_state(ClientState(private=state), context, file)
    server = Server(grid, net(), data[0][0][:2], make(), adam, schedule=falling, loss="squared_error")
    server.fit(rounds=ROUNDS)
    assert worst(values(server.model), values(engine.model)) < 1e-9
    assert len(list(tmp_path.iterdir())) == (3 if on_disk else 0)
    sent = grid.sent_bytes()
    for k in range(3):
        own = next(v for v in engine.clients.client.state(k).values() if isinstance(v, torch.Tensor))
        assert own.numpy().tobytes()[:64] not in sent


@pytest.mark.parametrize(
    "defence",
    [Veil(entropy=Entropy.for_tests(1)), PPDL(seed=1), SPN(seed=1), DBCL(seed=1)],
    ids=["veil", "ppdl", "spn", "dbcl"],
)
def test_a_server_and_a_client_on_a_network_refuse_test_entropy(defence):
    data = parts(classes=4)
    with pytest.raises(BadArgument, match="draws from a test seed, but this server communicates over a network"):
        Server(LocalGrid(app_of(data), 3), net(), data[0][0][:2], defence, loss="squared_error")
    honest = {"veil": Veil, "ppdl-": PPDL, "ppdl": PPDL, "dbcl": DBCL}.get(defence.name, SPN)()
    with pytest.raises(Exception, match="with a seed is for tests"):
        on_flower(honest, data, app=app_of(data, defence=lambda: defence), attempts=1)


def test_a_client_may_insist_on_its_own_noise():
    data = parts()
    quiet = on_flower(PPDL(1.0, 0.0), data, rounds=1)
    noisy = on_flower(PPDL(1.0, 0.0), data, rounds=1, app=app_of(data, defence=lambda: PPDL(1.0, 5.0)))
    assert worst(values(noisy.model), values(quiet.model)) > 1e-3
    with pytest.raises(Exception, match="this client requires 'ppdl'"):
        on_flower("plain", data, app=app_of(data, defence=lambda: PPDL()), attempts=1)


def test_single_precision_travels_as_such():
    data = parts(dtype=torch.float32)
    ours = on_flower("veil", data, lambda: net().float())
    theirs = in_engine("plain", data, lambda: net().float())
    assert worst(values(ours.model), values(theirs.model)) < 1e-4  # Adam divides 1e-7 by gradients that are near 0
    record = ours.history.records[-1]
    count = sum(p.numel() for p in net().parameters())
    assert 3 * 4 * count < record["bytes_up"] < 3 * 4 * count + 1000  # G^, sigma~ and beta
    assert 4 * count < record["bytes_down"] < 4 * count + 2500
    assert record["bytes_total"] == 3 * (record["bytes_down"] + record["bytes_up"])


@pytest.mark.parametrize(
    ("defence", "form"),
    [
        *[("plain", "tuple"), ("plain", "dict"), ("plain", "nested")],
        *[("veil", "tuple"), ("veil", "dict"), ("spn", "dict"), ("dbcl", "tuple")],
    ],
)
def test_every_form_travels_nowhere_and_trains_as_in_one_process(defence, form):
    kind, change = FORMS[form]
    data = reformed(records((10, 14, 9), classes=True), change)
    server = on_flower(defence, data, lambda: network(kind), rounds=3, batch_size=8)
    if defence in ("plain", "veil"):
        engine = in_engine("plain", data, lambda: network(kind), rounds=3, batch_size=8)
        assert worst(values(server.model), values(engine.model)) < 1e-9
    assert [record["answers"] for record in server.history.records] == [3] * 3
    sent = server.engine.transport.grid.sent_bytes()
    assert records((10, 14, 9))[0][0][0, :2].numpy().tobytes() not in sent


def test_token_ids_stay_whole_and_numbers_take_the_models_dtype():
    def single():
        return built(Words, dtype=torch.float32)

    data = words((5, 9))
    short = [({"ids": x["ids"], "numbers": x["numbers"].float()}, y) for x, y in data]
    options = {"loss": "cross_entropy", "batch_size": 8}
    server = on_flower("plain", data, single, example=short[0][0], **options)
    assert worst(values(server.model), values(in_engine("plain", short, single, **options).model)) < 1e-5


@pytest.mark.parametrize("stay", [True, False])
def test_nodes_under_secure_aggregation_keep_their_party_or_go_on_from_its_file(stay, tmp_path):
    """Stock SuperNodes do not stay: nothing but files is left from one message to the next."""
    data, operator = parts((30, 20, 25, 15)), Identity.new("server")
    found = [Identity.new(f"node-{k}") for k in range(4)]
    roster = Roster({own.name: own.public() for own in found})
    policy = Policy(server=operator.public(), min_records=10)

    def party(context, memory=None):
        return Party(found[int(context.node_config["partition-id"])], roster, memory, policy=policy)

    def app(message, context):
        own = party(context, Memory(tmp_path / f"{context.node_id}.memory"))
        return answer(message, context, net(), data[int(context.node_config["partition-id"])], party=own)

    app = app_of(data, party=party) if stay else app
    options = {"secure_aggregation": roster, "identity": operator, "batch_size": 8, "timeout": 5.0}
    server = on_flower("veil", data, app=app, rounds=3, **options)
    assert [record["answers"] for record in server.history.records] == [4] * 3
    assert worst(values(server.model), values(in_engine("plain", data, rounds=3, batch_size=8).model)) < 1e-6
