"""One writer per folder: an operating-system lock, which is released if the process is killed, and its holder."""

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
from fedveil.files import make_folder, refusals, sweep
from fedveil.plain_json import read_json

LOCK, HOLDER = ".lock", ".holder"
HELD: ContextVar[frozenset[tuple[int, Path]]] = ContextVar("held", default=frozenset())  # process and folder


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Reserve a folder for this thread while it writes there; may be nested.

    A folder that was created for this purpose and is empty at the end is removed again.
    """
    key = os.getpid(), folder.resolve()
    if key in HELD.get():
        yield
        return
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    with refusals(make_folder(folder)):
        _refuse_links(folder)
        lock = FileLock(folder / LOCK, timeout=0)
        try:
            lock.acquire()
        except Timeout:
            fix = "wait until it is done, or choose another folder"
            raise BadArgument(str(folder), f"{_holder(folder)} is working in this folder", fix) from None
    token = HELD.set(HELD.get() | {key})
    try:
        with refusals(folder):
            _sign(folder / HOLDER)
            sweep(folder)
        yield
    finally:
        HELD.reset(token)
        _leave(folder, made)
        lock.release()


def _refuse_links(folder: Path) -> None:
    """Refuse links instead of our files: they may point to any of the user's files."""
    for path in (folder / LOCK, folder / HOLDER):
        if path.is_symlink():
            fix = "remove it, or choose another folder"
            raise BadArgument(str(path), "it is a link, not a file in this folder", fix)


def _sign(path: Path) -> None:
    """Write the lock's holder to a new file; an existing file with this name is not written to."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "w") as file:
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": since}, file)


def _holder(folder: Path) -> str:
    """Describe who holds the lock, if known."""
    try:
        found = read_json(folder / HOLDER)
        return f"another process (process {found['pid']} on {found['host']}, since {found['since']})"
    except (ValueError, KeyError, TypeError):  # a BadArgument is a ValueError
        return "another process"


def _leave(folder: Path, made: Sequence[Path]) -> None:
    """Remove the holder's file, and folders that were created but not used."""
    with contextlib.suppress(OSError):
        (folder / HOLDER).unlink(missing_ok=True)
        if folder in made and [path.name for path in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
            for path in made:
                path.rmdir()
