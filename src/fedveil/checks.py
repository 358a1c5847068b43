"""Argument checks, with one wording for each kind of mistake. Each returns the value, or raises BadArgument."""

import difflib
import math
from collections.abc import Iterable
from typing import TypeGuard

from fedveil.errors import BadArgument


def check_choice(where: str, name: str, value: str, allowed: Iterable[str]) -> str:
    """Check that a value is one of the allowed words; otherwise suggest the closest.

    >>> check_choice("load", "task", "regression", ("classification", "regression"))
    'regression'
    """
    names = sorted(allowed)
    if value in names:
        return value
    near = difflib.get_close_matches(str(value), names, n=1, cutoff=0.5)
    every = ", ".join(repr(known) for known in names)
    fix = f"use {near[0]!r}; the choices are {every}" if near else (f"use one of {every}" if names else None)
    raise BadArgument(where, f"there is no {name} {value!r}", fix)


def check_count(where: str, name: str, value: object, least: int = 1, fix: str | None = None) -> int:
    """Check that a value is an integer of at least `least`; True and False are not."""
    if type(value) is not int or value < least:
        raise BadArgument(where, f"{name} must be an integer of at least {least}, got {value!r}", fix)
    return value


def check_integer(where: str, name: str, value: object) -> int:
    """Check that a value is an integer; True and False are not."""
    if type(value) is not int:
        raise BadArgument(where, f"{name} must be an integer, got {value!r:.60}", f"use an int, such as {name}=0")
    return value


def check_boolean(where: str, name: str, value: object) -> bool:
    """Check that a value is True or False; a word such as "no" would count as True."""
    if type(value) is not bool:
        raise BadArgument(where, f"{name} must be True or False, got {value!r:.60}", f"use {name}=True or {name}=False")
    return value


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is an int or a float; True and False are neither."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_positive(where: str, name: str, value: object, fix: str | None = None) -> float:
    """Check that a value is a finite number above 0."""
    if not is_number(value) or not 0 < value < math.inf:
        raise BadArgument(where, f"{name} must be a finite number above 0, got {value!r}", fix)
    return float(value)


def check_range(where: str, name: str, value: object, least: float, most: float, fix: str | None = None) -> float:
    """Check that a value is a number within a range."""
    if not is_number(value) or not least <= value <= most:
        raise BadArgument(where, f"{name} must be a number from {least:g} to {most:g}, got {value!r}", fix)
    return float(value)


def check_fraction(where: str, name: str, value: object, fix: str | None = None) -> float:
    """Check that a value is above 0 and at most 1."""
    if not is_number(value) or not 0 < value <= 1:
        raise BadArgument(where, f"{name} must be above 0 and at most 1, got {value!r}", fix)
    return float(value)
