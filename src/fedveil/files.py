"""Write files atomically, lock folders, and convert operating-system errors to FedveilErrors.

A locked folder has only one writer. The operating system releases the lock if the process is killed.
"""

import contextlib
import json
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout

from fedveil.errors import BadArgument

OWNER = 0o600  # file mode for private files: only the owner may read and write them
PARTIAL_SUFFIX = ".part"  # suffix of a file that is being written
_FIX = "choose another folder, free up disk space, or change the permissions"


@contextlib.contextmanager
def convert_os_errors(path: Path | str, action: str = "written", fix: str = _FIX) -> Iterator[None]:
    """Convert operating-system errors (read-only, disk full, a file instead of a folder) to a FedveilError."""
    try:
        yield
    except OSError as error:
        where, reason = str(error.filename or path), error.strerror or type(error).__name__
        raise BadArgument(where, f"cannot be {action}: {reason}", fix) from error


@contextlib.contextmanager
def require_memory(where: str, objects: str, fix: str, num_bytes: int | None = None) -> Iterator[None]:
    """If the machine does not have enough memory, raise a FedveilError that states how much is needed.

    Args:
        where: the location to report in the error.
        objects: the objects that need the memory, as a plural noun.
        fix: the fix to suggest in the error.
        num_bytes: the memory needed, if known. If the machine has less, the error is raised immediately.
    """
    if num_bytes is not None and num_bytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise _memory_error(where, objects, fix, num_bytes)
    try:
        yield
    except (MemoryError, RuntimeError, TypeError) as error:  # torch raises the latter two
        if not isinstance(error, MemoryError) and not re.search("alloc|overflow", str(error), re.IGNORECASE):
            raise
        size = re.search(r"to allocate (\d+) bytes", str(error))
        raise _memory_error(where, objects, fix, num_bytes or (int(size[1]) if size else None)) from error


def _memory_error(where: str, objects: str, fix: str, num_bytes: int | None) -> BadArgument:
    amount = "more memory than this machine has"
    if num_bytes is not None and num_bytes < 2**60:
        amount = f"{num_bytes / 2**30:,.1f} GiB of memory, more than this machine has"
    return BadArgument(where, f"{objects} need {amount}", fix)


def make_folder(path: Path, mode: int = 0o777) -> Path:
    """Create a folder and its parents; the umask applies to `mode`."""
    with convert_os_errors(path):
        path.mkdir(mode, parents=True, exist_ok=True)
    return path


def write_atomically(
    path: Path, content: str | bytes | Callable[[IO[bytes]], object], mode: int = 0o666, *, new: bool = False
) -> Path:
    """Write a file atomically and durably: readers see either the old or the new file, even after a crash.

    Args:
        path: path of the file; its folder is created if necessary.
        content: text, bytes, or a function that writes to an open file.
        mode: permissions; the umask applies.
        new: whether to refuse to replace an existing file; of two concurrent writers, only one succeeds.
    """
    make_folder(path.parent)
    partial_path = temporary_name(path)
    with convert_os_errors(path):
        try:
            with os.fdopen(os.open(partial_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                if callable(content):
                    content(file)
                else:
                    file.write(content.encode("utf-8", "replace") if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            if new:
                os.link(partial_path, path)
                partial_path.unlink()
            else:
                os.replace(partial_path, path)
        except FileExistsError:
            partial_path.unlink(missing_ok=True)
            message = "the file already exists and will not be overwritten"
            raise BadArgument(str(path), message, "choose another name") from None
        except BaseException:
            partial_path.unlink(missing_ok=True)
            raise
    flush_folder(path.parent)
    return path


def temporary_name(path: Path) -> Path:
    """Return the path of a temporary file in the same folder as `path`."""
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}{PARTIAL_SUFFIX}")


def flush_folder(folder: Path) -> None:
    """Fsync a directory, if the file system supports it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_partial_files(folder: Path) -> None:
    """Remove incomplete files that killed processes left behind in a folder; no other process may be writing there."""
    for partial_path in folder.glob(f".*{PARTIAL_SUFFIX}"):
        partial_path.unlink(missing_ok=True)


LOCK_NAME, HOLDER_NAME = ".lock", ".holder"
LOCKED_FOLDERS: ContextVar[frozenset[tuple[int, Path]]] = ContextVar(
    "locked_folders", default=frozenset()
)  # process ids and folders


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder while this thread writes to it; calls may be nested.

    If the call creates the folder and nothing is written to it, the folder is removed on exit.
    """
    key = os.getpid(), folder.resolve()
    if key in LOCKED_FOLDERS.get():
        yield
        return
    created_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    with convert_os_errors(make_folder(folder)):
        _refuse_links(folder)
        lock = FileLock(folder / LOCK_NAME, timeout=0)
        try:
            lock.acquire()
        except Timeout:
            fix = "wait until that process finishes, or choose another folder"
            raise BadArgument(str(folder), f"{_describe_holder(folder)} is using this folder", fix) from None
    token = LOCKED_FOLDERS.set(LOCKED_FOLDERS.get() | {key})
    try:
        with convert_os_errors(folder):
            _write_holder(folder / HOLDER_NAME)
            remove_partial_files(folder)
        yield
    finally:
        LOCKED_FOLDERS.reset(token)
        _clean_up(folder, created_folders)
        lock.release()


def _refuse_links(folder: Path) -> None:
    """Refuse symbolic links in place of the lock files, because they may point to any of the user's files."""
    for path in (folder / LOCK_NAME, folder / HOLDER_NAME):
        if path.is_symlink():
            fix = "remove the link, or choose another folder"
            raise BadArgument(str(path), "the lock file must not be a symbolic link", fix)


def _write_holder(path: Path) -> None:
    """Record the lock's holder in a new file; delete an existing file first instead of writing to it."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "w") as file:
        lock_time = datetime.now().astimezone().isoformat(" ", "seconds")
        json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": lock_time}, file)


def _describe_holder(folder: Path) -> str:
    """Describe the process that holds the lock, if known."""
    try:
        holder = json.loads((folder / HOLDER_NAME).read_text())
        return f"another process (process {holder['pid']} on {holder['host']}, since {holder['since']})"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "another process"


def _clean_up(folder: Path, created_folders: Sequence[Path]) -> None:
    """Remove the holder file, and folders that were created but not used."""
    with contextlib.suppress(OSError):
        (folder / HOLDER_NAME).unlink(missing_ok=True)
        if folder in created_folders and [path.name for path in folder.iterdir()] == [LOCK_NAME]:
            (folder / LOCK_NAME).unlink()
            for path in created_folders:
                path.rmdir()
