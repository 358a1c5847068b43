"""Signals: temporary handlers, and the SIGTERM of `kill`, Slurm and Docker as an exception."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType

Handler = Callable[[int, FrameType | None], object] | signal.Handlers
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM  # exit codes, as in a shell


class Termination(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does."""


@contextlib.contextmanager
def handle(number: signal.Signals, handler: Handler) -> Iterator[None]:
    """Replace the handler of a signal temporarily; only in the main thread, since others get no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, signal.SIG_DFL if before is None else before)  # None: not set by Python


def end_at_once() -> AbstractContextManager[None]:
    """Let Ctrl-C end the process while libraries are imported: torch turns an interrupt into other exceptions."""
    return handle(signal.SIGINT, signal.SIG_DFL)


def catch_sigterm() -> AbstractContextManager[None]:
    """Raise `Termination` at the first SIGTERM; later ones are ignored, so that the save completes."""

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Termination

    return handle(signal.SIGTERM, end)
