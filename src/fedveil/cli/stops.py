"""Ends of a command before its time: Ctrl-C, and the SIGTERM of `kill`, Slurm and Docker."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM  # exit codes, as in a shell


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does."""


class Stopped(KeyboardInterrupt):
    """The end of a command that has more to say than that it was stopped."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(what)
        self.what, self.code = what, code


@contextlib.contextmanager
def end_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process while libraries are imported: torch makes other exceptions of an interrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)


@contextlib.contextmanager
def catch_sigterm() -> Iterator[None]:
    """Raise `Terminated` at the first SIGTERM; others are ignored, so that what it saves is saved."""
    if threading.current_thread() is not threading.main_thread():  # which alone gets signals
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)  # None: not Python's
