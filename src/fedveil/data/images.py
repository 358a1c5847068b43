"""Any folder or zip of images, `train|test/<class>/<file>`: decoded once to bytes, cached, scaled on loading.

Nothing is ever unpacked to disk.
"""

import hashlib
import importlib
import io
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from fedveil.checks import whole
from fedveil.data.catalogue import MOST_BYTES, About, cache_folder, dataset, few, regular, required
from fedveil.data.records import Data, Part, Progress
from fedveil.data.splits import stratified
from fedveil.errors import BadArgument
from fedveil.files import write_whole

FORM = "train/<class>/<image> and test/<class>/<image>"
Arrays = Mapping[str, NDArray[Any]]
Bytes = NDArray[np.uint8]
Channels = tuple[float, ...]
_CACHE_VERSION = "1"
_DAMAGE = (OSError, zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError, EOFError)
_EVERY = 100


class Labelled(NamedTuple):
    """Images as bytes (n, 3, side, side), and the class index of each."""

    pixels: Bytes
    targets: NDArray[np.int64]


class Folders(NamedTuple):
    """Labelled images of both purposes, and their classes."""

    train: Labelled
    test: Labelled
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Archive:
    """A folder or a zip file, seen alike: named members that can be read."""

    path: Path
    names: tuple[str, ...]  # of the files in it, sorted, with `/` between folders; hidden files are left out
    stamp: str  # changes when the content does

    @contextmanager
    def reader(self) -> Iterator[Callable[[str], bytes]]:
        """A function from a member's name to its bytes."""
        if self.path.is_dir():
            yield lambda name: self._guarded(name, lambda: _read_file(self.path / name))
            return
        with zipfile.ZipFile(self.path) as opened:
            yield lambda name: self._guarded(name, lambda: read_member(opened, name))

    def _guarded(self, name: str, read: Callable[[], bytes]) -> bytes:
        try:
            content = read()
        except _DAMAGE as error:
            fix = "replace it or leave it out, or fetch the archive again"
            raise BadArgument(self.where(name), f"cannot be read: {error}", fix) from error
        if not content:
            raise BadArgument(self.where(name), "the file is empty", "replace it or leave it out")
        return content

    def where(self, name: str) -> str:
        """How messages name a member."""
        return f"{self.path}, member {name}"


def _read_file(path: Path) -> bytes:
    if regular(path).stat().st_size > MOST_BYTES:
        raise OSError(f"it has more than {MOST_BYTES} bytes")
    return path.read_bytes()


def read_member(opened: zipfile.ZipFile, name: str, most: int = MOST_BYTES) -> bytes:
    """A member of a zip file, unless it is larger than `most`; never unpacks more than the member claims to hold."""
    if opened.getinfo(name).file_size > most:
        raise zipfile.BadZipFile(f"it has more than {most} bytes")
    return opened.read(name)


@dataset("images", About("any folder or zip of train|test/<class>/<image>; needs path=", "yours", "yours"))
def images(
    *,
    path: Path | None = None,
    size: int = 32,
    train_size: int | None = None,
    test_size: int | None = None,
    progress: Progress | None = None,
) -> Data:
    """A folder or zip of images, one folder per class; channels are standardised on the training part.

    Args:
        path: of the folder or zip, which holds train/<class>/<image> and test/<class>/<image>.
        size: side in pixels; images of another size are resized, without keeping their proportions.
        train_size: how many training records, each class with its share; all by default.
        test_size: how many test records.
        progress: called with (done, total) while images are decoded.
    """
    source = required("images", path, "folder_or.zip")
    folders = read_folders(source, whole("load('images')", "size", size), progress=progress)
    return assembled(source.stem, folders, *_statistics(folders.train.pixels), train_size, test_size)


def assembled(
    name: str, folders: Folders, mean: Channels, deviation: Channels, train_size: int | None, test_size: int | None
) -> Data:
    """A data set from labelled images: subsets are chosen, records shuffled, channels scaled."""
    parts = []
    for option, size, part in (("train_size", train_size, folders.train), ("test_size", test_size, folders.test)):
        chosen = stratified(f"load of {name!r}", option, part.targets, size)
        parts.append(image_part(part.pixels[chosen], part.targets[chosen], mean, deviation))
    return Data(name, parts[0], parts[1], classes=folders.classes, scale=(mean, deviation))


def read_folders(
    path: Path, side: int, *, classes: Sequence[str] | None = None, progress: Progress | None = None
) -> Folders:
    """Images of both purposes; classes are the folder names, which must be `classes` if given."""
    archive = open_archive(path)
    places = [(name, *place) for name in archive.names if (place := _place(archive, name)) is not None]
    found = {purpose: {label for _, where, label in places if where == purpose} for purpose in ("train", "test")}
    known = tuple(classes or sorted(found["train"]))
    _check_classes(archive, found, known, all_named=classes is not None)
    position = {label: index for index, label in enumerate(known)}
    pixels = decoded(archive, [name for name, _, _ in places], side, progress)
    targets = np.array([position[label] for _, _, label in places], dtype=np.int64)
    train, test = (np.array([where == purpose for _, where, _ in places]) for purpose in found)
    return Folders(Labelled(pixels[train], targets[train]), Labelled(pixels[test], targets[test]), known)


def _place(archive: Archive, name: str) -> tuple[str, str] | None:
    """Purpose and class of a member, from its folders; None for a file outside train and test."""
    parts = PurePosixPath(name).parts
    start = next((index for index, part in enumerate(parts[:-1]) if part in ("train", "test")), None)
    if start is None:
        return None
    if len(parts) - start != 3:
        raise BadArgument(archive.where(name), "an image must lie in the folder of its class", FORM)
    return parts[start], parts[start + 1]


def _check_classes(archive: Archive, found: dict[str, set[str]], known: tuple[str, ...], *, all_named: bool) -> None:
    """Refuse parts without images and folders that are not a class."""
    for purpose, labels in found.items():
        if not labels:
            raise BadArgument(str(archive.path), f"there are no images in {purpose}/", FORM)
        strange = sorted(labels - set(known))
        if strange:
            what = f"{purpose}/ has folders that are no class: {few(strange)}"
            raise BadArgument(str(archive.path), what, f"classes are {few(known, 10)}")
        missing = sorted(set(known) - labels)
        if missing and all_named:
            what = f"{purpose}/ has no images of {few(missing)}"
            raise BadArgument(str(archive.path), what, "fetch the archive again")


def decoded(archive: Archive, names: Sequence[str], side: int, progress: Progress | None = None) -> Bytes:
    """Members of an archive as (n, 3, side, side) bytes, in the order of `names`; cached."""
    parts = (str(archive.path.resolve()), archive.stamp, str(side), *names)
    return cached(parts, lambda: {"images": _decode_all(archive, names, side, progress)})["images"]


def _decode_all(archive: Archive, names: Sequence[str], side: int, progress: Progress | None) -> Bytes:
    image_module = _pillow()
    pixels = np.empty((len(names), 3, side, side), dtype=np.uint8)
    with archive.reader() as read:
        for index, name in enumerate(names):
            pixels[index] = _decode(image_module, archive.where(name), read(name), side)
            if progress and ((index + 1) % _EVERY == 0 or index + 1 == len(names)):
                progress(index + 1, len(names))
    return pixels


def _pillow() -> Any:
    """The module PIL.Image; it comes with an extra."""
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        fix = "pip install 'fedveil[images]'"
        raise BadArgument("images", "reading image files needs Pillow, which is not installed", fix) from error


def _decode(image_module: Any, where: str, content: bytes, side: int) -> Bytes:
    try:
        with image_module.open(io.BytesIO(content)) as opened:
            image = opened.convert("RGB")
    except Exception as error:  # a damaged image may fail in any way; Pillow refuses those of too many pixels
        raise BadArgument(where, f"not a readable image: {error}", "replace it or leave it out") from error
    if image.size != (side, side):
        image = image.resize((side, side), image_module.Resampling.BILINEAR)
    return np.asarray(image).transpose(2, 0, 1)


def _statistics(pixels: Bytes) -> tuple[Channels, Channels]:
    """Mean and deviation of each channel in [0, 1], from counts of the 256 values; deviation 0 becomes 1."""
    values = np.arange(256) / 255
    counts = np.stack([np.bincount(pixels[:, channel].reshape(-1), minlength=256) for channel in range(3)])
    shares = counts / counts.sum(1, keepdims=True)
    mean = shares @ values
    deviation = np.sqrt((shares * (values - mean[:, None]) ** 2).sum(1))
    return tuple(mean.tolist()), tuple(np.where(deviation, deviation, 1.0).tolist())


def image_part(pixels: Bytes, targets: NDArray[np.int64], mean: Channels, deviation: Channels) -> Part:
    """Bytes as float32, scaled to [0, 1] and then by mean and deviation of each channel."""
    shift, scale = (torch.tensor([255 * channel for channel in part]).view(3, 1, 1) for part in (mean, deviation))
    inputs = torch.from_numpy(np.ascontiguousarray(pixels)).to(torch.float32)
    return Part(inputs.sub_(shift).div_(scale), torch.from_numpy(np.ascontiguousarray(targets, dtype=np.int64)))


def open_archive(path: Path) -> Archive:
    """List a folder or a zip file; the stamp covers size and time of each file in a folder, or of the zip file."""
    if not path.is_dir():
        return Archive(path, _zip_names(regular(path)), stamp(path))
    names = []
    for folder, folders, files in os.walk(path, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        names += [Path(folder, file).relative_to(path).as_posix() for file in files]
    names = sorted(name for name in names if not _hidden(name))
    return Archive(path, tuple(names), " ".join(stamp(path / name) for name in names))


def stamp(path: Path) -> str:
    """Size and time of a file, of a link itself if it leads nowhere."""
    status = path.stat() if path.exists() else path.lstat()
    return f"{status.st_size} {status.st_mtime_ns}"


def _refuse(error: OSError) -> NoReturn:
    """A folder that cannot be listed is an error: its images would be missed in silence."""
    raise error


def _zip_names(path: Path) -> tuple[str, ...]:
    with path.open("rb") as file:
        try:
            names = zipfile.ZipFile(file).namelist()
        except (OSError, zipfile.BadZipFile) as error:
            what = f"not a readable zip file: {error}" if path.stat().st_size else "the file is empty"
            raise BadArgument(str(path), what, "it is damaged or cut off: fetch it again") from error
    return tuple(sorted({name for name in names if not name.endswith("/") and not _hidden(name)}))


def _hidden(name: str) -> bool:
    """Whether a file is the operating system's, not the user's."""
    return any(part.startswith(".") or part in ("__MACOSX", "Thumbs.db") for part in PurePosixPath(name).parts)


def cached(parts: tuple[str, ...], build: Callable[[], Arrays]) -> Arrays:
    """What `build` gives, from the cache if it was built before for the same `parts`.

    A damaged or unwritable cache costs time, never correctness.
    """
    key = hashlib.sha256(os.fsencode("\n".join((_CACHE_VERSION, *parts)))).hexdigest()[:32]
    path = cache_folder() / f"{key}.npz"
    arrays = _read_cache(path)
    if arrays is None:
        built = arrays = build()
        with suppress(BadArgument):
            write_whole(path, lambda file: np.savez(file, allow_pickle=False, **built))
    return arrays


def _read_cache(path: Path) -> Arrays | None:
    """The arrays of a cache file; None if it is absent or damaged (zip checksums tell)."""
    try:
        with regular(path).open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files} or None
    except Exception:  # whatever damage makes of numpy and zipfile
        return None
