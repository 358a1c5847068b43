"""Checks of arguments, threads and autocast. The same mistake raises an error with the same wording everywhere."""

import difflib
import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import ParamSpec, TypeGuard, TypeVar

from fedveil.errors import BadArgument, FedveilError

DEVICES = ("cpu", "cuda")
P = ParamSpec("P")
R = TypeVar("R")
_SUSPENDED: ContextVar[tuple[str, ...]] = ContextVar("_SUSPENDED", default=())


def check_choice(where: str, name: str, value: str, allowed_values: Iterable[str]) -> str:
    """Check that a value is one of the allowed strings; the error suggests the closest match.

    >>> check_choice("load", "task", "regression", ("classification", "regression"))
    'regression'
    """
    names = sorted(allowed_values)
    if value in names:
        return value
    matches = difflib.get_close_matches(str(value), names, n=1, cutoff=0.5)
    choices = ", ".join(repr(choice) for choice in names)
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
    """A reentrant lock that raises an error if another thread holds it. Copies start unlocked."""

    def __init__(self, where: str) -> None:
        self._where, self._lock = where, threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            fix = "wait until the other thread has finished, or create a separate federation and model for each thread"
            raise FedveilError(self._where, "another thread is using this object", fix)

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type["SingleThreadLock"], tuple[str]]:
        return SingleThreadLock, (self._where,)


def suspend_autocast() -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that runs a function without torch.autocast until `resume_autocast`; it accepts only bfloat16.

    Noise, sums over clients and recovery must be computed in full precision. In bfloat16, a perturbed forward pass is
    as close to its float32 result as an unperturbed one (benchmarks/autocast.py).
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            import torch

            active = tuple(device for device in DEVICES if torch.is_autocast_enabled(device))
            if not active and not _SUSPENDED.get():  # the usual case
                return function(*args, **kwargs)
            with _suspend(active):
                return function(*args, **kwargs)

        return run

    return decorate


@contextmanager
def _suspend(active: tuple[str, ...]) -> Iterator[None]:
    """Switch torch.autocast off for these devices; refuse autocast to any dtype but bfloat16."""
    import torch

    for device in active:
        if (dtype := torch.get_autocast_dtype(device)) != torch.bfloat16:
            message = f"autocast to {dtype} on {device} requires loss scaling, which is not supported"
            raise BadArgument("torch.autocast", message, "pass dtype=torch.bfloat16, or train in float32")
    token = _SUSPENDED.set(active)
    try:
        with _autocast(active, enabled=False):
            yield
    finally:
        _SUSPENDED.reset(token)


@contextmanager
def resume_autocast() -> Iterator[None]:
    """Switch torch.autocast back on for the devices on which it is suspended."""
    devices = _SUSPENDED.get()
    with _autocast(devices, enabled=True) if devices else nullcontext():
        yield


def is_suspended() -> bool:
    """Return whether autocast was on for any device before it was suspended."""
    return bool(_SUSPENDED.get())


def _autocast(devices: tuple[str, ...], *, enabled: bool) -> ExitStack:
    import torch

    with ExitStack() as stack:
        for device in devices:  # no cache: it would keep casts of values from other passes
            stack.enter_context(torch.autocast(device, torch.bfloat16, enabled=enabled, cache_enabled=False))
        return stack.pop_all()
