"""Federations under secure aggregation over an engine in this process, with keys and policies."""

import torch
from tests.engines import Loopback, LoopbackServer, member
from tests.oracle import built
from torch import nn

from fedveil import Federation
from fedveil.models import mlp
from fedveil.secagg import Identity, Party, Policy, Roster

SIZES = (30, 20, 25, 13, 28)
NAMES = tuple(f"site-{k}" for k in range(len(SIZES)))
SERVER = Identity.new("server")
POLICY = Policy(server=SERVER.public(), min_records=1)


def net():
    return built(lambda: mlp(6, 4, hidden=10))


def normed():
    return built(lambda: nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 4)))


def adam(parameters):
    return torch.optim.Adam(parameters, 1e-2)


def parts(sizes=SIZES):
    draw = torch.Generator().manual_seed(0)
    return [(torch.randn(n, 6, generator=draw).double(), torch.randint(4, (n,), generator=draw)) for n in sizes]


def floats(model):
    return {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}


def parties(names=NAMES, kinds=None, policy=POLICY):
    """Parties that know one another; `kinds` has the classes of those that are not honest."""
    identities = [Identity.new(name) for name in names]
    roster = Roster({own.name: own.public() for own in identities})
    return {own.name: (kinds or {}).get(own.name, Party)(own, roster, policy=policy) for own in identities}


def roster_of(known):
    return next(party._roster for party in known.values() if party is not None)


def server_of(defence="veil", faults=None, build=net, known=None, sizes=SIZES, **options):
    """A server whose clients are those of `known`, one for each size."""
    known, data = known or parties(), parts(sizes)
    members = {f"site-{k}": member(build, own, k, known.get(f"site-{k}")) for k, own in enumerate(data)}
    options = {"secure_aggregation": roster_of(known), "identity": SERVER, **options}
    how = {"loss": "squared_error", "timeout": 1.0, "pause": 0.0, "attempts": 4, "patience": 0.2, "batch_size": 8}
    return LoopbackServer(Loopback(members, faults), build(), data[0][0][:2], defence, adam, **how | options)


def plain_of(rounds, clients=None, build=net, sizes=SIZES, **options):
    """The parameters of plain training with some of the clients, all of whose records count."""
    options = {"loss": "squared_error", "whole_shard": True, "batch_size": 8, "fuse": False, **options}
    chosen = [parts(sizes)[k] for k in (range(len(sizes)) if clients is None else clients)]
    run = Federation(build(), chosen, "plain", adam, **options)
    run.fit(rounds=rounds)
    return floats(run.model)
