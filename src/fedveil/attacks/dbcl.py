"""Attacks on DBCL: sketches from a few rounds determine the weights, and changes in the weights reveal a record."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from fedveil.attacks.first_layer import first_linear
from fedveil.attacks.leaked_gradients import own_gradients, sketched_layers
from fedveil.attacks.observation import DoesNotApply, Observation, copy_with_values
from fedveil.defences.dbcl import Sketch, SketchedBroadcast, SketchedLayer

STEPS = 500  # maximum number of steps of conjugate gradients
SETTLED = 1e-12  # tolerance, relative to the squared norm of the right-hand side
RANK = 1e-10  # rank tolerance of the normal equations; directions that no round reveals are ignored
MAX_INPUTS = 1024  # maximum number of inputs of a first layer, since the solver uses dense matrices


def solve_sketches(sketches: Sequence[Sketch], sketched_weights: Sequence[Tensor]) -> Tensor:
    """Minimise sum_t |W S_t - W~_t|^2 over W by conjugate gradients, where t runs over all rounds.

    With fewer than about q rounds, the solution is not unique. The one with the smallest norm is returned, since the
    search starts at 0.
    """
    residual = torch.stack(
        [sketch.back_project(small) for sketch, small in zip(sketches, sketched_weights, strict=True)]
    ).sum(0)
    weight, direction = torch.zeros_like(residual), residual
    energy = (residual * residual).sum()
    tolerance = SETTLED * float(energy)
    for _ in range(STEPS):
        if float(energy) <= tolerance:
            break
        image = torch.stack([sketch.back_project(sketch.project(direction)) for sketch in sketches]).sum(0)
        step = energy / (direction * image).sum()
        weight, residual = weight + step * direction, residual - step * image
        before, energy = energy, (residual * residual).sum()
        direction = residual + (energy / before) * direction
    return weight


def stack_sketches(observed: Observation) -> Observation:
    """Fit a model to the sketches of all rounds; tensors that are not sketched come from the last broadcast."""
    sent = [seen.broadcast.network for seen in observed.rounds if isinstance(seen.broadcast, SketchedBroadcast)]
    if len(sent) < len(observed.rounds):
        return observed
    rounds = [dict(sketched_layers(network)) for network in sent]
    values = dict(sent[-1].state_dict())
    for name in rounds[-1]:
        layers = [tensors[name] for tensors in rounds]
        weights = [layer.weight.detach().double() for layer in layers]
        sketches = [layer.sketch.to(weight) for layer, weight in zip(layers, weights, strict=True)]
        shape = observed.architecture.get_parameter(name).shape
        values[name] = solve_sketches(sketches, weights).reshape(shape).to(values[name].dtype)
    return dataclasses.replace(observed, model=copy_with_values(observed.architecture, values))


def observe_first_layer(observed: Observation) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Return what the broadcasts reveal about the first layer, in float64.

    The result consists of the sketches S_t, each with shape (inputs, buckets); the sketched weights, without the
    changes that the attacker's own uploads caused since the first round; and the victim's delta_t, with shape
    (rounds - 1, units), which is derived from the bias, since biases are not sketched.
    """
    path, rate, share = first_linear(observed.architecture), observed.learning_rate, observed.share
    result = [seen.model.get_submodule(path) for seen in observed.rounds]
    layers = [layer for layer in result if isinstance(layer, SketchedLayer)]
    if len(layers) < len(result):
        raise DoesNotApply("dbcl", "the first layer is not sketched")
    eye = torch.eye(layers[0].sketch.fan_in, dtype=torch.float64)
    sketches = [layer.sketch.to(eye).project(eye) for layer in layers]
    biases = torch.stack([layer.bias.detach().double().cpu() for layer in layers if layer.bias is not None])
    own_updates = [own_gradients(observed, seen) for seen in observed.rounds[:-1]]
    own_biases = torch.stack([gradients[f"{path}.bias"].double().cpu() for gradients in own_updates])
    steps = ((biases[:-1] - biases[1:]) / rate - share * own_biases) / (1 - share)
    added, known = torch.zeros((len(own_biases[0]), len(sketches[0]))).double(), list[Tensor]()
    for number, layer in enumerate(layers):
        known.append(layer.weight.detach().double().cpu() - added @ sketches[number])
        if number < len(own_updates):
            added = added - rate * share * own_updates[number][f"{path}.weight"].double().cpu() @ sketches[number].T
    return sketches, known, steps


def rebuild_record(observed: Observation) -> Tensor:
    """Rebuild a victim's record, if the victim uses only this record in every round and the server uses plain SGD.

    Let W be the first layer's weight in the first round, r = lr (1 - share), and delta_t the victim's delta. Then

        W S_t = known_t + r sum_{s < t} delta_s x^T S_s S_s^T S_t        in every round t

    is linear in W and x. One projection, the same for all units, eliminates W, and a least-squares problem for x
    remains. One round reveals S^T x, which is a part of the record; several rounds reveal all of it.
    """
    sketches, known, steps = observe_first_layer(observed)
    joint = torch.cat(sketches, 1)
    inputs, equations = joint.shape
    if inputs > MAX_INPUTS or equations <= inputs:
        what = f"needs at most {MAX_INPUTS} inputs and more equations than inputs, got {inputs} and {equations}"
        raise DoesNotApply("dbcl", what)
    null_projection = torch.eye(equations).to(joint) - torch.linalg.pinv(joint) @ joint
    pairs = [[s @ (s.T @ later) for later in sketches] for s in sketches[:-1]]
    spread = torch.stack(
        [torch.cat([p * (t > n) for t, p in enumerate(row)], 1) @ null_projection for n, row in enumerate(pairs)]
    )
    left = torch.cat(known, 1) @ null_projection / -(observed.learning_rate * (1 - observed.share))
    total = torch.einsum("ts,tie,sje->ij", steps @ steps.T, spread, spread)
    right_side = torch.einsum("tie,te->i", spread, steps @ left)
    result: Tensor = torch.linalg.lstsq(total, right_side.unsqueeze(1), rcond=RANK, driver="gelsd").solution[:, 0]
    return result
