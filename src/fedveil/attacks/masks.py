"""Attackers that know which part of a gradient to believe: of PPDL and SPN."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from fedveil.attacks.differences import Leak
from fedveil.attacks.labels import last_linear

ULPS = 4  # of a weight: a step and a difference round twice each


def received(leak: Leak, *, learning_rate: float) -> Leak:
    """PPDL's selection shows its support: only numbers that are not 0 were sent, so only these are to be matched.

    A difference of two broadcasts is 0 up to the rounding of the weights, over the learning rate.
    """
    weights = dict(leak.model.named_parameters())
    mask = {}
    for name, value in leak.gradients.items():
        rounding = ULPS * torch.finfo(value.dtype).eps * weights[name].detach().abs() / learning_rate
        mask[name] = value.abs() > rounding
    return replace(leak, mask=mask)


def averaged(leaks: Sequence[Leak]) -> Leak:
    """The mean of several gradients of the same records at nearly the same model: independent noise averages out."""
    names = leaks[0].gradients
    mean = {name: torch.stack([leak.gradients[name] for leak in leaks]).mean(0) for name in names}
    return replace(leaks[0], gradients=mean)


def classifier_only(leak: Leak) -> Leak:
    """SPN leaves the last Linear's gradient clean, so it alone is to be matched."""
    path, _ = last_linear(leak.model)
    start = f"{path}." if path else ""
    mask = {
        name: torch.full_like(value, name.startswith(start), dtype=torch.bool) for name, value in leak.gradients.items()
    }
    return replace(leak, mask=mask)
