"""Install signal handlers temporarily, and raise an exception on SIGTERM, which `kill`, Slurm and Docker send."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType

Handler = Callable[[int, FrameType | None], object] | signal.Handlers
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM  # exit codes, as in a shell


class Termination(KeyboardInterrupt):
    """An exception raised on SIGTERM, which ends a command the way Ctrl-C does."""


@contextlib.contextmanager
def handle(signal_number: signal.Signals, handler: Handler) -> Iterator[None]:
    """Replace a signal's handler temporarily. Does nothing outside the main thread, which handles all signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handler = signal.signal(signal_number, handler)
    try:
        yield
    finally:
        signal.signal(
            signal_number, signal.SIG_DFL if previous_handler is None else previous_handler
        )  # None: not set from Python


def kill_on_interrupt() -> AbstractContextManager[None]:
    """Let Ctrl-C kill the process during imports, because torch turns KeyboardInterrupt into other exceptions."""
    return handle(signal.SIGINT, signal.SIG_DFL)


def catch_sigterm() -> AbstractContextManager[None]:
    """Raise `Termination` on the first SIGTERM; ignore later ones, so that the final save can complete."""

    def terminate(signal_number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Termination

    return handle(signal.SIGTERM, terminate)
