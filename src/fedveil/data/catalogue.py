"""The catalogue of data sets, and functions that find and load them. Only the loaders import torch."""

import errno
import importlib
import inspect
import os
import stat
import tomllib
from collections.abc import Callable, Iterable
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, TypeVar

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from fedveil.checks import check_choice
from fedveil.errors import BadArgument
from fedveil.files import convert_os_errors

if TYPE_CHECKING:
    from fedveil.data.dataset import Data

T = TypeVar("T")
PositiveInt = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0)]
OpenUnitInterval = Annotated[float, Field(gt=0, lt=1)]
Task = Literal["classification", "regression"]
Scaling = Literal["records", "public"]  # use statistics of the training records, or fixed constants
MAX_BYTES = 2**28  # maximum size of a file that is read into memory, such as an image, a CIFAR batch or a download
USER_FILES = "yours"  # source and licence of users' own files
METADATA = "HAM10000_metadata.csv"
_READ_FIX = "use readable files and folders"


class Download(NamedTuple):
    """A public file: its URL, its name in the data set's folder, and its checksum."""

    url: str
    file: str
    digest: str  # "md5:..." or "sha256:..." of the file
    members: tuple[str, ...] = ()  # names of the nested zip members that lead to the file, outermost first
    max_bytes: int = MAX_BYTES  # maximum size of the download and of each member


class DatasetInfo(NamedTuple):
    """An entry in the catalogue of data sets.

    The function called `name` in `module` loads the data set, and its parameters are the options of the data set.

    Attributes:
        name: name to pass to `load`.
        module: module of this package that contains the loader.
        description: short description.
        source: authors of the data set, and where it is published.
        licence: licence under which it may be used.
        files: glob patterns for the files of the data set, in order of preference. If a pattern starts with "./", the
            data set is read from the folder that contains the match, otherwise from the match itself. Empty for data
            that come with the library or belong to the user.
        expected_files: description of the files to put into this folder; for users' own files, an example path.
        download: the file to download; None if the data set cannot be downloaded automatically.
    """

    name: str
    module: str
    description: str
    source: str
    licence: str
    files: tuple[str, ...] = ()
    expected_files: str = ""
    download: Download | None = None

    @property
    def state(self) -> str:
        """The availability: "embedded" (comes with the library), "found", "missing" or "yours" (passed by the user)."""
        if self.files:
            return "missing" if self._find() is None else "found"
        return USER_FILES if self.source == USER_FILES else "embedded"

    @property
    def where(self) -> Path | None:
        """The file or folder where the data set was found or is expected; None if it needs no files."""
        return self._find() or data_folder() / self.name if self.files else None

    def _find(self) -> Path | None:
        try:
            return _find_inside(self, data_folder() / self.name)
        except BadArgument:  # several archives match; `load` asks the user to choose one
            return data_folder() / self.name
        except OSError:  # the folder cannot be read; `load` reports the reason
            return None


def read_resource(file: str, kind: type[T]) -> T:
    """Read and validate a TOML file in this package."""
    text = resources.files("fedveil.data").joinpath(file).read_text(encoding="utf-8")
    return TypeAdapter(kind).validate_python(tomllib.loads(text))


CATALOGUE = read_resource("catalogue.toml", dict[str, DatasetInfo])
"""The data sets by name."""
Words = Annotated[tuple[str, ...], BeforeValidator(str.split)]
NAMES = read_resource("names.toml", dict[str, dict[str, Words]])
"""Names of classes, columns and categories in published data sets."""


def load(name: str, *, path: str | Path | None = None, **options: object) -> "Data":
    """Load a data set.

    Without `path`, the files are expected in $FEDVEIL_DATA/`name`. Images are decoded once and cached in
    $FEDVEIL_CACHE (default ~/.cache/fedveil). The same name, files and options always yield the same records in the
    same order.

    Args:
        name: one of `fedveil.data.list_datasets()`, such as "digits", "bank", "cifar10", "lesion", "images", "csv".
        path: file or folder to read instead of $FEDVEIL_DATA/`name`.
        **options: options of the data set; an unknown option raises an error that lists them.

    Raises:
        BadArgument: the name or an option is unknown, or a file is missing, damaged, mislabelled or unreadable.

    Example:
        >>> load("digits")
        Data('digits', train=1438, test=359, input (64,), 10 classes)
    """
    loader, where = find_loader(name), f"load({name!r})"
    hints = {option: parameter.annotation for option, parameter in inspect.signature(loader).parameters.items()}
    for option, value in options.items():
        hint = hints[check_choice(where, "option", option, hints)]
        try:
            TypeAdapter(hint).validate_python(value, strict=True)
        except ValidationError as error:
            rule = error.errors()[0]["msg"].removeprefix("Input should be ")
            raise BadArgument(where, f"{option} must be {rule}, got {value!r}") from None
    source = find_source(name, path)
    with convert_os_errors(source or where, "read", _READ_FIX):
        return loader(**options) if source is None else loader(path=source, **options)


def find_loader(name: str) -> "Callable[..., Data]":
    """Return the function that loads a data set."""
    loader: Callable[..., Data] = getattr(importlib.import_module(f"fedveil.data.{_find_info(name).module}"), name)
    return loader


def _find_info(name: str) -> DatasetInfo:
    if name not in CATALOGUE and (Path(name).suffix or Path(name).exists()):
        kind = "images" if Path(name).is_dir() else "csv"
        message = f"{name!r} is a file or folder, not the name of a data set"
        raise BadArgument("load", message, f"use --data {kind} --path {name} (in Python load({kind!r}, path={name!r}))")
    return CATALOGUE[check_choice("load", "data set", name, CATALOGUE)]


def list_datasets() -> list[DatasetInfo]:
    """Return all data sets that `load` accepts, sorted by name; `state` shows whether their files are available.

    Example:
        >>> [info.state for info in list_datasets() if info.name == "digits"]
        ['embedded']
    """
    return list(CATALOGUE.values())


def cache_folder() -> Path:
    """Return the folder for decoded images: $FEDVEIL_CACHE, by default ~/.cache/fedveil."""
    return Path(os.path.expanduser(os.environ.get("FEDVEIL_CACHE") or "~/.cache/fedveil"))


def data_folder() -> Path:
    """Return the folder for the files of data sets: $FEDVEIL_DATA, by default `data` in the cache folder."""
    folder = os.environ.get("FEDVEIL_DATA")
    return Path(os.path.expanduser(folder)) if folder else cache_folder() / "data"


def find_source(name: str, path: str | Path | None = None) -> Path | None:
    """Return the file or folder of a data set: `path`, or the best match in the data set's folder in $FEDVEIL_DATA.

    Return None if the data set comes with the library. Refuse an unknown name and missing files.
    """
    info = _find_info(name)
    file_path = None if path is None else Path(os.path.expanduser(path))
    if not info.files and info.source != USER_FILES:
        if file_path is not None:
            fix = f"leave the path out, or use --data csv (or images) --path {path} for your own files"
            raise BadArgument(f"load({name!r})", "the data set comes with the library and does not accept a path", fix)
        return None
    with convert_os_errors(file_path or data_folder(), "read", _READ_FIX):
        return _find_files(info, file_path)


def _find_files(info: DatasetInfo, path: Path | None) -> Path:
    if info.files:
        folder = path or data_folder() / info.name
        where = folder if path is None or path.is_dir() else folder.parent
        fix = f"put {info.expected_files} into {where}, set FEDVEIL_DATA, pass path=, "
        fix += f"or run `fedveil data get {info.name}`"
        if path is None or path.is_dir():
            result = _find_inside(info, folder)
            if result is None:
                message = f"it does not contain {info.name!r}" if folder.is_dir() else "there is no such folder"
                raise BadArgument(str(folder), message, fix)
            return result
    elif path is None:
        example = info.expected_files
        fix = f"use --path {example} (in Python load({info.name!r}, path={example!r}))"
        raise BadArgument(f"load({info.name!r})", "the data set needs a path", fix)
    else:
        fix = "pass an existing file or folder as --path (in Python path=)"
    if not path.exists():
        message = "it is a broken link" if path.is_symlink() else "there is no such file"
        raise BadArgument(str(path), message, fix)
    return path


def _find_inside(info: DatasetInfo, folder: Path) -> Path | None:
    """Return the best match for a data set in a folder; None if there is none."""
    for pattern in info.files:
        matches = sorted(path for path in folder.glob(pattern) if not path.name.startswith("."))
        if matches and pattern.startswith("./"):
            return folder
        if len(matches) > 1:
            message = f"several archives could contain {info.name!r}: {shorten(path.name for path in matches)}"
            raise BadArgument(str(folder), message, "pass one of them as path=, or unpack them into this folder")
        if matches:
            return matches[0]
    return None


def require_regular(path: Path) -> Path:
    """Return `path` if it is a regular file; refuse anything else, such as a pipe, which could block."""
    if not stat.S_ISREG(path.stat().st_mode):
        kind = errno.EISDIR if path.is_dir() else errno.EINVAL
        raise OSError(kind, os.strerror(kind) if path.is_dir() else "it is not a regular file", str(path))
    return path


def shorten(names: Iterable[str], limit: int = 5) -> str:
    """Join the first few names for a message, and count the others."""
    all_names = list(names)
    return ", ".join(all_names[:limit]) + (f" and {len(all_names) - limit} more" if len(all_names) > limit else "")
