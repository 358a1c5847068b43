"""From image files to tensors: decode once to bytes, keep, scale on loading."""

import importlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedveil.data.archives import Archive
from fedveil.data.cache import kept
from fedveil.data.records import Part, Progress
from fedveil.errors import BadArgument

Bytes = NDArray[np.uint8]
Channels = tuple[float, float, float]
_EVERY = 100


def decoded(archive: Archive, names: Sequence[str], side: int, progress: Progress | None = None) -> Bytes:
    """Members of an archive as (n, 3, side, side) bytes, in the order of `names`; kept in the cache."""
    parts = (str(archive.path.resolve()), archive.stamp, str(side), *names)
    return kept(parts, lambda: {"images": _decode_all(archive, names, side, progress)})["images"]


def _decode_all(archive: Archive, names: Sequence[str], side: int, progress: Progress | None) -> Bytes:
    """Decode member by member, and say now and then how far it is."""
    image_module = pillow()
    pixels = np.empty((len(names), 3, side, side), dtype=np.uint8)
    with archive.reader() as read:
        for index, name in enumerate(names):
            pixels[index] = _decode(image_module, archive.where(name), read(name), side)
            if progress and ((index + 1) % _EVERY == 0 or index + 1 == len(names)):
                progress(index + 1, len(names))
    return pixels


def pillow() -> Any:
    """The module PIL.Image; it comes with an extra."""
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        fix = "pip install 'fedveil[images]'"
        raise BadArgument("images", "reading image files needs Pillow, which is not installed", fix) from error


def _decode(image_module: Any, where: str, content: bytes, side: int) -> Bytes:
    """One image as (3, side, side)."""
    damage = (OSError, ValueError, SyntaxError, EOFError, image_module.DecompressionBombError)
    try:
        with image_module.open(io.BytesIO(content)) as opened:
            image = opened.convert("RGB")
    except damage as error:
        raise BadArgument(where, f"not a readable image: {error}", "replace it or leave it out") from error
    if image.size != (side, side):
        image = image.resize((side, side), image_module.Resampling.BILINEAR)
    return np.asarray(image).transpose(2, 0, 1)


def statistics(pixels: Bytes) -> tuple[Channels, Channels]:
    """Mean and deviation of each channel in [0, 1], from counts of the 256 values."""
    values = np.arange(256) / 255
    means, deviations = [], []
    for channel in range(3):
        counts = np.bincount(pixels[:, channel].reshape(-1), minlength=256)
        mean = float(counts @ values / counts.sum())
        means.append(mean)
        deviations.append(float(np.sqrt(counts @ (values - mean) ** 2 / counts.sum())))
    return (means[0], means[1], means[2]), (deviations[0], deviations[1], deviations[2])


def shown(scale: tuple[Channels, Channels]) -> tuple[Channels, Channels]:
    """The scale as `image_part` applies it: a channel without any deviation is only shifted."""
    mean, deviation = scale
    return mean, (deviation[0] or 1.0, deviation[1] or 1.0, deviation[2] or 1.0)


def image_part(pixels: Bytes, targets: NDArray[np.int64], mean: Channels, deviation: Channels) -> Part:
    """Bytes as float32, scaled to [0, 1] and then by mean and deviation of each channel; grey in all stays finite."""
    scale = torch.tensor([255 * channel for channel in shown((mean, deviation))[1]]).view(3, 1, 1)
    shift = torch.tensor([255 * channel for channel in mean]).view(3, 1, 1)
    inputs = torch.from_numpy(np.ascontiguousarray(pixels)).to(torch.float32)
    return Part(inputs.sub_(shift).div_(scale), torch.from_numpy(np.ascontiguousarray(targets, dtype=np.int64)))
