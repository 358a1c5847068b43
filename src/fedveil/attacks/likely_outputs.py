"""Attacks on the veil with one broadcast and no labels, based on assumptions about the true model's outputs.

With squared error, the true outputs are y = y^ - alpha c r_a, where y^ are the outputs without the public offset, alpha
and r_a are known, and c is one unknown number per group. A classifier's targets are 0 except for one output, so most of
its outputs are close to 0 for any input. The c that minimises sum |y| is a weighted median of y^ / (alpha r_a); the
median tolerates the few outputs that are not close to 0. The attack needs neither labels nor a second broadcast, so it
also works if the noise is kept across rounds. No model is certain of generated inputs, so their outputs are less
sparse; for them, the attack also estimates which output is large, and subtracts it (`fit_one_large_output`).

With decoys, c is one of a few public candidates. With the true candidate, the model is most certain of its predictions
on its training records.
"""

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from fedveil.attacks.observation import DoesNotApply, Observation
from fedveil.attacks.veil import base_model, candidate_models, group_rows, leverage
from fedveil.federation.evaluate import predict
from fedveil.scheme.broadcast import Broadcast, PublicHead
from fedveil.scheme.losses import SquaredError, one_hot
from fedveil.scheme.outputs import loss_values

NUM_INPUTS = 1000  # number of generated inputs
DECAY = 2.5  # chosen among 0.5, 1, 1.5, 2, 2.5 and 3 on CIFAR-10, seeds 10 to 14; photographs have a decay of about 1.2
NUM_STEPS = 30  # number of steps of expectation-maximisation


def image_shape(shape: torch.Size) -> torch.Size | None:
    """Return (channels, height, width) of records that are square images, even if flattened; None for others."""
    if len(shape) == 3:
        return shape
    for channels in (1, 3):
        side = math.isqrt(shape.numel() // channels)
        if len(shape) == 1 and side > 1 and channels * side**2 == shape.numel():
            return torch.Size((channels, side, side))
    return None


def fake_inputs(shape: torch.Size, count: int, low: float, high: float) -> Tensor:
    """Generate the same records of this shape on every call: smooth random images, or normal noise.

    The amplitude of a frequency f of an image is proportional to f^-2.5, so images are smoother than photographs (about
    f^-1.2, Field 1987). Each image is shifted and scaled so that its values range from `low` to `high`.
    """
    rng, image = torch.Generator().manual_seed(0), image_shape(shape)
    if image is None:
        return torch.randn((count, *shape), generator=rng)
    noise = torch.randn((count, *image), generator=rng)
    y_frequency, x_frequency = (torch.fft.fftfreq(size) for size in image[1:])
    frequency = torch.hypot(y_frequency[:, None], x_frequency).clamp_min(1 / max(image[1:]))
    result: Tensor = torch.fft.ifft2(torch.fft.fft2(noise) / frequency**DECAY).real.flatten(1)
    result = result - result.amin(1, keepdim=True)
    result = low + (high - low) * result / result.amax(1, keepdim=True)
    return result.reshape(count, *shape)


def weighted_median(values: Tensor, weights: Tensor) -> Tensor:
    """Return the c that minimises sum_i w_i |v_i - c|; the smallest one if it is not unique."""
    order = values.argsort()
    sums = weights[order].cumsum(0)
    return values[order][int((sums >= sums[-1] / 2).nonzero()[0, 0])]


def fit_sparse_outputs(outputs: Tensor, alpha: Tensor, rows: Tensor) -> Tensor:
    """Find the m numbers c that minimise the sum of |outputs - alpha (c rows)|; `rows` is `group_rows`."""
    offsets = []
    for row in rows:
        unit = alpha * row[row != 0]
        ratio = outputs[:, row != 0] / torch.where(unit == 0, 1.0, unit)
        offsets.append(weighted_median(ratio.flatten(), unit.abs().flatten()))
    return torch.stack(offsets)


def fit_one_large_output(outputs: Tensor, alpha: Tensor, rows: Tensor) -> Tensor:
    """Find the m numbers c for which one of each record's outputs is large and the others are close to 0.

    The outputs of a record have a Laplace distribution around t e_k, where every k is equally likely and t is the
    median of the largest output. Expectation-maximisation starts from `fit_sparse_outputs`. With two outputs, half of
    the outputs are large, which reveals nothing about c, so the starting point is returned.
    """
    offsets, classes = fit_sparse_outputs(outputs, alpha, rows), outputs.shape[1]
    for _ in range(NUM_STEPS if classes > 2 else 0):
        true_outputs = outputs - alpha * (offsets @ rows)
        large_value = true_outputs.amax(1).median()
        distance = (
            true_outputs.abs() @ (1 - torch.eye(classes).to(true_outputs)) + (true_outputs - large_value).abs()
        )  # from t e_k, in column k
        scale = (distance.amin(1).mean() / classes).clamp_min(torch.finfo(true_outputs.dtype).tiny)
        offsets = fit_sparse_outputs(outputs - large_value * torch.softmax(-distance / scale, 1), alpha, rows)
    return offsets


def veiled_head(observation: Observation) -> tuple[Broadcast, PublicHead]:
    """Return the last broadcast and its head; refuse a head that is not veiled."""
    broadcast = observation.rounds[-1].broadcast
    if not isinstance(broadcast, Broadcast) or broadcast.head is None:
        raise DoesNotApply("likely outputs", "the head is not veiled")
    return broadcast, broadcast.head


Fit = Callable[[Tensor, Tensor, Tensor], Tensor]


def fit_outputs(observation: Observation, inputs: Tensor, fit: Fit) -> Observation:
    """Remove the noise, given the offset that `fit` estimates from the outputs for `inputs`."""
    broadcast, head = veiled_head(observation)
    if head.has_candidates or not isinstance(observation.loss, SquaredError):
        raise DoesNotApply("likely outputs", "the attack needs squared error, for which most outputs are close to 0")
    base, rows = base_model(observation.architecture, broadcast), group_rows(head)
    outputs = predict(base, inputs).double().flatten(1)
    offset = fit(outputs, leverage(base, head, inputs), rows)
    return dataclasses.replace(observation, model=base_model(observation.architecture, broadcast, offset @ rows))


def fit_fake_inputs(observation: Observation) -> Observation:
    """Remove the noise with generated inputs, from one broadcast, knowing only the shape and range of the records."""
    low, high = float(observation.inputs.min()), float(observation.inputs.max())
    inputs = fake_inputs(observation.inputs.shape[1:], NUM_INPUTS, low, high).to(observation.inputs)
    return fit_outputs(observation, inputs, fit_one_large_output)


def fit_own_inputs(observation: Observation) -> Observation:
    """Remove the noise with the attacker's own records, but without their labels, from one broadcast.

    With decoys, the function chooses the candidate with the smallest loss when its own predictions are used as labels.
    """
    broadcast, head = veiled_head(observation)
    if not head.has_candidates:
        return fit_outputs(observation, observation.inputs, fit_sparse_outputs)
    models, losses = candidate_models(observation, broadcast), []
    for model in models:
        outputs = predict(model, observation.inputs)
        if outputs.dim() != 2 or outputs.shape[1] < 2:
            raise DoesNotApply("likely outputs", "the model does not have one output per class")
        losses.append(loss_values(observation.loss, outputs, one_hot(outputs.argmax(1), outputs)).mean())
    return dataclasses.replace(observation, model=models[losses.index(min(losses))])
