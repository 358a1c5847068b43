"""Seed every source of random numbers, the operating system's included, from the name of what is running.

A test then draws the same numbers in whatever order the tests run, alone or with others. Processes that a test starts
are not covered: they draw from the operating system.
"""

import os
import random
import zlib

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

KEY = 32  # bytes of a private key
SYSTEM = os.urandom  # the operating system's, before it is replaced


class SeededSource:
    """Bytes in place of the operating system's; a forked process draws others than its parent."""

    def __init__(self) -> None:
        self._name, self._forks, self._random = "", 0, random.Random("")
        os.register_at_fork(before=self._count_fork, after_in_child=self._leave_parent)

    def seed(self, name: str) -> None:
        self._name, self._forks, self._random = name, 0, random.Random(name)

    def draw(self, count: int, /) -> bytes:
        return self._random.randbytes(count)

    def get_state(self) -> tuple[str, int, random.Random]:
        return self._name, self._forks, self._random

    def set_state(self, state: tuple[str, int, random.Random]) -> None:
        self._name, self._forks, self._random = state

    def _count_fork(self) -> None:
        self._forks += 1

    def _leave_parent(self) -> None:
        self.seed(f"{self._name}, fork {self._forks}")


SOURCE = SeededSource()


def replace_system_entropy() -> None:
    """Let `os.urandom`, `secrets`, `numpy.random.default_rng()` and new private keys draw from the seeded source."""
    os.urandom = SOURCE.draw
    random._urandom = SOURCE.draw  # of random.SystemRandom, and so of secrets and numpy
    for kind in (Ed25519PrivateKey, X25519PrivateKey):
        kind.generate = staticmethod(lambda kind=kind: kind.from_private_bytes(SOURCE.draw(KEY)))


def seed_all(name: str) -> None:
    """Seed all sources by a name."""
    SOURCE.seed(name)
    number = zlib.crc32(name.encode())
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def get_state():
    """The state of all sources, for `set_state`."""
    return SOURCE.get_state(), random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_state(state):
    source, python, numpy, pytorch = state
    SOURCE.set_state(source)
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(pytorch)
