"""Atomic writes, and operating-system errors as FedveilErrors."""

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from fedveil.errors import BadArgument

OWNER = 0o600  # mode of private files
PART = ".part"  # suffix of a file that is being written
_FIX = "choose another folder, free space on the disk, or change permissions"


@contextlib.contextmanager
def refusals(path: Path | str, action: str = "written", fix: str = _FIX) -> Iterator[None]:
    """Turn operating-system errors (read-only, disk full, a file instead of a folder) into a FedveilError."""
    try:
        yield
    except OSError as error:
        where, why = str(error.filename or path), error.strerror or type(error).__name__
        raise BadArgument(where, f"cannot be {action}: {why}", fix) from error


@contextlib.contextmanager
def require_memory(where: str, what: str, fix: str, needed: int | None = None) -> Iterator[None]:
    """Raise a FedveilError that says how much memory is needed, if there is not enough.

    Args:
        where: as in errors.
        what: a plural noun: the objects that need the memory.
        fix: as in errors.
        needed: number of bytes, if known; if the machine has fewer, nothing is allocated.
    """
    if needed is not None and needed > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise _lack_of_memory(where, what, fix, needed)
    try:
        yield
    except (MemoryError, RuntimeError, TypeError) as error:  # torch raises the latter two
        if not isinstance(error, MemoryError) and not re.search("alloc|overflow", str(error), re.IGNORECASE):
            raise
        size = re.search(r"to allocate (\d+) bytes", str(error))
        raise _lack_of_memory(where, what, fix, needed or (int(size[1]) if size else None)) from error


def _lack_of_memory(where: str, what: str, fix: str, size: int | None) -> BadArgument:
    amount = "more memory than this machine has"
    if size is not None and size < 2**60:
        amount = f"{size / 2**30:,.1f} GiB of memory, more than this machine has"
    return BadArgument(where, f"{what} need {amount}", fix)


def make_folder(path: Path, mode: int = 0o777) -> Path:
    """Create a folder and its parents; the umask applies to its mode."""
    with refusals(path):
        path.mkdir(mode, parents=True, exist_ok=True)
    return path


def write_whole(
    path: Path, content: str | bytes | Callable[[IO[bytes]], object], mode: int = 0o666, *, new: bool = False
) -> Path:
    """Write a file atomically and durably: readers find either the old or the new file, even after a crash.

    Args:
        path: path of the file; its folder is created.
        content: text, bytes, or a function that writes to an open file.
        mode: permissions; the umask applies.
        new: refuse to replace an existing file; of two concurrent writers, only one succeeds.
    """
    make_folder(path.parent)
    half = temporary_name(path)
    with refusals(path):
        try:
            with os.fdopen(os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                if callable(content):
                    content(file)
                else:
                    file.write(content.encode("utf-8", "replace") if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            if new:
                os.link(half, path)
                half.unlink()
            else:
                os.replace(half, path)
        except FileExistsError:
            half.unlink(missing_ok=True)
            raise BadArgument(str(path), "this file exists and is not overwritten", "choose another name") from None
        except BaseException:
            half.unlink(missing_ok=True)
            raise
    flush_folder(path.parent)
    return path


def temporary_name(path: Path) -> Path:
    """Return a temporary path beside a file that it will replace."""
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}{PART}")


def flush_folder(folder: Path) -> None:
    """Fsync a directory, if the file system supports it."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sweep(folder: Path) -> None:
    """Remove incomplete files left by killed processes; only the caller may write there."""
    for half in folder.glob(f".*{PART}"):
        half.unlink(missing_ok=True)
