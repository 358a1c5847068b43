"""A common interface for reading files in folders and zip files. Nothing is unpacked to disk."""

import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NoReturn

from fedveil.data.catalogue import MAX_BYTES, require_regular
from fedveil.errors import BadArgument

READ_ERRORS = (OSError, zipfile.BadZipFile, zlib.error, RuntimeError, EOFError)  # raised for damaged archives and files


@dataclass(frozen=True)
class Archive:
    """A folder or a zip file."""

    path: Path
    names: tuple[str, ...]  # sorted paths of the files, separated by `/`; hidden files are left out
    stamp: str  # changes when the content changes

    @contextmanager
    def reader(self) -> Iterator[Callable[[str], bytes]]:
        """Open the archive; yield a function that returns the bytes of a named member."""
        with nullcontext() if self.path.is_dir() else zipfile.ZipFile(self.path) as zip_file:

            def read(name: str) -> bytes:
                try:
                    content = read_member(zip_file, name) if zip_file else _read_file(self.path / name)
                except READ_ERRORS as error:
                    fix = "replace it or leave it out, or download the archive again"
                    raise BadArgument(self.where(name), f"cannot be read: {error}", fix) from error
                if not content:
                    raise BadArgument(self.where(name), "the file is empty", "replace it or leave it out")
                return content

            yield read

    def where(self, name: str) -> str:
        """Return the location of a member, for error messages."""
        return f"{self.path}, member {name}"


def _read_file(path: Path) -> bytes:
    if require_regular(path).stat().st_size > MAX_BYTES:
        raise OSError(f"it is larger than {MAX_BYTES} bytes")
    return path.read_bytes()


def read_member(zip_file: zipfile.ZipFile, name: str, max_bytes: int = MAX_BYTES) -> bytes:
    """Read a member of a zip file; refuse a declared size above `max_bytes`, and never unpack more than declared."""
    if zip_file.getinfo(name).file_size > max_bytes:
        raise zipfile.BadZipFile(f"it is larger than {max_bytes} bytes")
    return zip_file.read(name)


def open_archive(path: Path) -> Archive:
    """Open a folder or zip file and list its files.

    The stamp contains the size and modification time of each file in the folder, or of the zip file.
    """
    if path.is_dir():
        walk = os.walk(path, onerror=_refuse_folder)
        names = [Path(folder, file).relative_to(path).as_posix() for folder, _, files in walk for file in files]
    else:
        names = _list_zip(require_regular(path))
    names = sorted({name for name in names if not name.endswith("/") and not _is_hidden(name)})
    files = [path / name for name in names] if path.is_dir() else [path]
    return Archive(path, tuple(names), " ".join(map(stamp, files)))


def stamp(path: Path) -> str:
    """Return the size and modification time of a file or a broken link."""
    status = path.stat() if path.exists() else path.lstat()
    return f"{status.st_size} {status.st_mtime_ns}"


def _refuse_folder(error: OSError) -> NoReturn:
    """Refuse a folder that cannot be listed, because its images would be skipped silently."""
    raise error


def _list_zip(path: Path) -> list[str]:
    with path.open("rb") as file:
        try:
            return zipfile.ZipFile(file).namelist()
        except (OSError, zipfile.BadZipFile) as error:
            message = f"not a readable zip file: {error}" if path.stat().st_size else "the file is empty"
            fix = "use a folder or a zip file; if it is a damaged or truncated zip file, download it again"
            raise BadArgument(str(path), message, fix) from error


def _is_hidden(name: str) -> bool:
    """Return whether a file is hidden or was created by the operating system."""
    return any(part.startswith(".") or part in ("__MACOSX", "Thumbs.db") for part in PurePosixPath(name).parts)
