"""Attacks on the veil with one broadcast and no labels, which assume what the true model's outputs are like.

With squared error, the true outputs are y = y^ - alpha c r_a, where y^ are the outputs without the public offset, alpha
and r_a are known, and c is one unknown number per group. A classifier's targets are 0 except for one output, so most of
its outputs are close to 0 for any input. The c that minimises sum |y| is a weighted median of y^ / (alpha r_a); it
tolerates the few outputs that are not close to 0. Neither labels nor a second broadcast are needed, so this also works
if the noise is kept across rounds. Outputs for generated inputs, of which no model is certain, are less sparse; for
them, the attack also estimates which output is the large one, and subtracts it (`fit_one_large_output`).

With decoys, c is one of a few public candidates. The true one makes the model most certain of its predictions on its
training records.
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

FAKES = 1000  # number of generated inputs
DECAY = 2.5  # chosen among 0.5, 1, 1.5, 2, 2.5 and 3 on CIFAR-10, seeds 10 to 14; photographs have about 1.2
STEPS = 30  # of expectation-maximisation


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
    down, across = (torch.fft.fftfreq(size) for size in image[1:])
    frequency = torch.hypot(down[:, None], across).clamp_min(1 / max(image[1:]))
    found: Tensor = torch.fft.ifft2(torch.fft.fft2(noise) / frequency**DECAY).real.flatten(1)
    found = found - found.amin(1, keepdim=True)
    found = low + (high - low) * found / found.amax(1, keepdim=True)
    return found.reshape(count, *shape)


def weighted_median(values: Tensor, weights: Tensor) -> Tensor:
    """Return the c that minimises sum_i w_i |v_i - c|; the smallest one if it is not unique."""
    order = values.argsort()
    sums = weights[order].cumsum(0)
    return values[order][int((sums >= sums[-1] / 2).nonzero()[0, 0])]


def fit_sparse_outputs(outputs: Tensor, alpha: Tensor, rows: Tensor) -> Tensor:
    """Find the m numbers c that minimise the sum of |outputs - alpha (c rows)|; `rows` is `group_rows`."""
    found = []
    for row in rows:
        unit = alpha * row[row != 0]
        ratio = outputs[:, row != 0] / torch.where(unit == 0, 1.0, unit)
        found.append(weighted_median(ratio.flatten(), unit.abs().flatten()))
    return torch.stack(found)


def fit_one_large_output(outputs: Tensor, alpha: Tensor, rows: Tensor) -> Tensor:
    """Find the m numbers c with which one of each record's outputs is large and the others are close to 0.

    The outputs of a record have a Laplace distribution around t e_k, where every k is equally likely and t is the
    median of the largest output. Expectation-maximisation starts from `fit_sparse_outputs`. With two outputs, half of
    them are large, which says nothing about c: the start is returned.
    """
    found, classes = fit_sparse_outputs(outputs, alpha, rows), outputs.shape[1]
    for _ in range(STEPS if classes > 2 else 0):
        true = outputs - alpha * (found @ rows)
        large = true.amax(1).median()
        distance = true.abs() @ (1 - torch.eye(classes).to(true)) + (true - large).abs()  # from t e_k, in column k
        scale = (distance.amin(1).mean() / classes).clamp_min(torch.finfo(true.dtype).tiny)
        found = fit_sparse_outputs(outputs - large * torch.softmax(-distance / scale, 1), alpha, rows)
    return found


def veiled_head(observed: Observation) -> tuple[Broadcast, PublicHead]:
    """Return the last broadcast and its head; refuse a head that is not veiled."""
    broadcast = observed.rounds[-1].broadcast
    if not isinstance(broadcast, Broadcast) or broadcast.head is None:
        raise DoesNotApply("likely outputs", "the head is not veiled")
    return broadcast, broadcast.head


Fit = Callable[[Tensor, Tensor, Tensor], Tensor]


def fit_outputs(observed: Observation, inputs: Tensor, fit: Fit) -> Observation:
    """Remove the noise, given the offset that `fit` estimates from the outputs for `inputs`."""
    broadcast, head = veiled_head(observed)
    if head.has_candidates or not isinstance(observed.loss, SquaredError):
        raise DoesNotApply("likely outputs", "only with squared error are most outputs close to 0")
    base, rows = base_model(observed.architecture, broadcast), group_rows(head)
    outputs = predict(base, inputs).double().flatten(1)
    offset = fit(outputs, leverage(base, head, inputs), rows)
    return dataclasses.replace(observed, model=base_model(observed.architecture, broadcast, offset @ rows))


def fit_fake_inputs(observed: Observation) -> Observation:
    """Remove the noise with generated inputs, from one broadcast, knowing only the shape and range of the records."""
    low, high = float(observed.inputs.min()), float(observed.inputs.max())
    inputs = fake_inputs(observed.inputs.shape[1:], FAKES, low, high).to(observed.inputs)
    return fit_outputs(observed, inputs, fit_one_large_output)


def fit_own_inputs(observed: Observation) -> Observation:
    """Remove the noise with the attacker's own records, but without their labels, from one broadcast.

    With decoys, the function picks the candidate with the smallest loss on the model's own predictions as labels.
    """
    broadcast, head = veiled_head(observed)
    if not head.has_candidates:
        return fit_outputs(observed, observed.inputs, fit_sparse_outputs)
    models, losses = candidate_models(observed, broadcast), []
    for model in models:
        outputs = predict(model, observed.inputs)
        if outputs.dim() != 2 or outputs.shape[1] < 2:
            raise DoesNotApply("likely outputs", "the model does not have one output per class")
        losses.append(loss_values(observed.loss, outputs, one_hot(outputs.argmax(1), outputs)).mean())
    return dataclasses.replace(observed, model=models[losses.index(min(losses))])
