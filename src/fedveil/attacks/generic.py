"""Attacks that do not depend on the defence, and therefore also apply to defences from other packages.

Two of them estimate the true model: averaging broadcasts removes independent noise, and an affine map of the outputs
reverses affine changes to them. The third rebuilds a record from the difference between two broadcasts with the
published attack, exactly if the first layer is a Linear, and otherwise by searching for an image.
"""

import dataclasses

import torch
from torch import Tensor, nn

from fedveil.attacks.features import dense_targets
from fedveil.attacks.first_layer import first_linear, rebuild_from_difference
from fedveil.attacks.gradients import Search, reconstruct
from fedveil.attacks.leaked_gradients import from_difference, single_label
from fedveil.attacks.observation import DoesNotApply, Observation, copy_with_values
from fedveil.attacks.veil import minimise
from fedveil.federation.evaluate import predict
from fedveil.scheme.losses import Loss, SquaredError

RIDGE = 1e-3  # ridge penalty per record, for standardised outputs
SEARCH = Search("cosine", steps=200, restarts=1)


def average_broadcasts(observation: Observation) -> Observation:
    """Average parameters and buffers over all rounds, which removes independent noise.

    This works if the model hardly changes between rounds. Integer buffers, such as `num_batches_tracked`, are taken
    from the last round.
    """
    states = [dict(observed_round.model.state_dict()) for observed_round in observation.rounds]
    if len(states) < 2:
        raise DoesNotApply("broadcasts averaged", "there is only one broadcast")
    last_state = states[-1]
    shapes = {name: value.shape for name, value in last_state.items()}
    if not shapes or any({name: value.shape for name, value in state.items()} != shapes for state in states):
        raise DoesNotApply("broadcasts averaged", "the tensors of the broadcasts differ in names or shapes")
    if all(torch.equal(last_state[name], state[name]) for state in states[:-1] for name in last_state):
        raise DoesNotApply("broadcasts averaged", "all broadcasts are the same")
    mean = {
        name: torch.stack([state[name].double() for state in states]).mean(0).to(value.dtype)
        for name, value in last_state.items()
        if value.is_floating_point()
    }
    return dataclasses.replace(observation, model=copy_with_values(observation.rounds[-1].model, mean))


def calibrate_outputs(observation: Observation) -> Observation:
    """Append an affine map to the model, fitted to the attacker's own labels."""
    if not len(observation.targets):
        raise DoesNotApply("outputs calibrated", "the attacker has no labelled records")
    outputs = predict(observation.model, observation.inputs).double()
    if outputs.dim() != 2:
        raise DoesNotApply("outputs calibrated", "the model's outputs do not have the shape (records, outputs)")
    if not outputs.isfinite().all():
        raise DoesNotApply("outputs calibrated", "the model's outputs are not finite")
    targets = dense_targets(observation.loss, observation.targets.to(outputs.device), outputs)
    weight, bias = fit_affine(outputs, targets, observation.loss)
    head = nn.Linear(*weight.shape).to(next(observation.model.parameters()))
    model = nn.Sequential(observation.model, copy_with_values(head, {"weight": weight, "bias": bias}))
    return dataclasses.replace(observation, model=model.train(observation.model.training))


def fit_affine(outputs: Tensor, targets: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
    """Find A and b that minimise the loss of A y + b, with a small ridge penalty on A for standardised outputs.

    The solver is least squares for squared error, and L-BFGS starting at 0 for any other loss. If the loss is convex,
    so is the problem.
    """
    mean, deviation = outputs.mean(0), outputs.std(0, correction=0)
    deviation = torch.where(deviation > 0, deviation, torch.ones_like(deviation))
    rows = torch.cat([(outputs - mean) / deviation, torch.ones_like(outputs[:, :1])], 1)
    penalty = RIDGE * len(rows) * torch.eye(rows.shape[1]).to(rows)
    penalty[-1, -1] = 0.0
    if isinstance(loss, SquaredError):
        result = torch.linalg.solve(rows.T @ rows + penalty, rows.T @ targets)
    else:
        start = torch.zeros(rows.shape[1], targets.shape[1]).to(rows)
        result = minimise(
            lambda params: (
                loss.values(rows @ params, targets).mean() + 0.5 * (params * (penalty @ params)).sum() / len(rows)
            ),
            start,
        )
    weight = result[:-1].T / deviation
    return weight, result[-1] - weight @ mean


def rebuild_record(observation: Observation) -> Tensor:
    """Rebuild a record with the published attack, which uses the difference between two broadcasts as its gradient."""
    try:
        first_linear(observation.architecture)
    except DoesNotApply as reason:
        return invert_gradient(observation, reason.what)
    return rebuild_from_difference(observation)


def invert_gradient(observation: Observation, reason: str) -> Tensor:
    """Search for one image (Inverting Gradients) with pixel values in the range of the attacker's images.

    `reason` states why the record cannot be computed without a search.
    """
    own_inputs = observation.inputs
    if own_inputs.dim() != 4:
        raise DoesNotApply("gradient inversion", f"{reason}, and records are not images")
    if observation.targets.is_floating_point() and (observation.targets.dim() < 2 or observation.targets.shape[1] < 2):
        raise DoesNotApply("gradient inversion", f"{reason}, and inversion needs class labels")
    leak = from_difference(observation)
    box = own_inputs.amin((0, 2, 3))[:, None, None], own_inputs.amax((0, 2, 3))[:, None, None]
    label = torch.tensor([single_label(leak)], device=own_inputs.device)
    with torch.no_grad():
        classes = leak.model(own_inputs[:2]).shape[-1]
    rng = torch.Generator().manual_seed(0)
    result = reconstruct(
        leak, (1, *own_inputs.shape[1:]), SEARCH, classes=classes, generator=rng, labels=label, box=box
    )
    return result.inputs[0]
