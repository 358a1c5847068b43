"""Clip a flattened gradient to a maximum norm, and split it back into tensors."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fedveil.errors import NonFiniteUpdate


def clip_vector(flat: Tensor, clip: float, where: str = "gradient") -> tuple[Tensor, float, bool]:
    """Clip a float64 vector to norm `clip`; return it, its norm, and whether it was clipped.

    The bound holds in exact arithmetic: `slack` is an upper bound on the relative rounding error of the norm and of the
    scaled vector. The vector is first divided by its largest magnitude, so that squares do not overflow.
    """
    largest = float(flat.abs().max()) if len(flat) else 0.0
    if not math.isfinite(largest):
        raise NonFiniteUpdate(where, "its gradient contains NaN or infinity")
    if not largest:
        return flat, 0.0, False
    unit = flat / largest
    norm = float(torch.linalg.vector_norm(unit))
    slack = (len(flat) + 8) * torch.finfo(torch.float64).eps
    if largest * norm * (1 + slack) <= clip:
        return flat, largest * norm, False
    return unit * (clip / norm * (1 - slack)), clip, True


def split_vector(flat: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split a vector into tensors with the names, shapes and dtypes of `like`."""
    pieces = torch.split(flat, [g.numel() for g in like.values()])
    return {name: piece.view(g.shape).to(g.dtype) for (name, g), piece in zip(like.items(), pieces, strict=True)}
