"""Folders and zip files seen alike: named members that can be read. Nothing is ever unpacked to disk."""

import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fedveil.errors import BadArgument

Read = Callable[[str], bytes]
_DAMAGE = (OSError, zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError, EOFError)


@dataclass(frozen=True)
class Archive:
    """A folder or a zip file.

    Attributes:
        path: of the folder or file.
        names: of the files in it, sorted, with `/` between folders; hidden files are left out.
        stamp: changes when the content does.
    """

    path: Path
    names: tuple[str, ...]
    stamp: str

    @contextmanager
    def reader(self) -> Iterator[Read]:
        """A function from a member's name to its bytes."""
        if self.path.is_dir():
            yield lambda name: self._guarded(name, (self.path / name).read_bytes)
            return
        with zipfile.ZipFile(self.path) as opened:
            yield lambda name: self._guarded(name, lambda: opened.read(name))

    def _guarded(self, name: str, read: Callable[[], bytes]) -> bytes:
        """The bytes of a member; damage is named."""
        try:
            content = read()
        except _DAMAGE as error:
            raise BadArgument(self.where(name), f"cannot be read: {error}", "fetch the archive again") from error
        if not content:
            raise BadArgument(self.where(name), "the file is empty", "replace it or leave it out")
        return content

    def where(self, name: str) -> str:
        """How messages name a member."""
        return f"{self.path}, member {name}"


def open_archive(path: Path) -> Archive:
    """List a folder or a zip file."""
    return _list_folder(path) if path.is_dir() else _list_zip(path)


def _list_folder(path: Path) -> Archive:
    """Files below a folder; its stamp covers each one's size and time."""
    found: dict[str, str] = {}
    for folder, folders, files in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for file in files:
            full = Path(folder, file)
            name = full.relative_to(path).as_posix()
            if not _hidden(name):
                status = full.stat()
                found[name] = f"{status.st_size} {status.st_mtime_ns}"
    names = tuple(sorted(found))
    return Archive(path, names, " ".join(found[name] for name in names))


def _list_zip(path: Path) -> Archive:
    """Members of a zip file."""
    status = path.stat()
    try:
        with zipfile.ZipFile(path) as opened:
            names = tuple(sorted({name for name in opened.namelist() if not name.endswith("/") and not _hidden(name)}))
    except (OSError, zipfile.BadZipFile) as error:
        what = "the file is empty" if not status.st_size else f"not a readable zip file: {error}"
        raise BadArgument(str(path), what, "it is damaged or cut off: fetch it again") from error
    return Archive(path, names, f"{status.st_size} {status.st_mtime_ns}")


def _hidden(name: str) -> bool:
    """Whether a file is the operating system's, not the user's."""
    return any(part.startswith(".") or part in ("__MACOSX", "Thumbs.db") for part in PurePosixPath(name).parts)
