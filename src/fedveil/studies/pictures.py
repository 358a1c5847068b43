"""Images in results, as text, and from there on pages."""

import base64
from collections.abc import Sequence

import torch
from torch import Tensor

from fedveil.report import Picture

Shape = tuple[int, int, int]  # channels, height, width


def encoded(image: Tensor) -> str:
    """Pixels from 0 to 1 as bytes, row by row and one per channel, in base64."""
    pixels = (image.detach() * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().cpu().numpy()
    return base64.b64encode(pixels.tobytes()).decode()


def shape_of(image: Tensor) -> Shape:
    """Channels, height and width."""
    channels, height, width = image.shape
    return channels, height, width


def picture(shape: Sequence[int], code: str, caption: str = "") -> Picture:
    """What `encoded` gave, as a picture of a page."""
    channels, height, width = shape
    return Picture(width, height, channels, base64.b64decode(code), caption)
