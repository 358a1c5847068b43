"""Models whose numbers are finite: no other is trained, saved or restored."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def select_floats(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """The floating-point tensors among these; empty ones hold no numbers, and are left out."""
    found = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor) and tensor.numel()}
    return {name: tensor for name, tensor in found.items() if tensor.is_floating_point()}


def find_non_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first of some floating-point tensors that holds NaN or infinity; None if there is none.

    One norm per tensor is enough, unless the squares of finite numbers overflow: a few microseconds in every round.
    """
    if not tensors:
        return None
    with torch.no_grad():
        norms = torch.stack(torch._foreach_norm(list(tensors.values()))).tolist()
    if math.isfinite(sum(norms)):
        return None
    return next((name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()), None)


def find_non_finite_state(optimizer: Mapping[str, Any]) -> str | None:
    """The first tensor of an optimiser's state_dict that holds NaN or infinity; None if there is none."""
    named: dict[str, Any] = {}
    for number, state in optimizer["state"].items():
        named |= {f"the optimiser's {key} of parameter {number}": value for key, value in state.items()}
    floats, found = select_floats(named), None
    for device in {tensor.device for tensor in floats.values()}:  # counters of steps may be on the CPU
        there = {name: tensor for name, tensor in floats.items() if tensor.device == device}
        found = found or find_non_finite(there)
    return found
