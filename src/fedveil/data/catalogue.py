"""What data sets there are, where they are, and how to get them."""

import io
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from fedveil.data.choices import choose
from fedveil.data.download import digest_of, fetch
from fedveil.data.places import FILES, WANTED, data_folder, find_inside
from fedveil.data.records import Progress
from fedveil.errors import BadArgument


@dataclass(frozen=True)
class Entry:
    """A line of the catalogue.

    Attributes:
        name: for `load`.
        description: in a few words.
        state: "embedded" (comes with the library), "found", "missing", or "yours" (any files, given by path).
        where: the file or folder it was found in, or would be looked for in; None if it needs none.
        source: who made it, and where it is published.
        licence: what its makers allow.
    """

    name: str
    description: str
    state: str
    where: Path | None
    source: str
    licence: str


@dataclass(frozen=True)
class Download:
    """A public file: its address, what lands in the folder and that file's checksum.

    Attributes:
        inside: zip members to open in turn to come from the download to the file; () if it is the download.
    """

    url: str
    file: str
    digest: str
    inside: tuple[str, ...] = ()


_KRIZ = "https://www.cs.toronto.edu/~kriz"
DOWNLOADS = {
    "bank": Download(
        "https://archive.ics.uci.edu/static/public/222/bank+marketing.zip",
        "bank-additional-full.csv",
        "sha256:74adfc578bf77a7ff4bb1ba4a9f8709d9e3c6907342959c2c8416847e0afb4d8",
        ("bank-additional.zip", "bank-additional/bank-additional-full.csv"),
    ),
    "cifar10": Download(
        f"{_KRIZ}/cifar-10-python.tar.gz", "cifar-10-python.tar.gz", "md5:c58f30108f718f92721af3b95e74349a"
    ),
    "cifar100": Download(
        f"{_KRIZ}/cifar-100-python.tar.gz", "cifar-100-python.tar.gz", "md5:eb9058c3a382ffc7106e4002c42a8d85"
    ),
}
"""Data sets that anybody may download."""

_LESION_PAGE = "https://doi.org/10.7910/DVN/DBW86T"
_NOTES = {
    "bank": (
        "Bank Marketing: 41,188 calls, 20 inputs, did the client subscribe?",
        "Moro, Cortez, Rita 2014; UCI Machine Learning Repository, data set 222",
        "CC BY 4.0",
    ),
    "cifar10": ("60,000 photographs of 32 x 32, 10 classes", f"Krizhevsky 2009; {_KRIZ}/cifar.html", "none stated"),
    "cifar100": ("60,000 photographs of 32 x 32, 100 classes", f"Krizhevsky 2009; {_KRIZ}/cifar.html", "none stated"),
    "csv": ("any CSV file with a header; needs path= and target=", "yours", "yours"),
    "diabetes": (
        "442 patients, 10 measures, progression of diabetes",
        "Efron et al. 2004; scikit-learn",
        "none stated",
    ),
    "digits": ("1,797 handwritten digits of 8 x 8", "Alpaydin, Kaynak 1998; scikit-learn", "CC BY 4.0"),
    "images": ("any folder or zip of train|test/<class>/<image>; needs path=", "yours", "yours"),
    "lesion": (
        "HAM10000: skin lesions at 64 x 64, 7 classes",
        f"Tschandl, Rosendahl, Kittler 2018; Harvard Dataverse, {_LESION_PAGE}",
        "Creative Commons, not for commercial use",
    ),
}
_EMBEDDED = {"digits", "diabetes"}


def available() -> list[Entry]:
    """Every data set that `load` knows, sorted by name, and whether its files are there.

    Example:
        >>> [entry.state for entry in available() if entry.name == "digits"]
        ['embedded']
    """
    return [Entry(name, notes[0], *_state(name), *notes[1:]) for name, notes in sorted(_NOTES.items())]


def _state(name: str) -> tuple[str, Path | None]:
    """Whether the files of a data set are there, and where."""
    if name not in FILES:
        return ("embedded" if name in _EMBEDDED else "yours"), None
    folder = data_folder() / name
    try:
        found = find_inside(name, folder)
    except BadArgument:  # several archives: they are there, and `load` says which to name
        found = folder
    return ("missing", folder) if found is None else ("found", found)


def get(name: str, folder: str | Path | None = None, progress: Progress | None = None) -> Path:
    """Download a data set, so that `load` finds it.

    An interrupted download is resumed; a file with a wrong checksum is not kept.

    Args:
        name: of the data set.
        folder: with one folder a data set inside; $FEDVEIL_DATA by default.
        progress: called with (done, total) in bytes.

    Returns:
        The file.

    Raises:
        BadArgument: it needs no download, cannot be downloaded, or the download failed; says what to put where.
    """
    choose("get", "data set", name, _NOTES)
    if name not in FILES:
        raise BadArgument("get", f"{name!r} needs no download", f"fedveil.data.load({name!r})")
    home = (data_folder() if folder is None else Path(folder).expanduser()) / name
    if name not in DOWNLOADS:
        fix = f"get it from {_LESION_PAGE} (its terms must be accepted there) and put {WANTED[name]} into {home}"
        raise BadArgument("get", f"{name!r} cannot be downloaded by a program", fix)
    source = DOWNLOADS[name]
    target = home / source.file
    if not source.inside or target.exists():
        return fetch(source.url, target, source.digest, progress)
    archive = fetch(source.url, home / f"{name}-download.zip", None, progress)
    try:
        _unpack(archive, source, target)
    finally:
        archive.unlink()
    return target


def _unpack(archive: Path, source: Download, target: Path) -> None:
    """Take one file out of a zip, or out of zips within it, check it and put it in place whole."""
    content = archive.read_bytes()
    for member in source.inside:
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as opened:
                content = opened.read(member)
        except (zipfile.BadZipFile, KeyError, zlib.error, RuntimeError, NotImplementedError) as error:
            fix = f"put {source.file} into {target.parent} yourself"
            raise BadArgument(source.url, f"the download has no readable {member}", fix) from error
    part = target.with_name(target.name + ".part")
    try:
        part.write_bytes(content)
        if digest_of(part, source.digest) != source.digest:
            what = f"{source.file} in the download is not the expected file, and was not kept"
            raise BadArgument(source.url, what, f"put {source.file} into {target.parent} yourself")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
