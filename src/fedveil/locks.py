"""One writer per folder: a lock of the operating system, which a killed process gives up, and who holds it."""

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from fedveil.errors import BadArgument
from fedveil.files import make_folder, refusals, sweep
from fedveil.plain_json import read_json

LOCK, HOLDER = ".lock", ".holder"
_held: set[tuple[int, int, Path]] = set()  # process, thread, folder


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The folder for this thread alone while it writes there; inside of another `locked` of it nothing is to be done.

    A folder that was made for it and is empty at the end is removed again.
    """
    key = os.getpid(), threading.get_ident(), folder.resolve()
    if key in _held:
        yield
        return
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    with refusals(make_folder(folder)):
        _refuse_links(folder)
        lock = FileLock(folder / LOCK, timeout=0)
        try:
            lock.acquire()
        except Timeout:
            fix = "wait until it is done, or another --out"
            raise BadArgument(str(folder), f"{_holder(folder)} is working in this folder", fix) from None
    _held.add(key)
    try:
        with refusals(folder):
            _sign(folder / HOLDER)
            sweep(folder)
        yield
    finally:
        _held.discard(key)
        _leave(folder, made)
        lock.release()


def _refuse_links(folder: Path) -> None:
    """Refuse links in the place of our files: whoever put them there may have them lead to any file of the user."""
    for path in (folder / LOCK, folder / HOLDER):
        if path.is_symlink():
            raise BadArgument(str(path), "it is a link, not a file of this folder", "remove it, or use another --out")


def _sign(path: Path) -> None:
    """Write who holds the lock into a new file: whatever had this name before is not written to."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "w") as file:
        json.dump(_own_name(), file)


def _own_name() -> dict[str, str | int]:
    """This process, for others; of its command the first two words at most, since flags may hold anything."""
    program, *words = sys.argv or [""]
    name = Path(program).parent.name if Path(program).name == "__main__.py" else Path(program).name
    command = " ".join([name, *[word for word in words[:1] if word.isidentifier()]])
    since = datetime.now().astimezone().isoformat(" ", "seconds")
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": since, "command": command}


def _holder(folder: Path) -> str:
    """Who holds the lock, if that is known already."""
    try:
        found = read_json(folder / HOLDER)
        return f"{found['command']!r} (process {found['pid']} on {found['host']}, since {found['since']})"
    except (ValueError, KeyError, TypeError):  # a BadArgument is a ValueError
        return "another process"


def _leave(folder: Path, made: Sequence[Path]) -> None:
    """Remove who held the lock, and folders that were made in vain."""
    with contextlib.suppress(OSError):
        (folder / HOLDER).unlink(missing_ok=True)
        if folder in made and [path.name for path in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
            for path in made:
                path.rmdir()
