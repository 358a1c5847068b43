"""Models whose numbers are finite: no other is trained, saved or restored."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def find_non_finite(tensors: Mapping[str, Any]) -> str | None:
    """The name of the first floating-point tensor that holds NaN or infinity; None if there is none.

    One norm per tensor is enough, unless the squares of finite numbers overflow: a few microseconds in every round.
    """
    kept = [name for name, tensor in tensors.items() if isinstance(tensor, Tensor) and tensor.is_floating_point()]
    floating = {name: tensors[name] for name in kept if tensors[name].numel()}
    if not floating:
        return None
    with torch.no_grad():
        total = torch.stack(torch._foreach_norm(list(floating.values()))).sum()
    if math.isfinite(total):
        return None
    return next((name for name, tensor in floating.items() if not torch.isfinite(tensor).all()), None)
