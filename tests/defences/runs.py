"""Defences, and small networks and federations on which each of them is tried."""

import types

import torch
from tests.oracle import batch, built

from fedveil import Entropy
from fedveil.defences import DBCL, PPDL, SPN, Plain, Veil
from fedveil.federation import Federation
from fedveil.models import cnn, mlp, resnet

CLASSES = 4
IMAGE = (3, 8, 8)
NETS = {
    "mlp": (lambda: mlp(6, CLASSES, hidden=10), (6,)),
    "cnn": (lambda: cnn(3, CLASSES, width=2, size=8), IMAGE),
    "resnet, batch": (lambda: resnet(8, 3, CLASSES, width=4), IMAGE),
    "resnet, none": (lambda: resnet(8, 3, CLASSES, width=4, norm="none", shortcut="B"), IMAGE),
}
DEFENCES = {
    "plain": Plain,
    "control": lambda: Plain(rounding=1),
    "veil": lambda: Veil(entropy=Entropy.for_tests(0)),
    "ppdl": lambda: PPDL.from_setting("both", sigma=1e-3, seed=0),
    "dbcl": lambda: DBCL(seed=0),
    "spn": lambda: SPN(seed=0),
}


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1)


def adam(parameters):
    return torch.optim.Adam(parameters, 1e-2)


def records(shape, sizes=(20, 33, 7), classes=True):
    """Records of each client from which a network can learn; targets are classes, or four numbers."""
    found = []
    for client, size in enumerate(sizes):
        inputs, noise = batch(shape, CLASSES, samples=size, seed=client)
        rule = torch.randn(inputs[0].numel(), CLASSES, generator=torch.Generator().manual_seed(99)).double()
        targets = inputs.flatten(1) @ rule / inputs[0].numel() ** 0.5 + 0.1 * noise
        found.append((inputs, targets.argmax(1) if classes else targets))
    return found


def federation(net, defence, clients=None, **options):
    """A federation of one of `NETS`, or of a pair of a builder and the shape of its inputs, in float64."""
    build, shape = NETS.get(net, net) if isinstance(net, str) else net
    clients = records(shape) if clients is None else clients
    return Federation(built(build), clients, defence, **{"optimizer": sgd, "batch_size": 8, **options})


def values(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def loss_before_and_after(run, rounds):
    """The loss of the server's network on all records."""

    def measure():
        with torch.no_grad():
            return float(run.loss.values(run.model.eval()(run.shards.inputs), run.shards.targets).mean())

    before = measure()
    run.model.train()
    run.fit(rounds=rounds)
    return before, measure()


def reachable(thing):
    """Every tensor that can be reached from a thing, through attributes, containers, closures and views."""
    found, seen, todo = [], {}, [thing]
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, type | types.ModuleType | torch.dtype | torch.device | str | bytes):
            continue
        seen[id(one)] = one
        if isinstance(one, torch.Tensor):
            found.append(one)
            todo += [one.grad if one.is_leaf else None, one._base]
        elif isinstance(one, dict):
            todo += [*one, *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            todo += one
        elif isinstance(one, types.FunctionType):
            todo += [cell.cell_contents for cell in one.__closure__ or ()]
        todo.append(getattr(one, "__self__", None))
        todo.append(getattr(one, "__dict__", None))
    return found
