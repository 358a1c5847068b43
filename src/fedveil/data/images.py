"""Any folder or zip of images, `train|test/<class>/<file>`."""

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedveil.data.archives import Archive, open_archive
from fedveil.data.choices import whole
from fedveil.data.divide import stratified
from fedveil.data.pixels import Bytes, Channels, decoded, image_part, shown, statistics
from fedveil.data.places import few, required
from fedveil.data.records import Data, Progress
from fedveil.data.registry import dataset
from fedveil.errors import BadArgument

FORM = "train/<class>/<image> and test/<class>/<image>"


class Labelled(NamedTuple):
    """Images as bytes (n, 3, side, side), and the class index of each."""

    pixels: Bytes
    targets: NDArray[np.int64]


class Folders(NamedTuple):
    """Labelled images of both purposes, and their classes."""

    train: Labelled
    test: Labelled
    classes: tuple[str, ...]


@dataset("images")
def images(
    *,
    path: Path | None = None,
    size: int = 32,
    train_size: int | None = None,
    test_size: int | None = None,
    progress: Progress | None = None,
) -> Data:
    """A folder or zip of images, one folder a class; channels are standardised on the training part.

    Args:
        path: of the folder or zip, which holds train/<class>/<image> and test/<class>/<image>.
        size: side in pixels; images of another size are resized, without keeping their proportions.
        train_size: how many training records, each class with its share; all by default.
        test_size: how many test records.
        progress: called with (done, total) while images are decoded.
    """
    source = required("images", path, "folder_or.zip")
    folders = read_folders(source, whole("load('images')", "size", size, 1), progress=progress)
    return assembled(source.stem, folders, statistics(folders.train.pixels), train_size, test_size)


def assembled(
    name: str,
    folders: Folders,
    scale: tuple[Channels, Channels],
    train_size: int | None,
    test_size: int | None,
) -> Data:
    """A data set from labelled images: subsets are chosen, records shuffled, channels scaled."""
    parts = []
    for option, size, part in (("train_size", train_size, folders.train), ("test_size", test_size, folders.test)):
        chosen = stratified(f"load of {name!r}", option, part.targets, size)
        parts.append(image_part(part.pixels[chosen], part.targets[chosen], *scale))
    return Data(name, parts[0], parts[1], classes=folders.classes, scale=shown(scale))


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
    training = np.array([purpose == "train" for _, purpose, _ in places])
    return Folders(
        Labelled(pixels[training], targets[training]), Labelled(pixels[~training], targets[~training]), known
    )


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
