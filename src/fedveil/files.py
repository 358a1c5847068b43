"""Files that are written whole or not at all, and what the operating system refuses, in our own words."""

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from fedveil.errors import BadArgument

OWNER = 0o600  # the mode of files that nobody else may read
PART = ".part"  # of the name of a file that is being written


@contextlib.contextmanager
def refusals(path: Path) -> Iterator[None]:
    """Turn refusals of the operating system (read-only, full disk, a file in place of a folder) into a FedveilError."""
    try:
        yield
    except OSError as error:
        where, why = str(error.filename or path), error.strerror or type(error).__name__
        fix = "another folder, free space or other permissions"
        raise BadArgument(where, f"cannot be written: {why}", fix) from error


@contextlib.contextmanager
def require_memory(where: str, what: str, fix: str, needed: int | None = None) -> Iterator[None]:
    """Raise a FedveilError that says how much memory is needed, where there is less.

    Args:
        where: as in errors.
        what: needs the memory; a plural noun.
        fix: as in errors.
        needed: bytes, where they are known: more than the machine has are refused before they are asked for.
    """
    if needed is not None and needed > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise _lack_of_memory(where, what, fix, needed)
    try:
        yield
    except (MemoryError, RuntimeError, TypeError) as error:  # torch raises the latter two
        if not isinstance(error, MemoryError) and not re.search("alloc|overflow", str(error), re.IGNORECASE):
            raise
        told = re.search(r"to allocate (\d+) bytes", str(error))
        raise _lack_of_memory(where, what, fix, needed or (int(told[1]) if told else None)) from error


def _lack_of_memory(where: str, what: str, fix: str, size: int | None) -> BadArgument:
    amount = "more memory than there is"
    if size is not None and size < 2**60:
        amount = f"{size / 2**30:,.1f} GiB of memory, more than there is"
    return BadArgument(where, f"{what} need {amount}", fix)


def make_folder(path: Path, mode: int = 0o777) -> Path:
    """Make a folder, with a mode less what the umask takes away, and those above it."""
    with refusals(path):
        path.mkdir(mode, parents=True, exist_ok=True)
    return path


def write_whole(
    path: Path, content: str | bytes | Callable[[IO[bytes]], object], mode: int = 0o666, *, new: bool = False
) -> Path:
    """Write a file so that a reader finds the old one or the new one, never a part; what is on disk survives a crash.

    Args:
        path: of the file; its folder is made.
        content: text, bytes, or a function that writes to an open file.
        mode: the file's permissions, less what the umask takes away.
        new: refuse to replace a file; two writers at once cannot both succeed.
    """
    make_folder(path.parent)
    half = part_of(path)
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


def part_of(path: Path) -> Path:
    """A new name beside a file, for what shall take its place."""
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}{PART}")


def flush_folder(folder: Path) -> None:
    """Have a folder's names on disk, where the file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sweep(folder: Path) -> None:
    """Remove what killed processes were writing; the caller is the only one who writes there."""
    for half in folder.glob(f".*{PART}"):
        half.unlink(missing_ok=True)
