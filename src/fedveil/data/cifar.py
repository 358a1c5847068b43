"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009), from the published archive or from image files."""

import dataclasses
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from torch.nn.functional import avg_pool2d

from fedveil.data.cache import Arrays, kept
from fedveil.data.cifar_names import CIFAR10, CIFAR100
from fedveil.data.images import Folders, Labelled, assembled, read_folders
from fedveil.data.pickles import read_pickle
from fedveil.data.pixels import Channels
from fedveil.data.places import source_of
from fedveil.data.records import Data, Part, Progress
from fedveil.data.registry import dataset
from fedveil.errors import BadArgument

SIDE = 32
SIZES = (32, 16, 8)
_WIDTH = 3 * SIDE * SIDE


@dataclass(frozen=True)
class _Form:
    """What differs between the two."""

    name: str
    classes: tuple[str, ...]
    train: tuple[str, ...]
    test: tuple[str, ...]
    labels: str
    mean: Channels
    deviation: Channels


TEN = _Form(
    "cifar10",
    CIFAR10,
    tuple(f"data_batch_{number}" for number in range(1, 6)),
    ("test_batch",),
    "labels",
    (0.4914, 0.4822, 0.4465),
    (0.2470, 0.2435, 0.2616),
)
HUNDRED = _Form(
    "cifar100",
    CIFAR100,
    ("train",),
    ("test",),
    "fine_labels",
    (0.5071, 0.4865, 0.4409),
    (0.2673, 0.2564, 0.2762),
)


@dataset("cifar10")
def cifar10(
    *,
    path: Path | None = None,
    train_size: int | None = None,
    test_size: int | None = None,
    size: int = SIDE,
    progress: Progress | None = None,
) -> Data:
    """CIFAR-10: 50,000 + 10,000 colour images of 32 x 32, ten classes; channels scaled with the usual constants.

    Args:
        path: cifar-10-python.tar.gz, its unpacked folder, a folder or zip of train|test/<class>/<image>, or a folder
            that holds one of these.
        train_size: how many training records, as many of each class; all by default.
        test_size: how many test records.
        size: sides of the images: 32, or 16 or 8 by the mean of neighbours.
        progress: called with (done, total) while images are decoded.
    """
    return _load(TEN, path, train_size, test_size, size, progress)


@dataset("cifar100")
def cifar100(
    *,
    path: Path | None = None,
    train_size: int | None = None,
    test_size: int | None = None,
    size: int = SIDE,
    progress: Progress | None = None,
) -> Data:
    """CIFAR-100: as cifar10, with a hundred classes (the fine labels); the archive is cifar-100-python.tar.gz."""
    return _load(HUNDRED, path, train_size, test_size, size, progress)


def _load(
    form: _Form, path: Path | None, train_size: int | None, test_size: int | None, size: int, progress: Progress | None
) -> Data:
    """Either data set, from whatever holds it."""
    if size not in SIZES:
        raise BadArgument(f"load({form.name!r})", f"size must be one of {', '.join(map(str, SIZES))}, got {size}")
    source = source_of(form.name, path)
    batches = source.is_file() and source.name.endswith((".tar.gz", ".tgz", ".tar"))
    if batches or (source / form.train[0]).is_file():
        arrays = kept(_stamps(form, source), lambda: _read_batches(form, source))
        train, test = (Labelled(arrays[f"{part}_pixels"], arrays[f"{part}_labels"]) for part in ("train", "test"))
        folders = Folders(train, test, form.classes)
    else:
        folders = read_folders(source, SIDE, classes=form.classes, progress=progress)
    found = assembled(form.name, folders, (form.mean, form.deviation), train_size, test_size)
    if size == SIDE:
        return found
    return dataclasses.replace(found, train=_shrunk(found.train, SIDE // size), test=_shrunk(found.test, SIDE // size))


def _shrunk(part: Part, times: int) -> Part:
    """Images with sides so many times shorter."""
    return Part(avg_pool2d(part.tensor, times), part.targets)


def _stamps(form: _Form, source: Path) -> tuple[str, ...]:
    """What the content of the batches depends on."""
    files = [source] if source.is_file() else [source / name for name in (*form.train, *form.test)]
    stats = [file.stat() for file in files if file.exists()]
    return form.name, str(source.resolve()), *(f"{stat.st_size} {stat.st_mtime_ns}" for stat in stats)


def _read_batches(form: _Form, source: Path) -> Arrays:
    """All batches of the published archive, as pixels and labels of each part."""
    arrays: dict[str, Any] = {}
    with _batch_reader(source) as read:
        for part, names in (("train", form.train), ("test", form.test)):
            found = [_batch(form, f"{source}, member {name}", read(name)) for name in names]
            arrays[f"{part}_pixels"] = np.concatenate([batch.pixels for batch in found])
            arrays[f"{part}_labels"] = np.concatenate([batch.targets for batch in found])
    return arrays


def _batch(form: _Form, where: str, content: bytes) -> Labelled:
    """One batch, checked."""
    found = read_pickle(where, content)
    pixels, labels = found.get("data"), found.get(form.labels)
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != _WIDTH or not len(pixels):
        raise BadArgument(where, f"it has no images of {_WIDTH} bytes", "fetch the archive again")
    if not isinstance(labels, list) or len(labels) != len(pixels):
        count = len(labels) if isinstance(labels, list) else "no"
        raise BadArgument(where, f"{count} {form.labels} for {len(pixels)} images", "fetch the archive again")
    for row, label in enumerate(labels):
        if type(label) is not int or not 0 <= label < len(form.classes):
            what = f"label {label!r} is not one of {len(form.classes)} classes"
            raise BadArgument(f"{where}, row {row}", what, "fetch the archive again")
    return Labelled(pixels.reshape(-1, 3, SIDE, SIDE), np.array(labels, dtype=np.int64))


@contextmanager
def _batch_reader(source: Path) -> Iterator[Callable[[str], bytes]]:
    """A function from a batch's name to its bytes, for the archive or its unpacked folder."""
    if source.is_dir():
        yield lambda name: _present(source, name, (source / name).read_bytes() if (source / name).is_file() else None)
        return
    contents = _untar(source)
    yield lambda name: _present(source, name, contents.get(name))


def _present(source: Path, name: str, content: bytes | None) -> bytes:
    """The content of a batch; its absence is an error."""
    if not content:
        raise BadArgument(f"{source}, member {name}", "it is missing or empty", "fetch the archive again")
    return content


def _untar(source: Path) -> dict[str, bytes]:
    """Files of a tar archive by their last name, read in one pass; nothing is written to disk."""
    try:
        with tarfile.open(source) as opened:
            files = ((member, opened.extractfile(member)) for member in opened if member.isfile())
            return {PurePosixPath(member.name).name: file.read() for member, file in files if file is not None}
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        what = f"not a readable tar archive: {error}"
        raise BadArgument(str(source), what, "it is damaged or cut off: fetch it again") from error
