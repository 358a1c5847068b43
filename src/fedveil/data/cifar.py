"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009), from the published archive or from image files.

The published archive contains pickles, and unpickling can run arbitrary code. Pickles are therefore never loaded here:
pixels and labels are read from the pickle opcodes.
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
from fedveil.data.catalogue import NAMES, PositiveInt
from fedveil.data.dataset import Data, DataPart
from fedveil.data.images import Arrays, Bytes, Channels, ImageSet, assemble, find_image_files, read_files, use_cache
from fedveil.data.splits import Indices
from fedveil.errors import BadArgument
from fedveil.records.encoding import ImageEncoding

SIDE = 32
MAX_UNPACKED = 2**29  # maximum size of an unpacked archive in bytes; the published ones are 186 MB
_IMAGE_BYTES = 3 * SIDE * SIDE
_DOWNLOAD_AGAIN = "download the archive again"


class _Variant(NamedTuple):
    """The properties that distinguish CIFAR-10 from CIFAR-100."""

    name: str
    classes: tuple[str, ...]
    batches: tuple[str, ...]  # files in the published archive; the last one contains the test records
    labels: str
    mean: Channels
    deviation: Channels


_CLASSES_10, _CLASSES_100 = (NAMES[name]["classes"] for name in ("cifar10", "cifar100"))
_BATCHES_10, _BATCHES_100 = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"), ("train", "test")
CIFAR10 = _Variant("cifar10", _CLASSES_10, _BATCHES_10, "labels", (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
CIFAR100 = _Variant(
    "cifar100", _CLASSES_100, _BATCHES_100, "fine_labels", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
)


def _load(
    variant: _Variant,
    *,
    path: Path,
    train_size: PositiveInt | None = None,
    test_size: PositiveInt | None = None,
    size: Literal[32, 16, 8] = 32,
) -> Data:
    """Load 60,000 colour images of 32 x 32 pixels in 10 or 100 classes, standardised with the usual constants.

    Args:
        variant: CIFAR-10, or CIFAR-100 with its fine labels.
        path: cifar-10-python.tar.gz or cifar-100-python.tar.gz, its unpacked folder, or a folder or zip file
            of train|test/<class>/<image>.
        train_size: number of training records, divided equally among the classes; all 50,000 by default.
        test_size: number of test records, chosen in the same way; all 10,000 by default.
        size: side length of the images in pixels: 32, or 16 or 8 by averaging neighbouring pixels.
    """
    has_batches = path.is_file() and path.name.endswith((".tar.gz", ".tgz", ".tar"))
    if has_batches or (path / variant.batches[0]).is_file():
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
    pooled_parts = [
        DataPart(avg_pool2d(part.tensor, SIDE // size), part.targets) for part in (result.train, result.test)
    ]
    encoding = ImageEncoding(SIDE, variant.mean, variant.deviation, SIDE // size)
    return dataclasses.replace(result, train=pooled_parts[0], test=pooled_parts[1], input_encoding=encoding)


cifar10, cifar100 = functools.partial(_load, CIFAR10), functools.partial(_load, CIFAR100)


def _read_batches(variant: _Variant, source: Path) -> Arrays:
    """Read all batches from the published archive or its unpacked folder."""
    contents = _read_members(source, variant.batches)
    batches = [_read_batch(variant, f"{source}, member {name}", contents.get(name)) for name in variant.batches]
    pixels, targets = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    train, test = np.split(np.arange(len(targets)), [-len(batches[-1][1])])
    return {"pixels": pixels, "targets": targets, "train": train, "test": test}


def _read_members(source: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    """Return the batches that exist, by name; nothing is written to disk."""
    if source.is_dir():
        archive = open_archive(source)
        with archive.reader() as read:
            return {name: read(name) for name in names if name in archive.names}
    try:
        with source.open("rb") as raw_file:
            file = gzip.GzipFile(fileobj=raw_file) if raw_file.peek(2).startswith(b"\x1f\x8b") else raw_file
            content = file.read(MAX_UNPACKED + 1)
        if len(content) > MAX_UNPACKED:
            raise OSError(f"it is larger than {MAX_UNPACKED} bytes")
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            members = {PurePosixPath(member.name).name: member for member in tar if member.isfile()}
            batches = {name: tar.extractfile(members[name]) for name in names if name in members}
            return {name: batch.read() for name, batch in batches.items() if batch}
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError) as error:
        message = f"not a readable tar archive: {error}"
        raise BadArgument(str(source), message, "it is damaged or truncated: download it again") from error


def _read_batch(variant: _Variant, where: str, content: bytes | None) -> tuple[Bytes, Indices]:
    if not content:
        raise BadArgument(where, "it is missing or empty", _DOWNLOAD_AGAIN)
    try:
        pixels, labels = read_pickle(content, variant.labels)
    except Exception as error:  # damaged pickles raise errors of many types
        raise BadArgument(where, f"not a CIFAR file: {error or type(error).__name__}", _DOWNLOAD_AGAIN) from error
    if not pixels or len(pixels) % _IMAGE_BYTES:
        raise BadArgument(
            where, f"expected images of {_IMAGE_BYTES} bytes each, got {len(pixels)} bytes", _DOWNLOAD_AGAIN
        )
    if len(labels) * _IMAGE_BYTES != len(pixels):
        message = f"expected {len(pixels) // _IMAGE_BYTES} {variant.labels}, one per image, got {len(labels)}"
        raise BadArgument(where, message, _DOWNLOAD_AGAIN)
    for row, label in enumerate(labels):
        if label >= len(variant.classes):
            message = f"label {label} is out of range for {len(variant.classes)} classes"
            raise BadArgument(f"{where}, row {row}", message, _DOWNLOAD_AGAIN)
    images = np.frombuffer(pixels, dtype=np.uint8).reshape(-1, 3, SIDE, SIDE)
    return images, np.frombuffer(labels, dtype=np.uint8).astype(np.int64)


def read_pickle(content: bytes, key: str) -> tuple[bytes, bytearray]:
    """Extract the byte array and the list of small integers under `key` from a pickle, without unpickling it.

    For each array, NumPy pickles the dtype, a flag for Fortran order, and the values, in this order.
    """
    pixels, labels, last_string, is_uint8, is_fortran = b"", bytearray(), b"", False, True
    for opcode, argument, _ in pickletools.genops(content):
        if isinstance(argument, str | bytes):
            last_string = argument.encode("latin1") if isinstance(argument, str) else argument
            is_uint8 |= last_string == b"u1"
            if len(last_string) >= _IMAGE_BYTES:
                if pixels or is_fortran or not is_uint8:
                    raise ValueError("it contains an array that is not a C-ordered uint8 array")
                pixels = last_string
        elif opcode.name == "BININT1" and last_string == key.encode():
            labels.append(int(argument or 0))
        elif opcode.name in ("NEWTRUE", "NEWFALSE"):
            is_fortran = opcode.name == "NEWTRUE"
    return pixels, labels
