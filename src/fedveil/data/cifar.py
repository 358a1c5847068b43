"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009), from the published archive or from image files.

The published archive contains pickles, and unpickling can run arbitrary code. Pickles are therefore never loaded here:
pixels and labels are read from their opcodes.
"""

import dataclasses
import functools
import gzip
import io
import pickletools
import tarfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

import numpy as np
from torch.nn.functional import avg_pool2d

from fedveil.data.archives import open_archive, stamp
from fedveil.data.catalogue import NAMES, Positive
from fedveil.data.dataset import Data, DataPart
from fedveil.data.images import Arrays, Bytes, Channels, ImageSet, assemble, find_image_files, read_files, use_cache
from fedveil.data.splits import Indices
from fedveil.errors import BadArgument
from fedveil.records.encoding import ImageEncoding

SIDE = 32
MAX_UNPACKED = 2**29  # maximum size of an unpacked archive in bytes; the published ones are 186 MB
_WIDTH = 3 * SIDE * SIDE
_AGAIN = "download the archive again"


class _Variant(NamedTuple):
    """The differences between CIFAR-10 and CIFAR-100."""

    name: str
    classes: tuple[str, ...]
    batches: tuple[str, ...]  # files in the published archive; the last one is for testing
    labels: str
    mean: Channels
    deviation: Channels


_TEN, _HUNDRED = (NAMES[name]["classes"] for name in ("cifar10", "cifar100"))
_SIX, _TWO = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"), ("train", "test")
TEN = _Variant("cifar10", _TEN, _SIX, "labels", (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
HUNDRED = _Variant("cifar100", _HUNDRED, _TWO, "fine_labels", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))


def _load(
    variant: _Variant,
    *,
    path: Path,
    train_size: Positive | None = None,
    test_size: Positive | None = None,
    size: Literal[32, 16, 8] = 32,
) -> Data:
    """Load 60,000 colour images of 32 x 32 pixels in 10 or 100 classes, standardised with the usual constants.

    Args:
        variant: CIFAR-10, or CIFAR-100 with its fine labels.
        path: cifar-10-python.tar.gz or cifar-100-python.tar.gz, its unpacked folder, or a folder or zip file
            of train|test/<class>/<image>.
        train_size: number of training records, divided equally among the classes; all 50,000 by default.
        test_size: number of test records, chosen in the same way; all 10,000 by default.
        size: side of the images in pixels: 32, or 16 or 8 by averaging neighbouring pixels.
    """
    batches = path.is_file() and path.name.endswith((".tar.gz", ".tgz", ".tar"))
    if batches or (path / variant.batches[0]).is_file():
        files = [path] if path.is_file() else [path / name for name in variant.batches]
        key = variant.name, str(path.resolve()), *(stamp(file) for file in files if file.exists())
        arrays = use_cache(key, lambda: _read_batches(variant, path))
        images = ImageSet(arrays["pixels"], arrays["targets"], arrays["train"], arrays["test"], variant.classes)
    else:
        archive = open_archive(path)
        images = read_files(archive, find_image_files(archive), SIDE, variant.classes)
    result = assemble(variant.name, images, (variant.mean, variant.deviation), (train_size, test_size))
    if size == SIDE:
        return result
    small = [DataPart(avg_pool2d(part.tensor, SIDE // size), part.targets) for part in (result.train, result.test)]
    pooled = ImageEncoding(SIDE, variant.mean, variant.deviation, SIDE // size)
    return dataclasses.replace(result, train=small[0], test=small[1], input_encoding=pooled)


cifar10, cifar100 = functools.partial(_load, TEN), functools.partial(_load, HUNDRED)


def _read_batches(variant: _Variant, source: Path) -> Arrays:
    """Read all batches from the published archive or its unpacked folder."""
    contents = _read_members(source, variant.batches)
    result = [_read_batch(variant, f"{source}, member {name}", contents.get(name)) for name in variant.batches]
    pixels, targets = (np.concatenate(parts) for parts in zip(*result, strict=True))
    train, test = np.split(np.arange(len(targets)), [-len(result[-1][1])])
    return {"pixels": pixels, "targets": targets, "train": train, "test": test}


def _read_members(source: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    """Return the batches that exist, by name; nothing is written to disk."""
    if source.is_dir():
        archive = open_archive(source)
        with archive.reader() as read:
            return {name: read(name) for name in names if name in archive.names}
    try:
        with source.open("rb") as packed:
            file = gzip.GzipFile(fileobj=packed) if packed.peek(2).startswith(b"\x1f\x8b") else packed
            content = file.read(MAX_UNPACKED + 1)
        if len(content) > MAX_UNPACKED:
            raise OSError(f"it is larger than {MAX_UNPACKED} bytes")
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as opened:
            result = {PurePosixPath(member.name).name: member for member in opened if member.isfile()}
            batches = {name: opened.extractfile(result[name]) for name in names if name in result}
            return {name: batch.read() for name, batch in batches.items() if batch}
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError) as error:
        what = f"not a readable tar archive: {error}"
        raise BadArgument(str(source), what, "it is damaged or truncated: download it again") from error


def _read_batch(variant: _Variant, where: str, content: bytes | None) -> tuple[Bytes, Indices]:
    if not content:
        raise BadArgument(where, "it is missing or empty", _AGAIN)
    try:
        pixels, labels = read_pickle(content, variant.labels)
    except Exception as error:  # damaged pickles raise many kinds of errors
        raise BadArgument(where, f"not a CIFAR file: {error or type(error).__name__}", _AGAIN) from error
    if not pixels or len(pixels) % _WIDTH:
        raise BadArgument(where, f"its pixels are not images of {_WIDTH} bytes each", _AGAIN)
    if len(labels) * _WIDTH != len(pixels):
        what = f"{len(labels)} {variant.labels} for {len(pixels) // _WIDTH} images"
        raise BadArgument(where, what, _AGAIN)
    for row, label in enumerate(labels):
        if label >= len(variant.classes):
            what = f"label {label} is not one of {len(variant.classes)} classes"
            raise BadArgument(f"{where}, row {row}", what, _AGAIN)
    images = np.frombuffer(pixels, dtype=np.uint8).reshape(-1, 3, SIDE, SIDE)
    return images, np.frombuffer(labels, dtype=np.uint8).astype(np.int64)


def read_pickle(content: bytes, key: str) -> tuple[bytes, bytearray]:
    """Return the byte array in a pickle and the list of small integers stored under `key`, without unpickling it.

    NumPy pickles the dtype of an array first, then whether the array is in Fortran order, then its values.
    """
    pixels, labels, last, of_bytes, fortran = b"", bytearray(), b"", False, True
    for opcode, argument, _ in pickletools.genops(content):
        if isinstance(argument, str | bytes):
            last = argument.encode("latin1") if isinstance(argument, str) else argument
            of_bytes |= last == b"u1"
            if len(last) >= _WIDTH:
                if pixels or fortran or not of_bytes:
                    raise ValueError("it contains an array of a type other than bytes")
                pixels = last
        elif opcode.name == "BININT1" and last == key.encode():
            labels.append(int(argument or 0))
        elif opcode.name in ("NEWTRUE", "NEWFALSE"):
            fortran = opcode.name == "NEWTRUE"
    return pixels, labels
