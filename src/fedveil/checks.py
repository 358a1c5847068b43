"""Checks of arguments and threads. The same mistake raises an error with the same wording everywhere."""

import difflib
import math
import threading
from collections.abc import Iterable
from typing import TypeGuard

from fedveil.errors import BadArgument, FedveilError


def check_choice(where: str, name: str, value: str, allowed: Iterable[str]) -> str:
    """Check that a value is one of the allowed strings; the error suggests the closest match.

    >>> check_choice("load", "task", "regression", ("classification", "regression"))
    'regression'
    """
    names = sorted(allowed)
    if value in names:
        return value
    matches = difflib.get_close_matches(str(value), names, n=1, cutoff=0.5)
    choices = ", ".join(repr(known) for known in names)
    fix = f"use {matches[0]!r}; the choices are {choices}" if matches else (f"use one of {choices}" if names else None)
    raise BadArgument(where, f"there is no {name} {value!r}", fix)


def check_count(where: str, name: str, value: object, minimum: int = 1, fix: str | None = None) -> int:
    """Check that a value is an integer of at least `minimum`; a bool is refused."""
    if type(value) is not int or value < minimum:
        raise BadArgument(where, f"{name} must be an integer of at least {minimum}, got {value!r}", fix)
    return value


def check_integer(where: str, name: str, value: object) -> int:
    """Check that a value is an integer; a bool is refused."""
    if type(value) is not int:
        raise BadArgument(where, f"{name} must be an integer, got {value!r:.60}", f"use an int, such as {name}=0")
    return value


def check_boolean(where: str, name: str, value: object) -> bool:
    """Check that a value is a bool; a string such as "no" is refused because it would be truthy."""
    if type(value) is not bool:
        raise BadArgument(where, f"{name} must be True or False, got {value!r:.60}", f"use {name}=True or {name}=False")
    return value


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is an int or a float, but not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_positive(where: str, name: str, value: object, fix: str | None = None) -> float:
    """Check that a value is a finite number above 0."""
    if not is_number(value) or not 0 < value < math.inf:
        raise BadArgument(where, f"{name} must be a finite number above 0, got {value!r}", fix)
    return float(value)


def check_range(where: str, name: str, value: object, low: float, high: float, fix: str | None = None) -> float:
    """Check that a value is a number from `low` to `high`."""
    if not is_number(value) or not low <= value <= high:
        raise BadArgument(where, f"{name} must be a number from {low:g} to {high:g}, got {value!r}", fix)
    return float(value)


def check_fraction(where: str, name: str, value: object, fix: str | None = None) -> float:
    """Check that a value is above 0 and at most 1."""
    if not is_number(value) or not 0 < value <= 1:
        raise BadArgument(where, f"{name} must be above 0 and at most 1, got {value!r}", fix)
    return float(value)


class SingleThreadLock:
    """A reentrant lock that raises if another thread holds it. Copies are not locked."""

    def __init__(self, where: str) -> None:
        self._where, self._lock = where, threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            fix = "wait until it has finished, or create a separate federation and model for each thread"
            raise FedveilError(self._where, "another thread is using it", fix)

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type["SingleThreadLock"], tuple[str]]:
        return SingleThreadLock, (self._where,)
