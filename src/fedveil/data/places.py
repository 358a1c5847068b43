"""Where the files of a data set are, and what to say when they are not there."""

import os
from collections.abc import Iterable
from pathlib import Path

from fedveil.errors import BadArgument

FILES: dict[str, tuple[str, ...]] = {
    "bank": ("bank-additional-full.csv", "bank-additional/bank-additional-full.csv"),
    "cifar10": ("cifar-10-python.tar.gz", "cifar-10-batches-py", "data_batch_1", "train", "*.zip"),
    "cifar100": ("cifar-100-python.tar.gz", "cifar-100-python", "train", "*.zip"),
    "lesion": ("*.jpg", "*/*.jpg", "*.zip", "HAM10000_metadata.csv"),
}
"""For each data set with files of its own: what shows that a folder holds it, best first."""

_INSIDE = {"data_batch_1", "train", "*.jpg", "*/*.jpg", "HAM10000_metadata.csv"}
"""Files that stand for the folder they are in."""

WANTED = {
    "bank": "bank-additional-full.csv",
    "cifar10": "cifar-10-python.tar.gz (or a zip of train|test/<class>/<image>)",
    "cifar100": "cifar-100-python.tar.gz (or a zip of train|test/<class>/<image>)",
    "lesion": "the HAM10000 images, in a folder or a zip, with HAM10000_metadata.csv",
}
"""For each data set with files of its own: what to put into its folder."""


def cache_folder() -> Path:
    """Where decoded images are kept: $FEDVEIL_CACHE, else ~/.cache/fedveil."""
    return Path(os.environ.get("FEDVEIL_CACHE") or "~/.cache/fedveil").expanduser()


def data_folder() -> Path:
    """Where data sets are looked for and downloaded to: $FEDVEIL_DATA, else `data` in the cache folder."""
    given = os.environ.get("FEDVEIL_DATA")
    return Path(given).expanduser() if given else cache_folder() / "data"


def find_inside(name: str, folder: Path) -> Path | None:
    """The best source of a data set in a folder; None if there is none."""
    for pattern in FILES[name]:
        found = sorted(path for path in folder.glob(pattern) if not path.name.startswith("."))
        if found and pattern in _INSIDE:
            return folder
        if len(found) > 1:
            what = f"several archives could be {name!r}: {few(path.name for path in found)}"
            raise BadArgument(str(folder), what, "path= one of them, or unpack them into this folder")
        if found:
            return found[0]
    return None


def source_of(name: str, path: Path | None) -> Path:
    """The file or folder to read a data set from: `path`, or what its folder in $FEDVEIL_DATA holds."""
    if path is not None and not path.is_dir():
        return existing(path, name)
    folder = data_folder() / name if path is None else path
    found = find_inside(name, folder)
    if found is None:
        what = f"no files of {name!r} here" if folder.is_dir() else f"there is no such folder, so no {name!r}"
        raise BadArgument(str(folder), what, how_to_get(name, folder))
    return found


def how_to_get(name: str, folder: Path) -> str:
    """What to put where, in words."""
    here = f"put {WANTED[name]} into {folder}"
    return f"{here}, or set FEDVEIL_DATA, or pass path=, or run `fedveil data get {name}`"


def existing(path: Path, name: str | None = None) -> Path:
    """Return `path` if there is something there."""
    if not path.exists():
        fix = how_to_get(name, path.parent) if name else "path= an existing file or folder"
        raise BadArgument(str(path), "there is no such file", fix)
    return path


def required(name: str, path: Path | None, example: str) -> Path:
    """The path of a data set that has no place of its own."""
    if path is None:
        raise BadArgument(f"load({name!r})", "it needs a path", f"load({name!r}, path={example!r})")
    return existing(path)


def few(names: Iterable[str], most: int = 5) -> str:
    """The first of some names, for a message."""
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")
