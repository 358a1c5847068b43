"""The network and the clients' records of the test app, whatever engine it runs on."""

import itertools

import torch

from fedveil.models import mlp

SIZES = (60, 40, 50, 30)


def make_model(config):
    """The same values wherever it is built."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return mlp(64, 10, hidden=32).to(torch.float32 if config["net"] == "mlp32" else torch.float64)


def parts():
    """Four clients' digits, whose classes a model can learn; most tests take the first three."""
    from fedveil.data import load

    data = load("digits")
    ends = torch.tensor([0, *SIZES]).cumsum(0).tolist()
    rows = [slice(a, b) for a, b in itertools.pairwise(ends)]
    return [(data.train.inputs[r].double(), data.train.targets[r]) for r in rows]
