"""Models whose numbers are finite: no other is trained, saved or restored."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def first_infinite(tensors: Mapping[str, Any]) -> str | None:
    """The name of the first floating-point tensor that holds NaN or infinity; None if there is none.

    One norm per tensor is enough, unless the squares of finite numbers overflow: a few microseconds in every round.
    """
    floating = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor) and _counts(tensor)}
    if not floating:
        return None
    with torch.no_grad():
        total = torch.stack(torch._foreach_norm(list(floating.values()))).sum()
    if math.isfinite(total):
        return None
    return next((name for name, tensor in floating.items() if not torch.isfinite(tensor).all()), None)


def _counts(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0
