"""Where secret numbers come from."""

import os
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray


class Entropy:
    """A source of random 64-bit words: the operating system, or, for tests only, a seed."""

    def __init__(self) -> None:
        self._bytes: Callable[[int], bytes] = os.urandom
        self.for_tests_only = False

    @classmethod
    def for_tests(cls, seed: int) -> "Entropy":
        """Repeatable and therefore not secret: a server that talks to a network refuses it."""
        source = cls()
        source._bytes = np.random.Generator(np.random.PCG64(seed)).bytes
        source.for_tests_only = True
        return source

    def words(self, count: int) -> NDArray[np.uint64]:
        """Uniform 64-bit numbers."""
        return np.frombuffer(self._bytes(8 * count), dtype=np.uint64)

    def token(self) -> str:
        """A name that no other round has."""
        return self._bytes(16).hex()

    def log_uniform(self, count: int, width: NDArray[np.float64], signed: NDArray[np.uint64]) -> NDArray[np.float64]:
        """`count` rows of exp(u), u uniform in [-width, width), from 53 bits; of random sign where `signed` is 1."""
        words = self.words(count * len(width)).reshape(count, -1)
        size: NDArray[np.float64] = np.exp((words >> np.uint64(11)) * (width * 2**-52) - width)
        return size * (1.0 - 2.0 * (words & signed))

    def keys(self, count: int) -> NDArray[np.uint32]:
        """Uniform 32-bit numbers, to sort by."""
        return np.frombuffer(self._bytes(4 * count), dtype=np.uint32)

    def fractions(self, count: int) -> NDArray[np.float64]:
        """Uniform in [-1/2, 1/2), from 16 bits each."""
        words = np.frombuffer(self._bytes(2 * count), dtype=np.uint16).astype(np.float64)
        return words * 2.0**-16 - 0.5

    def normal(self, count: int) -> NDArray[np.float64]:
        """Standard normal numbers, each from 52 bits of a random word of its own.

        Not from a torch.Generator, which would hide all of them behind one seed of 32 bits.
        """
        uniform = ((self.words(count) >> np.uint64(12)) + 0.5) * 2.0**-52  # never 0 or 1
        found: NDArray[np.float64] = torch.special.ndtri(torch.from_numpy(uniform)).numpy()
        return found
