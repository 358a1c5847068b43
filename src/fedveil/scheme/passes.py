"""The gradients that clients send, and all backward passes of a perceptron at once.

A client turns (y, alpha) into cotangents and uploads one gradient per cotangent; the server sums these *passes* with
secret coefficients::

    G = R o sum_k coefficient_k(secret) pass_k

Notation: y are the outputs of the veiled model, alpha the sum of the head's inputs (plus 1 if it has a bias), r_a the
public direction, I_s the s-th group of outputs, d the head's secret offset from the true one: y_true = y - d alpha r_a.

Squared error has the paper's m + 2 terms. Any other loss has one pass per public *candidate* t: the gradient for d = t.
One of the candidates is d and the others are decoys, so one coefficient is 1 and all others are 0 (docs/losses.md).

For a stack of Linear and ReLU, all cotangents go back together: one product per layer gives the gradients for all of
them, one more the cotangents of its input. For small networks this saves most of the cost, which is calls. The result
is autograd's up to rounding (tests/scheme/test_passes.py).
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedveil.errors import BadArgument
from fedveil.scheme.losses import USERS, CrossEntropy, Loss, match_targets, sample_weights
from fedveil.scheme.messages import PublicHead
from fedveil.scheme.outputs import slope
from fedveil.wire import Tensors


def cotangents(
    loss: Loss, head: PublicHead | None, outputs: Tensor, targets: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Return the cotangent of the outputs, (y, alpha) with a head, per pass; `weights` replace 1 / samples."""
    outputs = outputs.detach()
    if head is None:
        return (slope(loss, outputs, targets) * sample_weights(outputs, weights, loss)).unsqueeze(0)
    axis = head.axis
    if axis != 1 and outputs.dim() > 2 and isinstance(loss, CrossEntropy) and loss.average_positions:
        what = "torch.nn.CrossEntropyLoss takes classes on axis 1, and these outputs have them last"
        fix = 'use loss="cross_entropy", a sum over positions, or let forward return outputs.movedim(-1, 1)'
        raise BadArgument("loss", what, fix)
    if axis != -1:
        dense = not isinstance(loss, USERS) and targets.is_floating_point() and targets.dim() == outputs.dim()
        outputs, targets = outputs.movedim(axis, -1), targets.movedim(axis, -1) if dense else targets
    if head.decoys:
        found = _candidate_passes(loss, head, outputs, targets, weights)
    else:
        found = _squared_error_passes(head, outputs, targets, weights)
    return found if axis == -1 else found.movedim(-1, axis + 1)


def _squared_error_passes(head: PublicHead, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """Return cotangents for (y, alpha) of the m + 2 passes: G^, sigma~_1 ... sigma~_m, beta (paper, Theorem 2).

    The loss is half the squared distance, summed over outputs, averaged over samples (paper, Eq. 6)::

        G^        (delta, 0)                                delta = (y - target) / samples
        sigma~_s  (alpha r_a|I_s, r_a|I_s . delta)
        beta      (0, alpha)
    """
    r_a, m = head.direction, head.groups
    share = sample_weights(outputs, weights)
    y, alpha = torch.split_with_sizes(outputs * share, [len(r_a), 1], -1)
    delta = y - match_targets(y, targets) * share
    rows = [r_a] if m == 1 else [r_a * (head.partition == s) for s in range(m)]
    sigmas = [torch.cat([alpha * row, delta @ row.unsqueeze(1)], -1) for row in rows]
    return torch.stack([F.pad(delta, (0, 1)), *sigmas, F.pad(alpha, (len(r_a), 0))])


def _candidate_passes(loss: Loss, head: PublicHead, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """Return cotangents for (y, alpha) of the gradient at each candidate t: (delta, -(t o r_a) . delta).

    delta is the derivative of the loss at y - alpha (t o r_a). Classes are on the last axis of outputs; a user's
    function gets them where the model returns them.
    """
    noise = head.noise(outputs)
    y, alpha = torch.split_with_sizes(outputs, [noise.shape[1], 1], -1)
    targets = loss.dense(targets, y)
    rows = noise.view(len(noise), *[1] * (outputs.dim() - 1), -1)
    at = torch.addcmul(y, rows, alpha, value=-1)
    if isinstance(loss, USERS):  # may couple samples, or depend on their number
        own = [loss.gradient(one.movedim(-1, head.axis), targets).movedim(head.axis, -1) for one in at]
        delta = torch.stack(own)
    else:
        delta = loss.gradient(at, targets)
    delta = delta * sample_weights(outputs, weights, loss)
    along = delta.reshape(len(noise), -1, noise.shape[1]) @ noise.unsqueeze(2)
    return torch.cat([delta, -along.view(*delta.shape[:-1], 1)], -1)


def find_links(model: nn.Module, inputs: object, values: Collection[str]) -> list[str | None] | None:
    """Return the path of each Linear and None for each ReLU, in order; None if the model is not such a stack."""
    if type(model) is not nn.Sequential or not isinstance(inputs, Tensor) or inputs.dim() != 2:
        return None
    links: list[str | None] = []
    for path, module in model._modules.items():
        if type(module) not in (nn.Linear, nn.ReLU) or module._forward_hooks or module._forward_pre_hooks:
            return None
        if any(f"{path}.{name}" not in values for name, own in module._parameters.items() if own is not None):
            return None  # a module or tensor that is used twice is listed under its first name only
        links.append(path if type(module) is nn.Linear else None)
    return None if model._forward_hooks or model._forward_pre_hooks else links


def forward(links: Sequence[str | None], values: Tensors, inputs: Tensor) -> list[Tensor]:
    """Return the input and every layer's output."""
    seen = [inputs]
    for path in links:
        x = seen[-1]
        seen.append(
            torch.relu(x) if path is None else F.linear(x, values[f"{path}.weight"], values.get(f"{path}.bias"))
        )
    return seen


def backward(
    links: Sequence[str | None], values: Tensors, seen: Sequence[Tensor], cotangents: Tensor, wanted: Collection[str]
) -> Tensors:
    """Return gradients of the `wanted` parameters, one row per row of cotangents of the last output."""
    back = cotangents
    passes, samples, _ = back.shape
    found: Tensors = {}
    for number in reversed(range(len(links))):
        path = links[number]
        if path is None:
            back.mul_(seen[number + 1].sign())  # a ReLU's output has sign 0 or 1: its derivative
            continue
        weight, bias = f"{path}.weight", f"{path}.bias"
        if weight in wanted:
            found[weight] = torch.bmm(back.transpose(1, 2), seen[number].expand(passes, -1, -1))
        if bias in wanted:
            found[bias] = back.sum(1)
        if number:
            back = (back.view(passes * samples, -1) @ values[weight]).view(passes, samples, -1)
    return {name: found[name] for name in wanted}
