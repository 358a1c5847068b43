"""The type of progress callbacks, and a callback that does nothing."""

from collections.abc import Callable

Progress = Callable[[float, str], None]
"""A function that is called with the completed fraction, from 0 to 1, and the name of the current step."""


def ignore_progress(fraction: float, step: str) -> None:
    """Ignore progress."""
