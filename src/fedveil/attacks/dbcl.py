"""Attacks on DBCL: sketches from a few rounds determine the weights, and changes in the weights reveal a record."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from fedveil.attacks.first_layer import first_linear
from fedveil.attacks.leaked_gradients import own_gradients, sketched_layers
from fedveil.attacks.observation import DoesNotApply, Observation, copy_with_values
from fedveil.defences.dbcl import Sketch, SketchedBroadcast, SketchedLayer

MAX_STEPS = 500  # maximum number of steps of conjugate gradients
TOLERANCE = 1e-12  # tolerance, relative to the squared norm of the right-hand side
RANK_TOLERANCE = 1e-10  # rank tolerance of the normal equations; directions that no round reveals are ignored
MAX_INPUTS = 1024  # maximum number of inputs of a first layer, since the solver uses dense matrices


def solve_sketches(sketches: Sequence[Sketch], sketched_weights: Sequence[Tensor]) -> Tensor:
    """Minimise sum_t |W S_t - W~_t|^2 over W by conjugate gradients, where t runs over all rounds.

    With fewer than about q rounds, the solution is not unique. The function then returns the solution with the smallest
    norm, because the search starts at 0.
    """
    residual = torch.stack(
        [
            sketch.back_project(sketched_weight)
            for sketch, sketched_weight in zip(sketches, sketched_weights, strict=True)
        ]
    ).sum(0)
    weight, direction = torch.zeros_like(residual), residual
    energy = (residual * residual).sum()
    tolerance = TOLERANCE * float(energy)
    for _ in range(MAX_STEPS):
        if float(energy) <= tolerance:
            break
        image = torch.stack([sketch.back_project(sketch.project(direction)) for sketch in sketches]).sum(0)
        step = energy / (direction * image).sum()
        weight, residual = weight + step * direction, residual - step * image
        previous_energy, energy = energy, (residual * residual).sum()
        direction = residual + (energy / previous_energy) * direction
    return weight


def stack_sketches(observation: Observation) -> Observation:
    """Fit a model to the sketches of all rounds; tensors that are not sketched come from the last broadcast."""
    networks = [
        observed_round.broadcast.network
        for observed_round in observation.rounds
        if isinstance(observed_round.broadcast, SketchedBroadcast)
    ]
    if len(networks) < len(observation.rounds):
        return observation
    rounds = [dict(sketched_layers(network)) for network in networks]
    values = dict(networks[-1].state_dict())
    for name in rounds[-1]:
        layers = [tensors[name] for tensors in rounds]
        weights = [layer.weight.detach().double() for layer in layers]
        sketches = [layer.sketch.to(weight) for layer, weight in zip(layers, weights, strict=True)]
        shape = observation.architecture.get_parameter(name).shape
        values[name] = solve_sketches(sketches, weights).reshape(shape).to(values[name].dtype)
    return dataclasses.replace(observation, model=copy_with_values(observation.architecture, values))


def observe_first_layer(observation: Observation) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Extract sketches, weights and steps of the first layer from the broadcasts, in float64.

    The result consists of the sketches S_t, each with shape (inputs, buckets); the sketched weights, without the
    changes that the attacker's own uploads caused since the first round; and the victim's delta_t, with shape
    (rounds - 1, units). The deltas are derived from the bias, because biases are not sketched.
    """
    path, rate, share = first_linear(observation.architecture), observation.learning_rate, observation.share
    all_layers = [observed_round.model.get_submodule(path) for observed_round in observation.rounds]
    layers = [layer for layer in all_layers if isinstance(layer, SketchedLayer)]
    if len(layers) < len(all_layers):
        raise DoesNotApply("dbcl", "the first layer is not sketched")
    eye = torch.eye(layers[0].sketch.fan_in, dtype=torch.float64)
    sketches = [layer.sketch.to(eye).project(eye) for layer in layers]
    biases = torch.stack([layer.bias.detach().double().cpu() for layer in layers if layer.bias is not None])
    own_updates = [own_gradients(observation, observed_round) for observed_round in observation.rounds[:-1]]
    own_biases = torch.stack([gradients[f"{path}.bias"].double().cpu() for gradients in own_updates])
    steps = ((biases[:-1] - biases[1:]) / rate - share * own_biases) / (1 - share)
    own_change, sketched_weights = torch.zeros((len(own_biases[0]), len(sketches[0]))).double(), list[Tensor]()
    for index, layer in enumerate(layers):
        sketched_weights.append(layer.weight.detach().double().cpu() - own_change @ sketches[index])
        if index < len(own_updates):
            own_change = (
                own_change - rate * share * own_updates[index][f"{path}.weight"].double().cpu() @ sketches[index].T
            )
    return sketches, sketched_weights, steps


def rebuild_record(observation: Observation) -> Tensor:
    """Rebuild a victim's record, if the victim uses only this record in every round and the server uses plain SGD.

    Let W be the first layer's weight in the first round, r = lr (1 - share), and delta_t the victim's delta. Then

        W S_t = W~_t + r sum_{s < t} delta_s x^T S_s S_s^T S_t        in every round t

    is linear in W and x. One projection, the same for all units, eliminates W, and a least-squares problem for x
    remains. One round reveals S^T x, which is a part of the record; several rounds reveal all of it.
    """
    sketches, sketched_weights, steps = observe_first_layer(observation)
    joint_sketch = torch.cat(sketches, 1)
    inputs, equations = joint_sketch.shape
    if inputs > MAX_INPUTS or equations <= inputs:
        message = f"expected at most {MAX_INPUTS} inputs and more equations than inputs, got {inputs} and {equations}"
        raise DoesNotApply("dbcl", message)
    null_projection = torch.eye(equations).to(joint_sketch) - torch.linalg.pinv(joint_sketch) @ joint_sketch
    pairs = [[s @ (s.T @ later) for later in sketches] for s in sketches[:-1]]
    design = torch.stack(
        [torch.cat([p * (t > n) for t, p in enumerate(row)], 1) @ null_projection for n, row in enumerate(pairs)]
    )
    known_side = (
        torch.cat(sketched_weights, 1) @ null_projection / -(observation.learning_rate * (1 - observation.share))
    )
    normal_matrix = torch.einsum("ts,tie,sje->ij", steps @ steps.T, design, design)
    right_side = torch.einsum("tie,te->i", design, steps @ known_side)
    result: Tensor = torch.linalg.lstsq(
        normal_matrix, right_side.unsqueeze(1), rcond=RANK_TOLERANCE, driver="gelsd"
    ).solution[:, 0]
    return result
