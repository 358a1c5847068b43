"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009), from the published archive or from image files.

The published archive holds pickles, and a pickle is a program. It is never run here: pixels and labels are taken from
the list of its instructions.
"""

import dataclasses
import functools
import gzip
import io
import pickletools
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Literal

import numpy as np
from torch.nn.functional import avg_pool2d

from fedveil.data.archives import open_archive, stamp
from fedveil.data.catalogue import MOST_BYTES, Positive
from fedveil.data.dataset import Data, DataPart
from fedveil.data.images import Arrays, Bytes, Channels, ImageSet, assemble, find_image_files, read_files, use_cache
from fedveil.data.splits import Indices
from fedveil.errors import BadArgument

SIDE = 32
MOST_UNPACKED = 2**29  # bytes of an archive; the published ones have 186 MB
_WIDTH = 3 * SIDE * SIDE
_AGAIN = "fetch the archive again"
_TEN = "airplane automobile bird cat deer dog frog horse ship truck"
_HUNDRED = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
    castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
    elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard
    lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear
    pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark
    shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone
    television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""


@dataclass(frozen=True)
class _Variant:
    """The differences between CIFAR-10 and CIFAR-100."""

    name: str
    classes: tuple[str, ...]
    train: tuple[str, ...]
    test: tuple[str, ...]
    labels: str
    mean: Channels
    deviation: Channels


TEN = _Variant(
    "cifar10",
    tuple(_TEN.split()),
    tuple(f"data_batch_{number}" for number in range(1, 6)),
    ("test_batch",),
    "labels",
    (0.4914, 0.4822, 0.4465),
    (0.2470, 0.2435, 0.2616),
)
HUNDRED = _Variant(
    "cifar100",
    tuple(_HUNDRED.split()),
    ("train",),
    ("test",),
    "fine_labels",
    (0.5071, 0.4865, 0.4409),
    (0.2673, 0.2564, 0.2762),
)


def _load(
    form: _Variant,
    *,
    path: Path,
    train_size: Positive | None = None,
    test_size: Positive | None = None,
    size: Literal[32, 16, 8] = 32,
) -> Data:
    """Load 50,000 + 10,000 colour images of 32 x 32, in 10 or 100 classes, standardised with the usual constants.

    Args:
        form: which of the two; of CIFAR-100 the fine labels are read.
        path: cifar-10-python.tar.gz or cifar-100-python.tar.gz, its unpacked folder, or a folder or zip of
            train|test/<class>/<image>.
        train_size: number of training records, as many of each class; all by default.
        test_size: number of test records.
        size: sides of the images: 32, or 16 or 8 by the mean of neighbours.
    """
    batches = path.is_file() and path.name.endswith((".tar.gz", ".tgz", ".tar"))
    if batches or (path / form.train[0]).is_file():
        arrays = use_cache(_cache_key(form, path), lambda: _read_batches(form, path))
        images = ImageSet(arrays["pixels"], arrays["targets"], arrays["train"], arrays["test"], form.classes)
    else:
        archive = open_archive(path)
        images = read_files(archive, find_image_files(archive), SIDE, form.classes)
    found = assemble(form.name, images, (form.mean, form.deviation), (train_size, test_size))
    if size == SIDE:
        return found
    small = [DataPart(avg_pool2d(part.tensor, SIDE // size), part.targets) for part in (found.train, found.test)]
    return dataclasses.replace(found, train=small[0], test=small[1])


cifar10, cifar100 = functools.partial(_load, TEN), functools.partial(_load, HUNDRED)


def _cache_key(form: _Variant, source: Path) -> tuple[str, ...]:
    """Return everything that the content of the batches depends on."""
    files = [source] if source.is_file() else [source / name for name in (*form.train, *form.test)]
    return form.name, str(source.resolve()), *(stamp(file) for file in files if file.exists())


def _read_batches(form: _Variant, source: Path) -> Arrays:
    """Read all batches of the published archive or its unpacked folder."""
    names = (*form.train, *form.test)
    contents = _read_members(source, names)
    found = [_read_batch(form, f"{source}, member {name}", contents.get(name)) for name in names]
    rows = np.arange(sum(len(targets) for _, targets in found))
    count = sum(len(targets) for _, targets in found[: len(form.train)])
    pixels, targets = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return {"pixels": pixels, "targets": targets, "train": rows[:count], "test": rows[count:]}


def _read_members(source: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    """Return the batches that exist by name; a tar archive is read in one pass, and nothing is written to disk."""
    if source.is_dir():
        present = [source / name for name in names if (source / name).is_file()]
        for file in present:
            _check_size(f"{source}, member {file.name}", file.stat().st_size)
        return {file.name: file.read_bytes() for file in present}
    try:
        with source.open("rb") as packed, tarfile.open(fileobj=_LimitedReader(packed), mode="r|") as opened:
            return _choose_members(source, opened, names)
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError) as error:
        if isinstance(error, BadArgument):
            raise
        what = f"not a readable tar archive: {error}"
        raise BadArgument(str(source), what, "it is damaged or cut off: fetch it again") from error


def _choose_members(source: Path, opened: tarfile.TarFile, names: tuple[str, ...]) -> dict[str, bytes]:
    """Return the named members; nothing after the last of them is read."""
    found: dict[str, bytes] = {}
    for member in opened:
        name = PurePosixPath(member.name).name
        if name in names and member.isfile():
            _check_size(f"{source}, member {name}", member.size)
            batch = opened.extractfile(member)
            found[name] = batch.read() if batch else b""
        if len(found) == len(names):
            break
    return found


def _check_size(where: str, size: int) -> None:
    if size > MOST_BYTES:
        raise BadArgument(where, f"it has {size} bytes, more than any file of CIFAR", _AGAIN)


class _LimitedReader(io.BufferedIOBase):
    """An archive's bytes, decompressed if it is a gzip file; raises beyond `MOST_UNPACKED`."""

    def __init__(self, file: IO[bytes]) -> None:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        self._file = gzip.GzipFile(fileobj=file) if packed else file
        self._left = MOST_UNPACKED

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes."""
        most = self._left + 1
        block = self._file.read(most if size is None or size < 0 else min(size, most))
        self._left -= len(block)
        if self._left < 0:
            raise OSError(f"it has more than {MOST_UNPACKED} bytes")
        return block


def _read_batch(form: _Variant, where: str, content: bytes | None) -> tuple[Bytes, Indices]:
    if not content:
        raise BadArgument(where, "it is missing or empty", _AGAIN)
    try:
        pixels, labels = read_pickle(content, form.labels)
    except Exception as error:  # a damaged pickle may fail in any way
        raise BadArgument(where, f"not a CIFAR file: {error or type(error).__name__}", _AGAIN) from error
    if not pixels or len(pixels) % _WIDTH:
        raise BadArgument(where, f"it has no images of {_WIDTH} bytes", _AGAIN)
    if len(labels) * _WIDTH != len(pixels):
        what = f"{len(labels)} {form.labels} for {len(pixels) // _WIDTH} images"
        raise BadArgument(where, what, _AGAIN)
    for row, label in enumerate(labels):
        if label >= len(form.classes):
            what = f"label {label} is not one of {len(form.classes)} classes"
            raise BadArgument(f"{where}, row {row}", what, _AGAIN)
    images = np.frombuffer(pixels, dtype=np.uint8).reshape(-1, 3, SIDE, SIDE)
    return images, np.frombuffer(labels, dtype=np.uint8).astype(np.int64)


def read_pickle(content: bytes, key: str) -> tuple[bytes, bytearray]:
    """Return the array of bytes in a pickle, and the list of small integers under `key`, without running it.

    NumPy writes the type of an array, whether its order is Fortran's, and its values, one after the other.
    """
    pixels, labels, last, of_bytes, fortran = b"", bytearray(), b"", False, True
    for opcode, argument, _ in pickletools.genops(content):
        if isinstance(argument, str | bytes):
            last = argument.encode("latin1") if isinstance(argument, str) else argument
            of_bytes |= last == b"u1"
            if len(last) >= _WIDTH:
                if pixels or fortran or not of_bytes:
                    raise ValueError("it has another array than one of bytes")
                pixels = last
        elif opcode.name == "BININT1" and last == key.encode():
            labels.append(int(argument or 0))
        elif opcode.name in ("NEWTRUE", "NEWFALSE"):
            fortran = opcode.name == "NEWTRUE"
    return pixels, labels
