"""A federation is used by one thread at a time."""

import threading

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
