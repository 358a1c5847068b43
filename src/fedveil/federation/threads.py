"""A federation is used by one thread at a time, and is not interrupted while it is saved."""

import contextlib
import signal
import threading
from collections.abc import Iterator

from fedveil.errors import FedveilError


class OneThread:
    """A lock that refuses a second thread. The first may enter again, as callbacks do; a copy of the lock is free."""

    def __init__(self, where: str) -> None:
        self._where, self._lock = where, threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            fix = "wait until it is done, or make one federation, with its own model, for each thread"
            raise FedveilError(self._where, "another thread is using it", fix)

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type["OneThread"], tuple[str]]:
        return OneThread, (self._where,)


@contextlib.contextmanager
def ignore_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C for a moment; only the main thread gets one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
