"""The one kind of progress callback."""

from collections.abc import Callable

Progress = Callable[[float, str], None]
"""Called with the fraction that is done, from 0 to 1, and the current step."""
