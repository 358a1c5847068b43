"""Files that are written whole or not at all, and what the operating system refuses, in our own words."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from fedveil.errors import BadArgument


@contextlib.contextmanager
def refusals(path: Path) -> Iterator[None]:
    """What the operating system refuses (read-only, full disk, a file in place of a folder) as a FedveilError."""
    try:
        yield
    except OSError as error:
        where, why = str(error.filename or path), error.strerror or type(error).__name__
        fix = "another folder, free space or other permissions"
        raise BadArgument(where, f"cannot be written: {why}", fix) from error


def make_folder(path: Path) -> Path:
    """Make a folder and those above it."""
    with refusals(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


def write_whole(path: Path, content: str | bytes | Callable[[IO[bytes]], object], mode: int = 0o644) -> Path:
    """Write a file so that a reader finds the old one or the new one, never a part; what is on disk survives a crash.

    Args:
        path: of the file; its folder is made.
        content: text, bytes, or a function that writes to an open file.
        mode: the file's permissions, less what the umask takes away.
    """
    make_folder(path.parent)
    with refusals(path):
        handle, half = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                if callable(content):
                    content(file)
                else:
                    file.write(content.encode("utf-8", "replace") if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(half, mode & ~umask)
            os.replace(half, path)
        except BaseException:
            os.unlink(half)
            raise
    return path
