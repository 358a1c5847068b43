"""Load any folder or zip file of images with one folder per class, and cache the decoded images."""

import hashlib
import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import avg_pool2d

from fedveil.data.archives import Archive, open_archive
from fedveil.data.catalogue import OpenUnitInterval, PositiveInt, Scaling, Seed, cache_folder, require_regular, shorten
from fedveil.data.dataset import Data, DataPart
from fedveil.data.splits import Indices, choose_subset, divide_classes
from fedveil.errors import BadArgument
from fedveil.files import require_memory, write_atomically
from fedveil.records.encoding import ImageEncoding

PURPOSES = ("train", "test")
LAYOUT = "train/<class>/<image> and test/<class>/<image>"
LAYOUT_FIX = f"use <class>/<image> with at least two classes, or {LAYOUT}"
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
TEST_SHARE = 0.2
Bytes = NDArray[np.uint8]
Channels = tuple[float, ...]
Arrays = Mapping[str, NDArray[Any]]
PUBLIC_SCALE: tuple[Channels, Channels] = ((0.5,) * 3, (0.25,) * 3)
_CACHE_VERSION = "2"


class ImageFile(NamedTuple):
    """An image in an archive, with its purpose (train or test) and its class."""

    name: str
    purpose: str
    label: str


class ImageSet(NamedTuple):
    """Images as bytes of shape (n, 3, side, side), their class indices, and the rows for training and testing."""

    pixels: Bytes
    targets: Indices
    train: Indices
    test: Indices
    classes: tuple[str, ...]


def images(
    *,
    path: Path,
    size: PositiveInt = 32,
    train_size: PositiveInt | None = None,
    test_size: PositiveInt | None = None,
    test_share: OpenUnitInterval | None = None,
    seed: Seed = 0,
    scaling: Scaling = "records",
) -> Data:
    """Load a folder or zip file of images with one folder per class, and standardise the channels.

    If there is no folder test/, each class is divided at random, and `notes` reports this.

    Args:
        path: path of the folder or zip file, which contains train/<class>/<image> and test/<class>/<image>, or only the
            former, or <class>/<image>. No class may be called train or test.
        size: side length of the images in pixels; other images are resized without keeping their aspect ratio.
        train_size: number of training records, chosen in proportion to the class sizes; all by default.
        test_size: number of test records, chosen in the same way.
        test_share: fraction of the images to test on if there is no folder test/, between 0 and 1; 0.2 by default.
        seed: seed for the split into training and test images.
        scaling: "public" uses mean 0.5 and standard deviation 0.25 for every channel, as differential privacy
            requires, instead of the statistics of the training "records".
    """
    archive, notes = open_archive(path), []
    files = find_image_files(archive) or _find_class_folders(archive)
    if any(file.purpose == "test" for file in files):
        if test_share is not None:
            raise BadArgument(str(path), "it is already divided into train/ and test/", "leave out test_share")
    else:
        files = _divide(archive, files, test_share or TEST_SHARE, seed)
        test = sum(file.purpose == "test" for file in files)
        parts = f"{len(files) - test:,} images for training, {test:,} for testing"
        notes = [f"divided at random within each class: {parts}"]
    image_set = read_files(archive, files, size)
    scale = PUBLIC_SCALE if scaling == "public" else _statistics(image_set.pixels[image_set.train])
    data = assemble(path.stem, image_set, scale, (train_size, test_size))
    return replace(data, notes=(*notes, *_note_left_out(archive, files)))


def read_class_folders(path: Path, size: int, classes: Sequence[str] = ()) -> tuple[DataPart, tuple[str, ...]]:
    """Return the images of a folder or zip file with one folder per class, with pixels in [0, 1], and the classes.

    If `classes` is given, images of other classes are refused.
    """
    archive = open_archive(path)
    files = _find_class_folders(archive)
    class_names = tuple(classes or sorted({file.label for file in files}))
    if unknown := sorted({file.label for file in files} - set(class_names)):
        raise BadArgument(
            str(path), f"it has unknown classes: {shorten(unknown)}", f"use the classes {shorten(class_names, 10)}"
        )
    pixels = torch.from_numpy(decode_images(archive, [file.name for file in files], size))
    return DataPart(pixels.float() / 255, torch.tensor([class_names.index(file.label) for file in files])), class_names


def assemble(
    name: str,
    images: ImageSet,
    scale: tuple[Channels, Channels],
    sizes: tuple[int | None, int | None],
    columns: Arrays | None = None,
) -> Data:
    """Create a data set from images: choose subsets, shuffle records and standardise channels.

    Args:
        name: name of the data set.
        images: images for both training and testing.
        scale: mean and standard deviation of each channel.
        sizes: sizes of the subsets for training and testing; None for all records.
        columns: values of each image, by column.
    """
    where, targets = f"data set {name!r}", images.targets
    train = images.train[choose_subset(where, "train_size", targets[images.train], sizes[0])]
    test = images.test[choose_subset(where, "test_size", targets[images.test], sizes[1])]
    parts = [_standardise(images.pixels[rows], targets[rows], scale) for rows in (train, test)]
    train_columns = {column: values[train] for column, values in (columns or {}).items()}
    encoding = ImageEncoding(images.pixels.shape[-1], *scale)
    return Data(
        name, parts[0], parts[1], classes=images.classes, columns=train_columns, scale=scale, input_encoding=encoding
    )


def read_files(archive: Archive, files: Sequence[ImageFile], side: int, classes: Sequence[str] = ()) -> ImageSet:
    """Decode images; if `classes` is given, the names of the folders must be exactly these classes."""
    labels_by_purpose = {purpose: {file.label for file in files if file.purpose == purpose} for purpose in PURPOSES}
    class_names = tuple(classes or sorted(labels_by_purpose["train"]))
    _check_classes(archive, labels_by_purpose, class_names, complete=bool(classes))
    targets = np.array([class_names.index(file.label) for file in files], dtype=np.int64)
    pixels = decode_images(archive, [file.name for file in files], side)
    train, test = (np.flatnonzero([file.purpose == purpose for file in files]) for purpose in PURPOSES)
    return ImageSet(pixels, targets, train, test, class_names)


def find_image_files(archive: Archive) -> list[ImageFile]:
    """Return the files in folders called train or test, at any depth."""
    files = []
    for name in archive.names:
        parts = PurePosixPath(name).parts
        start = next((index for index, part in enumerate(parts[:-1]) if part in PURPOSES), None)
        if start is None:
            continue
        if len(parts) - start != 3:
            fix = f"use {LAYOUT}; if train or test is a class here, rename its folder"
            raise BadArgument(archive.where(name), "an image must be in the folder of its class", fix)
        files.append(ImageFile(name, parts[start], parts[start + 1]))
    return files


def _find_class_folders(archive: Archive) -> list[ImageFile]:
    """Return the images of an archive without train/ and test/; the folder of an image is its class."""
    images = {name: PurePosixPath(name) for name in archive.names if PurePosixPath(name).suffix.lower() in SUFFIXES}
    if not images:
        raise BadArgument(str(archive.path), f"there are no images in it ({', '.join(SUFFIXES)})", LAYOUT_FIX)
    first = next(iter(images.values()))
    for name, image in images.items():
        if len(image.parts) < 2 or image.parent.parent != first.parent.parent:
            message = "an image must be in the folder of its class, and all class folders must have the same parent"
            raise BadArgument(archive.where(name), message, LAYOUT_FIX)
    if len({image.parent for image in images.values()}) < 2:
        message = f"all images are in one folder, {first.parent}, so there is only one class"
        raise BadArgument(str(archive.path), message, LAYOUT_FIX)
    return [ImageFile(name, "train", image.parent.name) for name, image in images.items()]


def _divide(archive: Archive, files: Sequence[ImageFile], fraction: float, seed: int) -> list[ImageFile]:
    """Set aside the same fraction of each class for testing."""
    labels, targets = np.unique([file.label for file in files], return_inverse=True)
    _, test = divide_classes(targets, fraction, seed)
    if not len(test):
        message = f"each of the {len(labels)} classes has only one image, so there are none to test on"
        raise BadArgument(str(archive.path), message, "use more images")
    test_rows = set(test.tolist())
    return [file._replace(purpose="test") if row in test_rows else file for row, file in enumerate(files)]


def _note_left_out(archive: Archive, files: Sequence[ImageFile]) -> list[str]:
    """Return a note about unused files: images outside train/ and test/, and files without an image suffix."""
    names = {file.name for file in files}
    folders = {PurePosixPath(name).parent for name in names}
    unused = [PurePosixPath(name) for name in archive.names if name not in names]
    unused = [path for path in unused if path.suffix.lower() in SUFFIXES or path.parent in folders]
    description = f"{len(unused):,} file{'s' * (len(unused) > 1)}"
    return (
        [f"left out {description}, such as {unused[0]}: not in train/ or test/, or without an image suffix"]
        if unused
        else []
    )


def _check_classes(
    archive: Archive, labels_by_purpose: dict[str, set[str]], class_names: tuple[str, ...], *, complete: bool
) -> None:
    """Refuse parts without images, folders that are not known classes and, if `complete`, missing classes."""
    for purpose, labels in labels_by_purpose.items():
        unknown, missing = sorted(labels - set(class_names)), sorted(set(class_names) - labels)
        if not labels:
            message, fix = f"there are no images in {purpose}/", f"use {LAYOUT}"
        elif unknown:
            message, fix = (
                f"{purpose}/ has unknown classes: {shorten(unknown)}",
                f"use the classes {shorten(class_names, 10)}",
            )
        elif missing and complete:
            message, fix = f"{purpose}/ has no images of {shorten(missing)}", "download the archive again"
        else:
            continue
        raise BadArgument(str(archive.path), message, fix)


def decode_images(archive: Archive, names: Sequence[str], side: int) -> Bytes:
    """Return images from an archive or the cache as bytes of shape (n, 3, side, side), in the order of `names`."""
    key = (str(archive.path.resolve()), archive.stamp, str(side), *names)
    return use_cache(key, lambda: {"images": _decode_all(archive, names, side)})["images"]


def _decode_all(archive: Archive, names: Sequence[str], side: int) -> Bytes:
    try:
        import PIL.Image
    except ImportError as error:
        message = "reading image files needs Pillow, which is not installed"
        raise BadArgument("images", message, "pip install 'fedveil[images]'") from error
    shape = (len(names), 3, side, side)
    with _reserve(shape, 1), archive.reader() as read:
        pixels = np.empty(shape, dtype=np.uint8)
        for index, name in enumerate(names):
            content = read(name)
            try:
                with PIL.Image.open(io.BytesIO(content)) as image_file:
                    image = image_file.convert("RGB")
            except Exception as error:  # damaged or very large images raise errors of many types
                message = f"not a readable image: {error}"
                raise BadArgument(archive.where(name), message, "replace it or leave it out") from error
            if image.size != (side, side):
                image = image.resize((side, side), PIL.Image.Resampling.BILINEAR)
            pixels[index] = np.asarray(image).transpose(2, 0, 1)
    return pixels


def _reserve(shape: Sequence[int], width: int) -> AbstractContextManager[None]:
    """Refuse images that need more memory than is available, at `width` bytes per value."""
    message = f"{shape[0]:,} images of {shape[2]} x {shape[3]} pixels"
    fix = "choose a smaller size, such as --size 32, or fewer images"
    return require_memory("images", message, fix, width * math.prod(shape))


def encode_images(pixels: Bytes, encoding: ImageEncoding) -> Tensor:
    """Convert image bytes of shape (n, 3, size, size) to inputs for a model."""
    inputs = _standardise(pixels, np.zeros(len(pixels), dtype=np.int64), (encoding.mean, encoding.deviation)).tensor
    return inputs if encoding.pool == 1 else avg_pool2d(inputs, encoding.pool)


def _statistics(pixels: Bytes) -> tuple[Channels, Channels]:
    """Return the mean and standard deviation of each channel, for pixels in [0, 1]; a deviation of 0 becomes 1."""
    values = np.arange(256) / 255
    counts = np.stack([np.bincount(pixels[:, channel].reshape(-1), minlength=256) for channel in range(3)])
    frequencies = counts / counts.sum(1, keepdims=True)
    mean = frequencies @ values
    deviation = np.sqrt((frequencies * (values - mean[:, None]) ** 2).sum(1))
    return tuple(mean.tolist()), tuple(np.where(deviation, deviation, 1.0).tolist())


def _standardise(pixels: Bytes, targets: Indices, scale: tuple[Channels, Channels]) -> DataPart:
    """Convert bytes to float32, standardised with the mean and standard deviation of each channel."""
    mean, deviation = (torch.tensor([255 * channel for channel in moments]).view(3, 1, 1) for moments in scale)
    with _reserve(pixels.shape, 4):
        inputs = torch.from_numpy(np.ascontiguousarray(pixels)).to(torch.float32)
    return DataPart(inputs.sub_(mean).div_(deviation), torch.from_numpy(targets))


def use_cache(key: tuple[str, ...], build: Callable[[], Arrays]) -> Arrays:
    """Return the arrays cached under `key`, or build and cache them.

    A damaged cache file is replaced. If the cache cannot be written, the arrays are only returned.
    """
    digest = hashlib.sha256(os.fsencode("\n".join((_CACHE_VERSION, *key)))).hexdigest()[:32]
    path = cache_folder() / f"{digest}.npz"
    # if the file is missing or damaged (zip checksums detect this), build the arrays
    with suppress(Exception), require_regular(path).open("rb") as file, np.load(file, allow_pickle=False) as cached:
        if cached.files:
            return {name: cached[name] for name in cached.files}
    arrays = build()
    with suppress(BadArgument):
        write_atomically(path, lambda file: np.savez(file, allow_pickle=False, **arrays))
    return arrays
