"""The catalogue of data sets: where their files are, and loading by name.

A loader registers itself with `dataset`; its keyword-only parameters are its options.
"""

import errno
import inspect
import os
import stat
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fedveil.checks import one_of
from fedveil.data.dataset import Data
from fedveil.errors import BadArgument

Loader = Callable[..., Data]
MOST_BYTES = 2**28  # of a file that is read whole: an image, a batch of CIFAR, a download
_PLAIN = (bool, int, float, str, type(None))


class Download(NamedTuple):
    """A public file: its address, its name in the data set's folder, and its checksum."""

    url: str
    file: str
    digest: str  # "md5:..." or "sha256:..." of the file
    inside: tuple[str, ...] = ()  # zip members that lead from the download to the file, outermost first
    most: int = MOST_BYTES  # bytes of the download, and of each member; a server that sends more is cut off


class About(NamedTuple):
    """The catalogue's entry of a data set.

    `files` are patterns that show that a folder holds it, best first; a match of one that starts with "./" stands for
    the folder it is in. A data set without files has none.
    """

    description: str
    source: str  # its authors, and where it is published
    licence: str
    files: tuple[str, ...] = ()
    wanted: str = ""  # the files to put into its folder, in words
    download: Download | None = None  # if anybody may download it


@dataclass(frozen=True)
class DatasetInfo:
    """A line of the catalogue.

    Attributes:
        name: for `load`.
        description: in a few words.
        state: "embedded" (comes with the library), "found", "missing", or "yours" (any files, given by path).
        where: the file or folder in which it was found or is expected; None if it needs none.
        source: its authors, and where it is published.
        licence: under which it may be used.
    """

    name: str
    description: str
    state: str
    where: Path | None
    source: str
    licence: str


LOADERS: dict[str, Loader] = {}
ABOUT: dict[str, About] = {}


def dataset(name: str, about: About) -> Callable[[Loader], Loader]:
    """Register a loader under a name."""

    def register(loader: Loader) -> Loader:
        LOADERS[name], ABOUT[name] = loader, about
        return loader

    return register


def load(name: str, *, path: str | Path | None = None, **options: object) -> Data:
    """Load a data set.

    Without `path` its files are expected in the folder `name` of $FEDVEIL_DATA. Images are decoded once and cached in
    $FEDVEIL_CACHE (default ~/.cache/fedveil). The same name, files and options always give the same records in the
    same order.

    Args:
        name: one of `fedveil.data.available()`, such as "digits", "bank", "cifar10", "lesion", "images", "csv".
        path: the file or folder to read instead.
        **options: of this data set; an unknown one is refused with the list.

    Raises:
        BadArgument: the name or an option is unknown, or a file is missing, damaged, mislabelled or not readable.

    Example:
        >>> load("digits")
        Data('digits', train=1438, test=359, input (64,), 10 classes)
    """
    if name not in LOADERS and (Path(name).suffix or Path(name).exists()):
        kind = "images" if Path(name).is_dir() else "csv"
        what = f"{name!r} is a file or folder, not the name of a data set"
        raise BadArgument("load", what, f"use --data {kind} --path {name} (in Python load({kind!r}, path={name!r}))")
    loader = LOADERS[one_of("load", "data set", name, LOADERS)]
    where, hints = f"load({name!r})", _option_types(loader)
    if path is not None:
        if "path" not in hints:
            fix = f"leave the path out, or use --data csv (or images) --path {path} for your own files"
            raise BadArgument(where, "it comes with the library and takes no path", fix)
        options["path"] = Path(os.path.expanduser(path))
    for option, value in options.items():
        _check_option(where, option, value, hints[one_of(where, "option", option, hints)])
    try:
        return loader(**options)
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
        raise BadArgument(str(error.filename or path or where), what, "use readable files and folders") from error


def _option_types(loader: Loader) -> dict[str, Any]:
    return {option: found.annotation for option, found in inspect.signature(loader).parameters.items()}


def _check_option(where: str, option: str, value: object, hint: Any) -> None:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    fits = type(value) in kinds or (float in kinds and type(value) is int)
    if not fits and all(kind in _PLAIN for kind in kinds):
        wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise BadArgument(where, f"{option} is {value!r}", f"give {option} as {wanted}")


def available() -> list[DatasetInfo]:
    """List every data set that `load` knows, sorted by name, and whether its files are there.

    Example:
        >>> [info.state for info in available() if info.name == "digits"]
        ['embedded']
    """
    return [
        DatasetInfo(name, about.description, *_find_state(name), about.source, about.licence)
        for name, about in sorted(ABOUT.items())
    ]


def _find_state(name: str) -> tuple[str, Path | None]:
    if not ABOUT[name].files:
        return ("yours" if "path" in _option_types(LOADERS[name]) else "embedded"), None
    folder = data_folder() / name
    try:
        found = _find_inside(name, folder)
    except BadArgument:  # several archives: they are there, and `load` asks for one of them
        found = folder
    except OSError:  # the folder cannot be read, and `load` says why
        found = None
    return ("missing", folder) if found is None else ("found", found)


def cache_folder() -> Path:
    """Return the folder for decoded images: $FEDVEIL_CACHE, else ~/.cache/fedveil."""
    return Path(os.path.expanduser(os.environ.get("FEDVEIL_CACHE") or "~/.cache/fedveil"))


def data_folder() -> Path:
    """Return the folder for files of data sets: $FEDVEIL_DATA, else `data` in the cache folder."""
    given = os.environ.get("FEDVEIL_DATA")
    return Path(os.path.expanduser(given)) if given else cache_folder() / "data"


def _find_inside(name: str, folder: Path) -> Path | None:
    """Return the best source of a data set in a folder; None if there is none."""
    for pattern in ABOUT[name].files:
        found = sorted(path for path in folder.glob(pattern) if not path.name.startswith("."))
        if found and pattern.startswith("./"):
            return folder
        if len(found) > 1:
            what = f"several archives could be {name!r}: {shorten(path.name for path in found)}"
            raise BadArgument(str(folder), what, "name one of them with path=, or unpack them into this folder")
        if found:
            return found[0]
    return None


def find_files(name: str, path: Path | None) -> Path:
    """Return the file or folder to read a data set from: `path`, or the best match in its folder in $FEDVEIL_DATA."""
    folder = data_folder() / name if path is None else path
    how = f"put {ABOUT[name].wanted} into {folder if path is None or path.is_dir() else path.parent}"
    fix = f"{how}, or set FEDVEIL_DATA, or pass path=, or run `fedveil data get {name}`"
    if path is not None and not path.is_dir():
        return _require_file(path, fix)
    found = _find_inside(name, folder)
    if found is None:
        what = f"no files of {name!r} here" if folder.is_dir() else f"there is no such folder, so no {name!r}"
        raise BadArgument(str(folder), what, fix)
    return found


def require_path(name: str, path: Path | None, example: str) -> Path:
    """Return the path of a data set that has no default folder."""
    if path is None:
        fix = f"use --path {example} (in Python load({name!r}, path={example!r}))"
        raise BadArgument(f"load({name!r})", "it needs a path", fix)
    return _require_file(path, "give the --path (in Python path=) of an existing file or folder")


def require_regular(path: Path) -> Path:
    """Return `path` if it is a file: reading a pipe would never end, and a link may lead nowhere."""
    if not stat.S_ISREG(path.stat().st_mode):
        kind = errno.EISDIR if path.is_dir() else errno.EINVAL
        raise OSError(kind, os.strerror(kind) if path.is_dir() else "it is not a regular file", str(path))
    return path


def _require_file(path: Path, fix: str) -> Path:
    if not path.exists():
        what = "it is a link to a file that is not there" if path.is_symlink() else "there is no such file"
        raise BadArgument(str(path), what, fix)
    return path


def shorten(names: Iterable[str], most: int = 5) -> str:
    """Return the first of some names, for a message."""
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")
