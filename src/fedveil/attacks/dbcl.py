"""The attacker of DBCL: weights change slowly, so the sketches of a few rounds determine them."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedveil.attacks.observed import Observed
from fedveil.attacks.veil import with_values
from fedveil.defences.dbcl import Sketch, SketchedBroadcast, SketchedLayer

STEPS = 500
SETTLED = 1e-12  # of the squared right-hand side


def solve_sketches(sketches: Sequence[Sketch], seen: Sequence[Tensor], steps: int = STEPS) -> Tensor:
    """min_W sum_t |W S_t - W~_t|^2 over rounds t, by conjugate gradients from 0: the solution of least norm."""
    wanted = torch.stack([sketch.up(small) for sketch, small in zip(sketches, seen, strict=True)]).sum(0)
    weight = torch.zeros_like(wanted)
    left, way = wanted.clone(), wanted.clone()
    size = (left * left).sum()
    enough = SETTLED * float(size)
    for _ in range(steps):
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
    networks: list[nn.Module] = [seen.broadcast.network for seen in observed.rounds]
    values = {name: tensor.detach() for name, tensor in networks[-1].state_dict().items()}
    for path, module in networks[-1].named_modules():
        if not isinstance(module, SketchedLayer):
            continue
        layers = [network.get_submodule(path) for network in networks]
        sketches = [layer.sketch.map(_double) for layer in layers]  # type: ignore[union-attr,operator]
        seen = [layer.weight.detach().double() for layer in layers]  # type: ignore[operator]
        name = f"{path}.weight" if path else "weight"
        shape = observed.architecture.get_parameter(name).shape
        values[name] = solve_sketches(sketches, seen).reshape(shape).to(values[name].dtype)
    return dataclasses.replace(observed, model=with_values(observed.architecture, values))


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
