"""The type of all progress callbacks, and one that does nothing."""

from collections.abc import Callable

Progress = Callable[[float, str], None]
"""Called with the fraction completed, from 0 to 1, and the current step."""


def silent(fraction: float, what: str) -> None:
    """Ignore progress."""
