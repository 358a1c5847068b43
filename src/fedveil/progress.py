"""The one kind of progress callback."""

from collections.abc import Callable

Progress = Callable[[float, str], None]
"""Called with the fraction that is done, from 0 to 1, and the current step."""


def ignore_progress(fraction: float, step: str) -> None:
    """Report nothing: the default of functions that take a `Progress`."""
