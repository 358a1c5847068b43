"""The attacker of DBCL: weights change slowly, so the sketches of a few rounds determine them."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from fedveil.attacks.leaks import sketched_layers
from fedveil.attacks.observed import Observed
from fedveil.attacks.veil import with_values
from fedveil.defences.dbcl import Sketch, SketchedBroadcast

STEPS = 500
SETTLED = 1e-12  # of the squared right-hand side


def solve_sketches(sketches: Sequence[Sketch], seen: Sequence[Tensor]) -> Tensor:
    """Solve W S_t = W~_t over all rounds t: min_W sum_t |W S_t - W~_t|^2, by conjugate gradients.

    If there are several solutions (fewer rounds than about q), the one of least norm, since the search starts at 0.
    """
    wanted = torch.stack([sketch.up(small) for sketch, small in zip(sketches, seen, strict=True)]).sum(0)
    weight = torch.zeros_like(wanted)
    left, way = wanted.clone(), wanted.clone()
    size = (left * left).sum()
    enough = SETTLED * float(size)
    for _ in range(STEPS):
        if float(size) <= enough:
            break
        ahead = torch.stack([sketch.up(sketch.down(way)) for sketch in sketches]).sum(0)
        step = size / (way * ahead).sum()
        weight, left = weight + step * way, left - step * ahead
        before, size = size, (left * left).sum()
        way = left + (size / before) * way
    return weight


def stacked(observed: Observed) -> Observed:
    """The model that fits the sketches of all rounds; biases, norms and unsketched layers from the last broadcast."""
    if not all(isinstance(seen.broadcast, SketchedBroadcast) for seen in observed.rounds):
        return observed
    rounds = [dict(sketched_layers(seen.broadcast.network)) for seen in observed.rounds]
    values = dict(observed.rounds[-1].broadcast.network.state_dict())
    for name in rounds[-1]:
        layers = [found[name] for found in rounds]
        weights = [layer.weight.detach().double() for layer in layers]
        sketches = [layer.sketch.to(weight) for layer, weight in zip(layers, weights, strict=True)]
        shape = observed.architecture.get_parameter(name).shape
        values[name] = solve_sketches(sketches, weights).reshape(shape).to(values[name].dtype)
    return dataclasses.replace(observed, model=with_values(observed.architecture, values))
