"""Compare a recovered gradient with the plain one, and raise an error if rounding cannot explain the difference.

The first round of a run compares them on one batch, at the cost of a step. In both passes, random numbers are replaced
with the same constants; otherwise, dropout would drop different units in the permuted model.

Rounding explains a difference of n e |g| for n operations that each round by the recorded error e. If the difference is
larger, both gradients are computed again with parameters that differ in the last digit: rounding in each of the n
operations may change the result as much as this change does. This bound accounts for cancellation, and for units so
close to the kink of a ReLU that their derivative depends on rounding.
"""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedveil.checks import suspend_autocast
from fedveil.errors import NotExact
from fedveil.graph.draws import FixedDraws
from fedveil.graph.foreign_code import restore_generators, run_eagerly
from fedveil.graph.inputs import Inputs, each
from fedveil.scheme.broadcast import Broadcast, check_inputs
from fedveil.scheme.client import client_step
from fedveil.scheme.losses import Loss, SquaredError, sample_weights
from fedveil.scheme.outputs import compute_outputs, head_axis, output_gradient
from fedveil.scheme.perturbation import Perturbation
from fedveil.scheme.recover import find_non_finite
from fedveil.wire import Tensors

NUM_CHANGES = 2  # number of random changes in the last digit of the parameters
FIX = (
    "remove code in forward that acts on gradients, draws Python's random numbers or keeps values between calls; if "
    "there is no such code, report a bug and attach the model, because fedveil.analyse is wrong about one of its layers"
)


@dataclass(frozen=True)
class Difference:
    """The difference between a recovered and a plain gradient, and the largest difference that rounding explains.

    Both are relative to the norm of the plain gradient.
    """

    value: float
    rounding: float


@suspend_autocast()
def check_exact(
    perturbation: Perturbation, model: nn.Module, inputs: Inputs, targets: Tensor | None = None
) -> Difference | None:
    """Compare the gradients for a batch; return the difference, or None if the comparison is inconclusive.

    It is inconclusive if a gradient is not finite, or if forward draws random numbers that cannot be held constant.

    Args:
        perturbation: a round's perturbation of the model.
        model: the true model.
        inputs: a batch.
        targets: its targets; by default, random numbers, compared by squared error.

    Raises:
        NotExact: the difference is larger than rounding explains. The message contains both numbers, and nothing
            secret.
    """
    broadcast = perturbation.broadcast
    check_inputs(model, broadcast, inputs)  # before random numbers are fixed
    if targets is None:
        broadcast = dataclasses.replace(broadcast, loss=SquaredError())
        with torch.no_grad(), restore_generators():
            outputs = compute_outputs(
                model, each(Tensor.clone, inputs), {name: b.clone() for name, b in model.named_buffers()}
            )
        targets = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(0)).to(outputs)
    pair = _GradientPair(perturbation, model, broadcast, inputs, targets)
    draws = FixedDraws()
    recovered_gradient, error = pair.recover(FixedDraws())
    plain_gradient = pair.compute_plain(draws)
    if find_non_finite(recovered_gradient) or find_non_finite(plain_gradient) or draws.random:
        return None
    norm = _distance(plain_gradient, {})
    difference, tolerance = _distance(recovered_gradient, plain_gradient), draws.operations * error * norm
    if difference > tolerance:
        generator = torch.Generator().manual_seed(0)
        for _ in range(NUM_CHANGES):
            changed_recovered, changed_plain = (
                pair.recover(FixedDraws(), generator)[0],
                pair.compute_plain(FixedDraws(), generator),
            )
            tolerance += draws.operations * (
                _distance(changed_recovered, recovered_gradient) + _distance(changed_plain, plain_gradient)
            )
    result = Difference(difference / norm if norm else difference, tolerance / norm if norm else tolerance)
    if difference > tolerance:
        message = (
            f"on one batch, the recovered gradient differs from the plain one by {result.value:.2g} of its norm, but"
        )
        raise NotExact(type(model).__name__, f"{message} rounding explains at most {result.rounding:.2g}", FIX)
    return result


@dataclass(frozen=True, eq=False)
class _GradientPair:
    """The computation of the recovered and the plain gradient of a batch."""

    perturbation: Perturbation
    model: nn.Module
    broadcast: Broadcast
    inputs: Inputs
    targets: Tensor

    def recover(self, draws: FixedDraws, last_digit: torch.Generator | None = None) -> tuple[Tensors, float]:
        """Return the gradient recovered from a client's update, and its recorded error."""
        broadcast = self.broadcast
        if last_digit is not None:
            broadcast = dataclasses.replace(broadcast, parameters=_change_last_digit(broadcast.parameters, last_digit))
        with restore_generators(), run_eagerly(self.model), draws:
            update = client_step(self.model, broadcast, self.inputs, self.targets)
        result = self.perturbation.recover([update], [1.0])
        return dict(result.gradients), result.error

    def compute_plain(self, draws: FixedDraws, last_digit: torch.Generator | None = None) -> Tensors:
        """Return the gradient of plain training."""
        model, loss = self.model, self.broadcast.loss
        values = {name: p.detach() for name, p in model.named_parameters()}
        if last_digit is not None:
            values = _change_last_digit(values, last_digit)
        leaves = {name: values[name].requires_grad_() for name in self.broadcast.trainable}
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        with restore_generators(), run_eagerly(model), draws, torch.enable_grad():
            outputs = compute_outputs(model, each(Tensor.clone, self.inputs), values | buffers)
            delta = _output_cotangent(loss, outputs.detach(), self.targets, head_axis(model))
            result = torch.autograd.grad(outputs, list(leaves.values()), delta, allow_unused=True)
        pairs = zip(leaves.items(), result, strict=True)
        return {name: torch.zeros_like(value) if gradient is None else gradient for (name, value), gradient in pairs}


@torch.no_grad()
def _output_cotangent(loss: Loss, outputs: Tensor, targets: Tensor, axis: int | None) -> Tensor:
    return output_gradient(loss, outputs, targets, axis) * sample_weights(outputs, None, loss)


def _change_last_digit(values: Tensors, generator: torch.Generator) -> Tensors:
    """Multiply each element by 1 + eps or 1 - eps."""
    result = {}
    for name, value in values.items():
        if not value.is_floating_point():
            result[name] = value
            continue
        signs = torch.randint(0, 2, value.shape, generator=generator).to(value) * 2 - 1
        result[name] = value.detach() * (1 + torch.finfo(value.dtype).eps * signs)
    return result


def _distance(gradients: Tensors, reference: Tensors) -> float:
    """Return the norm of the difference, or of `gradients` alone if `reference` is empty."""
    parts = [tensor.double() - (reference[name].double() if reference else 0.0) for name, tensor in gradients.items()]
    return float(torch.stack([part.norm() for part in parts]).norm())
