"""Images in results, encoded as text, and as pictures of a page."""

import base64
from collections.abc import Sequence

import torch
from torch import Tensor

from fedveil.report import Picture

Shape = tuple[int, int, int]  # channels, height, width


def encode_image(image: Tensor) -> str:
    """Encode pixels from 0 to 1 as bytes in base64, row by row and one per channel."""
    pixels = (image.detach() * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().cpu().numpy()
    return base64.b64encode(pixels.tobytes()).decode()


def image_shape(image: Tensor) -> Shape:
    """Return channels, height and width."""
    channels, height, width = image.shape
    return channels, height, width


def decode_picture(shape: Sequence[int], code: str, caption: str = "") -> Picture:
    """Decode an image of `encode_image` as a picture of a page."""
    channels, height, width = shape
    return Picture(width, height, channels, base64.b64decode(code), caption)
