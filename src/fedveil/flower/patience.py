"""A connection that fails: trying again, with one line in the log when it is lost and one when it is back."""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from fedveil.errors import FedveilError
from fedveil.federation.engine import clean

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 20.0  # seconds
Found = TypeVar("Found")
log = logging.getLogger(__name__)


class Lost(Exception):
    """The other side cannot be reached for now."""


class Stopped(Exception):
    """This process is about to end."""


def pauses() -> Iterator[float]:
    """Seconds between tries: they double up to `LONGEST_PAUSE`, less up to a half so that nodes do not try at once."""
    pause = FIRST_PAUSE
    while True:
        yield pause * random.uniform(0.5, 1.0)
        pause = min(2 * pause, LONGEST_PAUSE)


class Patience:
    """Calls again what raises `Lost`, until it does not.

    Args:
        where: the other side, for the log.
        max_retries: give up after so many tries in a row that failed; never if None.
        max_wait_time: give up after so many seconds in a row; never if None.
    """

    def __init__(self, where: str, max_retries: int | None = None, max_wait_time: float | None = None) -> None:
        self.where, self.max_retries, self.max_wait_time = where, max_retries, max_wait_time
        self._stop, self._lock, self._lost = threading.Event(), threading.Lock(), False

    def __call__(self, attempt: Callable[[], Found]) -> Found:
        """What `attempt` returns at last.

        Raises:
            FedveilError: it failed too often or for too long.
            Stopped: `stop` was called meanwhile.
        """
        began = time.monotonic()
        for tries, pause in enumerate(pauses(), 1):
            try:
                found = attempt()
            except Lost as error:
                self._say_lost(error)
                self._give_up(tries, time.monotonic() - began, error)
            else:
                self._say_back(time.monotonic() - began)
                return found
            self.sleep(pause)
        raise AssertionError  # pauses do not end

    def sleep(self, seconds: float) -> None:
        """Wait; raises `Stopped` when the process is about to end."""
        if self._stop.wait(seconds):
            raise Stopped

    def stop(self) -> None:
        """Let every thread that waits here end."""
        self._stop.set()

    def _give_up(self, tries: int, seconds: float, error: Lost) -> None:
        too_often = self.max_retries is not None and tries > self.max_retries
        too_long = self.max_wait_time is not None and seconds >= self.max_wait_time
        if too_often or too_long:
            what = f"cannot be reached after {tries} tries in {seconds:.0f} s ({clean(error)})"
            raise FedveilError(self.where, what, "start it, or raise --max-retries and --max-wait-time") from error

    def _say_lost(self, error: Lost) -> None:
        with self._lock:
            if not self._lost:
                log.warning("no connection to %s (%s); trying again", self.where, clean(error))
            self._lost = True

    def _say_back(self, seconds: float) -> None:
        with self._lock:
            if self._lost:
                log.info("connection to %s is back after %.0f s", self.where, seconds)
            self._lost = False
