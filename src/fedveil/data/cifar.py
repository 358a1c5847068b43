"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009), from the published archive or from image files.

The published archive holds pickles, and a pickle is a program. The reader here knows two names, numpy's array and its
dtype, and returns inert stand-ins for them; any other name is refused. No code of numpy or of the file runs while a
pickle is read.
"""

import dataclasses
import functools
import gzip
import io
import pickle
import pickletools
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

import numpy as np
from torch.nn.functional import avg_pool2d

from fedveil.data.archives import stamp
from fedveil.data.catalogue import MOST_BYTES, About, Download, dataset, find_files
from fedveil.data.dataset import Data, Part, Progress
from fedveil.data.images import Arrays, Bytes, Channels, Folders, ImageSet, assemble, read_folders, use_cache
from fedveil.errors import BadArgument

SIDE = 32
SIZES = (32, 16, 8)
MOST_UNPACKED = 2**29  # bytes of an archive; the published ones have 186 MB
_WIDTH = 3 * SIDE * SIDE
_AGAIN = "fetch the archive again"
_KRIZ = "https://www.cs.toronto.edu/~kriz"
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
    folder: str
    digest: str

    def about(self) -> About:
        """Return the entry in the catalogue."""
        count, archive = len(self.classes), f"cifar-{len(self.classes)}-python.tar.gz"
        return About(
            f"60,000 photographs of 32 x 32, {count} classes",
            f"Krizhevsky 2009; {_KRIZ}/cifar.html",
            "none stated",
            files=(archive, self.folder, f"./{self.train[0]}", "./train", "*.zip"),
            wanted=f"{archive} (or a zip of train|test/<class>/<image>)",
            download=Download(f"{_KRIZ}/{archive}", archive, self.digest),
        )


TEN = _Variant(
    "cifar10",
    tuple(_TEN.split()),
    tuple(f"data_batch_{number}" for number in range(1, 6)),
    ("test_batch",),
    "labels",
    (0.4914, 0.4822, 0.4465),
    (0.2470, 0.2435, 0.2616),
    "cifar-10-batches-py",
    "md5:c58f30108f718f92721af3b95e74349a",
)
HUNDRED = _Variant(
    "cifar100",
    tuple(_HUNDRED.split()),
    ("train",),
    ("test",),
    "fine_labels",
    (0.5071, 0.4865, 0.4409),
    (0.2673, 0.2564, 0.2762),
    "cifar-100-python",
    "md5:eb9058c3a382ffc7106e4002c42a8d85",
)


def _load(
    form: _Variant,
    *,
    path: Path | None = None,
    train_size: int | None = None,
    test_size: int | None = None,
    size: int = SIDE,
    progress: Progress | None = None,
) -> Data:
    """Load 50,000 + 10,000 colour images of 32 x 32, in 10 or 100 classes, standardised with the usual constants.

    Args:
        form: which of the two; of CIFAR-100 the fine labels are read.
        path: cifar-10-python.tar.gz or cifar-100-python.tar.gz, its unpacked folder, a folder or zip of
            train|test/<class>/<image>, or a folder that holds one of these.
        train_size: number of training records, as many of each class; all by default.
        test_size: number of test records.
        size: sides of the images: 32, or 16 or 8 by the mean of neighbours.
        progress: called with (done, total) while images are decoded.
    """
    if size not in SIZES:
        raise BadArgument(f"load({form.name!r})", f"size is {size}", f"use one of {', '.join(map(str, SIZES))}")
    source = find_files(form.name, path)
    batches = source.is_file() and source.name.endswith((".tar.gz", ".tgz", ".tar"))
    if batches or (source / form.train[0]).is_file():
        arrays = use_cache(_cache_key(form, source), lambda: _read_batches(form, source))
        train, test = (ImageSet(arrays[f"{part}_pixels"], arrays[f"{part}_labels"]) for part in ("train", "test"))
        folders = Folders(train, test, form.classes)
    else:
        folders = read_folders(source, SIDE, form.classes, progress)
    found = assemble(form.name, folders, (form.mean, form.deviation), (train_size, test_size))
    if size == SIDE:
        return found
    small = [Part(avg_pool2d(part.tensor, SIDE // size), part.targets) for part in (found.train, found.test)]
    return dataclasses.replace(found, train=small[0], test=small[1])


for _form in (TEN, HUNDRED):
    dataset(_form.name, _form.about())(functools.partial(_load, _form))


def _cache_key(form: _Variant, source: Path) -> tuple[str, ...]:
    """Return everything that the content of the batches depends on."""
    files = [source] if source.is_file() else [source / name for name in (*form.train, *form.test)]
    return form.name, str(source.resolve()), *(stamp(file) for file in files if file.exists())


def _read_batches(form: _Variant, source: Path) -> Arrays:
    """Read all batches of the published archive or its unpacked folder, as pixels and labels of each part."""
    contents = _contents(source, (*form.train, *form.test))
    arrays = {}
    for part, names in (("train", form.train), ("test", form.test)):
        found = [_batch(form, f"{source}, member {name}", contents.get(name)) for name in names]
        arrays[f"{part}_pixels"] = np.concatenate([batch.pixels for batch in found])
        arrays[f"{part}_labels"] = np.concatenate([batch.targets for batch in found])
    return arrays


def _contents(source: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    """Return the batches that exist by name; a tar archive is read in one pass, and nothing is written to disk."""
    if source.is_dir():
        present = [source / name for name in names if (source / name).is_file()]
        for file in present:
            _check_size(f"{source}, member {file.name}", file.stat().st_size)
        return {file.name: file.read_bytes() for file in present}
    try:
        with source.open("rb") as packed, tarfile.open(fileobj=_LimitedReader(packed), mode="r|") as opened:
            return _members(source, opened, names)
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError) as error:
        if isinstance(error, BadArgument):
            raise
        what = f"not a readable tar archive: {error}"
        raise BadArgument(str(source), what, "it is damaged or cut off: fetch it again") from error


def _members(source: Path, opened: tarfile.TarFile, names: tuple[str, ...]) -> dict[str, bytes]:
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


def _batch(form: _Variant, where: str, content: bytes | None) -> ImageSet:
    if not content:
        raise BadArgument(where, "it is missing or empty", _AGAIN)
    found = read_pickle(where, content)
    pixels, labels = found.get("data"), found.get(form.labels)
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != _WIDTH or not len(pixels):
        raise BadArgument(where, f"it has no images of {_WIDTH} bytes", _AGAIN)
    if not isinstance(labels, list) or len(labels) != len(pixels):
        count = len(labels) if isinstance(labels, list) else "no"
        raise BadArgument(where, f"{count} {form.labels} for {len(pixels)} images", _AGAIN)
    for row, label in enumerate(labels):
        if type(label) is not int or not 0 <= label < len(form.classes):
            what = f"label {label!r} is not one of {len(form.classes)} classes"
            raise BadArgument(f"{where}, row {row}", what, _AGAIN)
    return ImageSet(pixels.reshape(-1, 3, SIDE, SIDE), np.array(labels, dtype=np.int64))


class _Stub:
    """Inert stand-in for numpy.dtype and numpy.ndarray: keeps the first argument and the state."""

    def __init__(self, code: object = None, *_: object) -> None:
        self.code = code

    def __setstate__(self, state: tuple[object, ...]) -> None:
        self.state = state

    def pixels(self) -> Bytes:
        """Return the array, if it is one of bytes in the usual order."""
        _, shape, kind, fortran, content = self.state
        if not isinstance(kind, _Stub) or kind.code not in (b"u1", "u1") or fortran or not isinstance(content, bytes):
            raise ValueError("an array is not of bytes")
        return np.frombuffer(content, dtype=np.uint8).reshape(shape)  # type: ignore[call-overload, no-any-return]


def _encode(text: object, encoding: object = "latin1") -> bytes:
    """Stand in for codecs.encode, which Python 3 writes around bytes."""
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError("an unusual encoding")
    return text.encode("latin1")


_NAMES = {"numpy.dtype": _Stub, "numpy.ndarray": _Stub, "_codecs.encode": _encode, "codecs.encode": _encode}
_NAMES |= {f"numpy.{core}.multiarray._reconstruct": _Stub for core in ("core", "_core")}


class _Reader(pickle.Unpickler):
    """An unpickler that knows these names only."""

    def find_class(self, module: str, name: str) -> object:
        """Return the stand-in for a name; refuse any other."""
        if "." in name or f"{module}.{name}" not in _NAMES:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR file needs")
        return _NAMES[f"{module}.{name}"]


def _check_memory(content: bytes) -> None:
    """Refuse a pickle that asks for more memory than its own bytes explain, before it gets any."""
    for number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if opcode.name == "BYTEARRAY8":
            raise pickle.UnpicklingError("it holds a bytearray, which no CIFAR file needs")
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > number:
            raise pickle.UnpicklingError(f"it remembers value {argument} after {number} steps")


def read_pickle(where: str, content: bytes) -> dict[str, object]:
    """Read the dictionary in a pickle of the CIFAR archives; byte arrays become numpy arrays, names become text.

    Refuses one that is damaged, or asks for anything but arrays. `where` is the file's name in messages.
    """
    try:
        _check_memory(content)
        found = _Reader(io.BytesIO(content), encoding="bytes").load()
        if not isinstance(found, dict):
            raise ValueError(f"it holds {type(found).__name__}, not a dictionary")
        names = [key.decode("latin1") if isinstance(key, bytes) else str(key) for key in found]  # bytes from Python 2
        values = [value.pixels() if isinstance(value, _Stub) else value for value in found.values()]
        return dict(zip(names, values, strict=True))
    except Exception as error:  # a damaged pickle may fail in any way
        what = f"not a CIFAR file: {error or type(error).__name__}"
        raise BadArgument(where, what, _AGAIN) from error
