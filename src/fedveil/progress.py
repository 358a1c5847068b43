"""The type of all progress callbacks."""

from collections.abc import Callable

Progress = Callable[[float, str], None]
"""Called with the fraction completed, from 0 to 1, and the current step."""
