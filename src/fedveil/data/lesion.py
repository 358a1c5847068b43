"""HAM10000 (Tschandl, Rosendahl, Kittler 2018): dermatoscopic images of seven kinds of skin lesion, 64 x 64 pixels."""

from pathlib import Path, PurePosixPath
from typing import Annotated

import numpy as np
from pydantic import Field

from fedveil.data.archives import Archive, open_archive
from fedveil.data.catalogue import METADATA, PositiveInt
from fedveil.data.dataset import Data
from fedveil.data.images import SUFFIXES, ImageSet, assemble, decode_images
from fedveil.data.splits import divide_groups
from fedveil.data.tables import CsvTable, parse_table, read_table
from fedveil.errors import BadArgument

SIDE = 64
Side = Annotated[int, Field(ge=8, le=SIDE)]
CLASSES = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")
MEAN = (0.7630, 0.5456, 0.5700)
DEVIATION = (0.1409, 0.1526, 0.1700)
COLUMNS = ("dx_type", "sex", "localization")


def lesion(
    *, path: Path, train_size: PositiveInt | None = None, test_size: PositiveInt | None = None, size: Side = SIDE
) -> Data:
    """Load HAM10000: up to 10,015 images of skin lesions, seven classes, split 80:20; no lesion is in both parts.

    Images that are listed in the metadata but missing from the archive are left out.

    Args:
        path: a folder or zip file with the images; HAM10000_metadata.csv must be in it or next to it.
        train_size: number of training records, chosen in proportion to the class sizes; all by default.
        test_size: number of test records, chosen in the same way.
        size: side length of the images in pixels, at most 64, as in the paper.
    """
    archive = open_archive(path)
    table = _read_metadata(archive)
    names, rows = _match_images(archive, table)
    targets = table.codes("dx", CLASSES)[rows]
    _, lesions = np.unique(table.columns["lesion_id"][rows], return_inverse=True)
    train, test = divide_groups(lesions, 0.8)
    if not (len(train) and len(test)):
        raise BadArgument(str(archive.path), f"{len(rows)} images are too few to divide", "use more images")
    pixels = decode_images(archive, names, size)
    columns = {column: table.columns[column][rows] for column in COLUMNS}
    images = ImageSet(pixels, targets, train, test, CLASSES)
    return assemble("lesion", images, (MEAN, DEVIATION), (train_size, test_size), columns)


def _read_metadata(archive: Archive) -> CsvTable:
    """Read the metadata from the archive or from the file next to it."""
    members = [name for name in archive.names if PurePosixPath(name).name == METADATA]
    sibling = archive.path.parent / METADATA
    if members:
        with archive.reader() as read:
            table = parse_table(archive.where(members[0]), read(members[0]))
    elif sibling.is_file():
        table = read_table(sibling)
    else:
        message, fix = f"there is no {METADATA} in it or next to it", f"put {METADATA} next to it"
        raise BadArgument(str(archive.path), message, fix)
    table.require_columns(["lesion_id", "image_id", "dx", *COLUMNS])
    return table


def _match_images(archive: Archive, table: CsvTable) -> tuple[list[str], list[int]]:
    """Return the image files and, for each, the row of the metadata that describes it."""
    row_by_image: dict[str, int] = {}
    for row, image in enumerate(table.columns["image_id"]):
        if image in row_by_image:
            table.refuse(row, "image_id", f"{image!r} is listed twice", "keep one row per image")
        row_by_image[image] = row
    names = [name for name in archive.names if PurePosixPath(name).suffix.lower() in SUFFIXES]
    if not names:
        raise BadArgument(str(archive.path), "there are no images in it", "add the HAM10000 images, as .jpg files")
    rows = []
    for name in names:
        image = PurePosixPath(name).stem
        if image not in row_by_image:
            fix = "remove it, or correct the table"
            raise BadArgument(archive.where(name), f"{METADATA} does not list {image!r}", fix)
        rows.append(row_by_image[image])
    return names, rows
