"""Any folder or zip of images, a folder per class: decoded once to bytes, cached, scaled on loading."""

import hashlib
import importlib
import io
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedveil.checks import whole
from fedveil.data.archives import Archive, open_archive
from fedveil.data.catalogue import About, cache_folder, dataset, few, regular, required
from fedveil.data.records import Data, Part, Progress
from fedveil.data.splits import class_parts, stratified
from fedveil.errors import BadArgument
from fedveil.files import require_memory, write_whole

PURPOSES = ("train", "test")
FORM = "train/<class>/<image> and test/<class>/<image>"
ANY_FORM = f"<class>/<image> with two classes or more, or {FORM}"
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
TEST_SHARE = 0.2
Arrays = Mapping[str, NDArray[Any]]
Bytes = NDArray[np.uint8]
Channels = tuple[float, ...]
_CACHE_VERSION = "1"
_EVERY = 100


class Labelled(NamedTuple):
    """Images as bytes (n, 3, side, side), and the class index of each."""

    pixels: Bytes
    targets: NDArray[np.int64]


class Place(NamedTuple):
    """What an archive's member is for: its purpose, and its class."""

    name: str
    purpose: str
    label: str


class Folders(NamedTuple):
    """Labelled images of both purposes, and their classes."""

    train: Labelled
    test: Labelled
    classes: tuple[str, ...]


@dataset("images", About("any folder or zip of images, a folder per class; needs --path", "yours", "yours"))
def images(
    *,
    path: Path | None = None,
    size: int = 32,
    train_size: int | None = None,
    test_size: int | None = None,
    test_share: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Data:
    """A folder or zip of images, one folder per class; channels are standardised on the training part.

    Images that are not divided into train/ and test/ are divided here, each class by itself; the `notes` say so.

    Args:
        path: of the folder or zip, which holds train/<class>/<image> and test/<class>/<image>, or only the former, or
            <class>/<image>. No class can be called train or test.
        size: side in pixels; images of another size are resized, without keeping their proportions.
        train_size: how many training records, each class with its share; all by default.
        test_size: how many test records.
        test_share: of the images that are divided here, between 0 and 1; 0.2 by default.
        seed: of that division.
        progress: called with (done, total) while images are decoded.
    """
    where, source = "load('images')", required("images", path, "folder_or.zip")
    whole(where, "size", size)
    if test_share is not None and not 0 < test_share < 1:
        raise BadArgument(where, f"test_share is {test_share}", "a number between 0 and 1")
    archive, notes = open_archive(source), []
    places = _divided(archive) or _undivided(archive)
    if any(place.purpose == "test" for place in places):
        if test_share is not None:
            raise BadArgument(str(source), "it has a test/ of its own, and test_share would make one", "no test_share")
    else:
        share = TEST_SHARE if test_share is None else test_share
        places = _divide(archive, places, share, whole(where, "seed", seed, 0))
        test = sum(place.purpose == "test" for place in places)
        notes = [
            f"divided at random within each class: {len(places) - test:,} images for training, {test:,} for testing"
        ]
    folders = _read_places(archive, places, size, None, progress)
    found = assembled(source.stem, folders, *_statistics(folders.train.pixels), train_size, test_size)
    return replace(found, notes=(*notes, *_left_out(archive, places)))


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
    """Images of train/ and test/; classes are the folder names, which must be `classes` if given."""
    archive = open_archive(path)
    return _read_places(archive, _divided(archive), side, classes, progress)


def _read_places(
    archive: Archive, places: Sequence[Place], side: int, classes: Sequence[str] | None, progress: Progress | None
) -> Folders:
    found = {purpose: {place.label for place in places if place.purpose == purpose} for purpose in PURPOSES}
    known = tuple(classes or sorted(found["train"]))
    _check_classes(archive, found, known, all_named=classes is not None)
    position = {label: index for index, label in enumerate(known)}
    pixels = decoded(archive, [place.name for place in places], side, progress)
    targets = np.array([position[place.label] for place in places], dtype=np.int64)
    train, test = (np.array([place.purpose == purpose for place in places]) for purpose in PURPOSES)
    return Folders(Labelled(pixels[train], targets[train]), Labelled(pixels[test], targets[test]), known)


def _divided(archive: Archive) -> list[Place]:
    """The files in train/ and test/, wherever these folders are."""
    found = []
    for name in archive.names:
        parts = PurePosixPath(name).parts
        start = next((index for index, part in enumerate(parts[:-1]) if part in PURPOSES), None)
        if start is None:
            continue
        if len(parts) - start != 3:
            fix = f"{FORM}; if train or test is a class here, rename its folder"
            raise BadArgument(archive.where(name), "an image must lie in the folder of its class", fix)
        found.append(Place(name, parts[start], parts[start + 1]))
    return found


def _undivided(archive: Archive) -> list[Place]:
    """The images of an archive without train/ and test/; the folder that an image lies in is its class."""
    images = [name for name in archive.names if PurePosixPath(name).suffix.lower() in SUFFIXES]
    if not images:
        raise BadArgument(str(archive.path), f"there are no images in it ({', '.join(SUFFIXES)})", ANY_FORM)
    top = PurePosixPath(images[0]).parent.parent
    for name in images:
        path = PurePosixPath(name)
        if len(path.parts) < 2:
            raise BadArgument(archive.where(name), "an image must lie in the folder of its class", ANY_FORM)
        if path.parent.parent != top:
            what = f"folders of classes must be side by side, and {images[0]} lies elsewhere"
            raise BadArgument(archive.where(name), what, ANY_FORM)
    classes = {PurePosixPath(name).parent.name for name in images}
    if len(classes) < 2:
        what = f"all images lie in one folder, {PurePosixPath(images[0]).parent}, and so are of one class"
        raise BadArgument(str(archive.path), what, ANY_FORM)
    return [Place(name, "train", PurePosixPath(name).parent.name) for name in images]


def _divide(archive: Archive, places: Sequence[Place], share: float, seed: int) -> list[Place]:
    """Some of the training images for testing, the same share of each class."""
    labels, targets = np.unique([place.label for place in places], return_inverse=True)
    _, test = class_parts(targets, share, seed)
    if not len(test):
        what = f"{len(labels)} classes of one image each leave none to test on"
        raise BadArgument(str(archive.path), what, "more images")
    divided = list(places)
    for row in test:
        divided[row] = places[row]._replace(purpose="test")
    return divided


def _left_out(archive: Archive, places: Sequence[Place]) -> list[str]:
    """A note on images outside train/ and test/, and on files beside images that are none by their names."""
    taken = {place.name for place in places}
    homes = {PurePosixPath(name).parent for name in taken}
    left = [PurePosixPath(name) for name in archive.names if name not in taken]
    left = [path for path in left if path.suffix.lower() in SUFFIXES or path.parent in homes]
    many = f"{len(left):,} file{'s' * (len(left) > 1)}"
    return [f"left out {many}, such as {left[0]}: not in train/ or test/, or not named as an image"] if left else []


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
    image_module, size = _pillow(), len(names) * 3 * side * side
    with _require_memory(len(names), side, size), archive.reader() as read:
        pixels = np.empty((len(names), 3, side, side), dtype=np.uint8)
        for index, name in enumerate(names):
            pixels[index] = _decode(image_module, archive.where(name), read(name), side)
            if progress and ((index + 1) % _EVERY == 0 or index + 1 == len(names)):
                progress(index + 1, len(names))
    return pixels


def _require_memory(count: int, side: int, needed: int) -> AbstractContextManager[None]:
    what, fix = (
        f"{count:,} images of {side} x {side} pixels",
        "choose a smaller size, such as --size 32, or fewer images",
    )
    return require_memory("images", what, fix, needed)


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
    with _require_memory(len(pixels), pixels.shape[-1], 4 * pixels.size):
        inputs = torch.from_numpy(np.ascontiguousarray(pixels)).to(torch.float32)
    return Part(inputs.sub_(shift).div_(scale), torch.from_numpy(np.ascontiguousarray(targets, dtype=np.int64)))


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
