"""Interruptions of a command: Ctrl-C, and the SIGTERM of `kill`, Slurm and Docker."""

import signal
from contextlib import AbstractContextManager
from types import FrameType

from fedveil.signals import handle

INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM  # exit codes, as in a shell


class Termination(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does."""


class Stop(KeyboardInterrupt):
    """The end of a command that was stopped, with how to continue."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(what)
        self.what, self.code = what, code


def end_at_once() -> AbstractContextManager[None]:
    """Let Ctrl-C end the process while libraries are imported: torch turns an interrupt into other exceptions."""
    return handle(signal.SIGINT, signal.SIG_DFL)


def catch_sigterm() -> AbstractContextManager[None]:
    """Raise `Termination` at the first SIGTERM; later ones are ignored, so that the save completes."""

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Termination

    return handle(signal.SIGTERM, end)
