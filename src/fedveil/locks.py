"""Lock folders, so that each has only one writer.

The operating system releases the lock on a folder if its process is killed.
"""

import contextlib
import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from fedveil.errors import BadArgument
from fedveil.files import convert_os_errors, make_folder, remove_partial_files
from fedveil.plain_json import read_json

LOCK, HOLDER = ".lock", ".holder"
HELD: ContextVar[frozenset[tuple[int, Path]]] = ContextVar("held", default=frozenset())  # process id and folder


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder while this thread writes to it; calls may be nested.

    If the call creates the folder and nothing is written to it, the folder is removed on exit.
    """
    key = os.getpid(), folder.resolve()
    if key in HELD.get():
        yield
        return
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    with convert_os_errors(make_folder(folder)):
        _refuse_links(folder)
        lock = FileLock(folder / LOCK, timeout=0)
        try:
            lock.acquire()
        except Timeout:
            fix = "wait until it finishes, or choose another folder"
            raise BadArgument(str(folder), f"{_describe_holder(folder)} is using this folder", fix) from None
    token = HELD.set(HELD.get() | {key})
    try:
        with convert_os_errors(folder):
            _write_holder(folder / HOLDER)
            remove_partial_files(folder)
        yield
    finally:
        HELD.reset(token)
        _clean_up(folder, created)
        lock.release()


def _refuse_links(folder: Path) -> None:
    """Refuse symbolic links in place of the lock files, because they may point to any of the user's files."""
    for path in (folder / LOCK, folder / HOLDER):
        if path.is_symlink():
            fix = "remove it, or choose another folder"
            raise BadArgument(str(path), "it is a symbolic link, not a regular file", fix)


def _write_holder(path: Path) -> None:
    """Record the lock's holder in a new file; an existing file is replaced, not written to."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "w") as file:
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": since}, file)


def _describe_holder(folder: Path) -> str:
    """Describe the process that holds the lock, if known."""
    try:
        found = read_json(folder / HOLDER)
        return f"another process (process {found['pid']} on {found['host']}, since {found['since']})"
    except (ValueError, KeyError, TypeError):  # a BadArgument is a ValueError
        return "another process"


def _clean_up(folder: Path, created: Sequence[Path]) -> None:
    """Remove the holder file, and folders that were created but not used."""
    with contextlib.suppress(OSError):
        (folder / HOLDER).unlink(missing_ok=True)
        if folder in created and [path.name for path in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
            for path in created:
                path.rmdir()
