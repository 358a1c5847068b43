"""Checks of what a caller asked for, in one wording."""

import difflib
from collections.abc import Iterable

from fedveil.errors import BadArgument


def choose(where: str, kind: str, asked: str, known: Iterable[str]) -> str:
    """Return `asked` if it is known; else refuse it and name the nearest that is."""
    names = sorted(known)
    if asked in names:
        return asked
    near = difflib.get_close_matches(str(asked), names, n=1, cutoff=0.5)
    every = ", ".join(repr(name) for name in names)
    fix = f"{near[0]!r} is the nearest of {every}" if near else (f"one of {every}" if names else None)
    raise BadArgument(where, f"there is no {kind} {asked!r}", fix)


def whole(where: str, name: str, value: int, least: int) -> int:
    """Return `value` if it is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadArgument(where, f"{name} is {value!r}", f"{name} of at least {least}, a whole number")
    return value
