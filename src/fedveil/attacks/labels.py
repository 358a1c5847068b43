"""Labels that a gradient reveals."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedveil.attacks.leaks import Leak
from fedveil.errors import BadArgument


def single_label(leak: Leak) -> int:
    """The label of one record: the class whose row of the head's gradient has the least sum (iDLG, arXiv 2001.02610).

    Row c is (p_c - [c = label]) h for features h. If no feature is negative, only the label's row is. The bias's
    gradient, if there is one, is p_c - [c = label] itself, whatever the features.
    """
    return int(class_sums(leak).argmin())


def batch_labels(leak: Leak, records: int, own: Tensor) -> list[int]:
    """Labels of several records, sorted; a label may occur more than once.

    For a loss with the gradient s(y) - target (cross-entropy, squared error), the bias's gradient is
    mean s(y)_c - n_c / B with n_c records of class c. The attacker estimates the mean with its own records and assigns
    labels one by one, each to the class with the most left of B (mean s(y)_c - gradient_c). Without a bias, row sums
    are divided by the mean sum of its own records' features.

    Source: the counting idea of LLG (Wainakh et al. 2022, arXiv 2105.09369), with own records in place of a fit.

    Args:
        leak: the leaked gradient.
        records: B.
        own: the attacker's own inputs.
    """
    with torch.no_grad(), entering(last_linear(leak.model)[1]) as features:
        outputs = leak.model(own)
    some = F.one_hot(outputs.new_zeros(len(outputs), dtype=torch.int64), outputs.shape[-1]).to(outputs)
    slope = (leak.loss.gradient(outputs, some) + some).mean(0)
    size = 1.0 if has_bias(leak) else float(features[0].flatten(1).sum(1).mean())
    left = records * (slope - class_sums(leak) / (size or 1.0))
    labels = []
    for _ in range(records):
        labels.append(int(left.argmax()))
        left[labels[-1]] -= 1
    return sorted(labels)


def last_linear(model: nn.Module) -> tuple[str, nn.Linear]:
    """The model's last Linear, by name."""
    found = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not found:
        raise BadArgument("labels", "the model has no Linear whose gradient would reveal labels", "--method dlg")
    return found[-1]


def has_bias(leak: Leak) -> bool:
    """Whether the head's bias has a gradient."""
    return prefix(leak) + "bias" in leak.gradients


def prefix(leak: Leak) -> str:
    """The prefix of the names of the head's parameters."""
    path = last_linear(leak.model)[0]
    return f"{path}." if path else ""


def class_sums(leak: Leak) -> Tensor:
    """The gradient of each class's bias, or without a bias the sum of its row."""
    if has_bias(leak):
        return leak.gradients[prefix(leak) + "bias"]
    return leak.gradients[prefix(leak) + "weight"].sum(1)


@contextmanager
def entering(module: nn.Module) -> Iterator[list[Tensor]]:
    """Collect a module's input in each forward pass."""
    seen: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    try:
        yield seen
    finally:
        handle.remove()
