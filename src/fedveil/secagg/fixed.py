"""Fixed point in Z_2^64: real numbers as integers that add without error, modulo 2^64.

With b bits behind the point a value x travels as rint(x 2^b) mod 2^64. For n clients and values below 2^e,

    b = 62 - ceil(log2 n) - e

so that n of them add to less than 2^62: the sum of the integers is exact, and each client's rounding costs at most
2^-(b+1) per element. `decode` then rounds the sum to float64: at most 2^-53 of its magnitude more.

Nothing is saturated or refused. Reduction modulo 2^64 is linear, so whatever exponents a server chooses, the sum of
the words is a function of the sum of the integers alone. A saturated value is not: with a well-chosen exponent the sum
would show the smallest client by itself. Nor may a client say that its values do not fit, since that is a bit about
its data for whoever chose the exponent.

Instead every row has two check words, which are linear too. With s_i the integers before their reduction, p = 2^31 - 1
and r a fixed public vector of 15-bit integers, a client's check word is

    (sum_i r_i s_i mod p) + p u,    u random

The sum of these words modulo p is that of r_i times the true sums. If the sum of some s_i leaves [-2^63, 2^63), the
opened row is off by m_i 2^64, and disagrees unless p divides sum_i r_i m_i: never if one element wrapped, and with
probability 2^-30 for several. u hides the quotient by p, which is not a function of the sum. r is fixed: it guards
against accidents, and a client that wants to spoil a sum can do so anyway.
"""

import math
import secrets
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fedveil.checks import number, whole
from fedveil.errors import BadArgument

Words = npt.NDArray[np.uint64]
Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

HEADROOM = 8
"""Bits between the largest magnitude that was seen and the largest that fits."""

LOWEST, HIGHEST = -32, 96
"""The exponents that clients accept."""

LARGEST = 2.0**512
"""The largest magnitude of a client's mean: scaled, it is still a float64."""

CHECKS = 2
"""Check words per row."""

PRIME = 2**31 - 1
PIECE = 2**14  # values that are worked on at a time: they stay in the cache


def exponent(largest: float) -> int:
    """The e of values that are about as large as `largest`: below 2^(e - 8), so that 2^8 times as much still fits.

    >>> exponent(1.0), exponent(0.75), exponent(0.0)
    (9, 8, 8)
    """
    if not number(largest) or not 0 <= largest < math.inf:
        raise BadArgument("exponent", f"the largest magnitude must be finite and at least 0, got {largest!r}")
    return math.frexp(largest)[1] + HEADROOM


def bits(n: int, exponent: int) -> int:
    """How many bits stand behind the point when n clients send values below 2^exponent.

    >>> bits(10, 8), bits(1000, -3)
    (50, 55)
    """
    whole("bits", "n", n)
    return 62 - (n - 1).bit_length() - exponent


def scale(values: Floats, bits: int) -> Floats:
    """rint(x 2^b) as float64; exact but for the rounding. Values must be finite."""
    scaled = values * 2.0**bits if -1000 < bits < 1000 else np.ldexp(values, bits)
    return np.asarray(np.rint(scaled, out=scaled))


def fits(integers: Floats) -> bool:
    """Whether reduction leaves all integers as they are."""
    return bool(np.abs(integers).max(initial=0.0) < 2.0**63)


def reduce(integers: Floats, small: bool | None = None) -> Words:
    """Integers, held as float64, modulo 2^64; `small` says whether that leaves them as they are, if it is known."""
    if fits(integers) if small is None else small:
        return integers.astype(np.int64).view(np.uint64)
    rest = np.fmod(integers, 2.0**64)  # exact, and so are the next two lines: what is added has no smaller bits
    rest = np.where(rest >= 2.0**63, rest - 2.0**64, rest)
    rest = np.where(rest < -(2.0**63), rest + 2.0**64, rest)
    return rest.astype(np.int64).view(np.uint64)


def encode(values: npt.ArrayLike, bits: int) -> Words:
    """rint(x 2^b) mod 2^64. Values must be finite."""
    found = np.asarray(values, np.float64)
    if not np.isfinite(found).all():
        raise BadArgument("encode", "a value is not finite")
    return reduce(scale(found, bits))


def decode(total: Words, bits: int) -> Floats:
    """The sum of values from the sum of their words."""
    if total.dtype != np.uint64:
        raise BadArgument("decode", f"words are uint64, got {total.dtype}")
    return np.asarray(np.ldexp(total.view(np.int64).astype(np.float64), -bits))


def encode_rows(values: Floats, sizes: Sequence[int], bits: Sequence[int], n: int, checks: bool = True) -> Words:
    """Rows behind one another, each with its own number of bits behind the point; then the check words of each row.

    Args:
        values: finite, all rows together.
        sizes: of the rows.
        bits: behind the point, one for each row.
        n: how many clients' words are added.
        checks: whether check words follow.
    """
    words = np.empty(len(values) + (CHECKS * len(sizes) if checks else 0), np.uint64)
    scales, hashes = np.exp2(np.array(bits, np.float64)), _Hashes(sizes)
    for piece in _pieces(tuple(sizes)):
        integers = values[piece.own] * np.repeat(scales[piece.rows], piece.counts)
        np.rint(integers, out=integers)
        small = fits(integers)
        words[piece.own] = own = reduce(integers, small)
        if checks:
            hashes.add(piece, _residues(own) if small else np.fmod(integers, float(PRIME)).astype(np.int64))
    if checks:
        words[len(values) :] = hashes.values() + np.uint64(PRIME) * _quotients(CHECKS * len(sizes), n)
    return words


def decode_rows(total: Words, sizes: Sequence[int], bits: Sequence[int]) -> Floats:
    """The sum of all rows' values from the sum of `encode_rows`, whose check words are left out."""
    found = np.empty(sum(sizes), np.float64)
    for row, (at, size) in enumerate(_starts(sizes)):
        found[at : at + size] = decode(total[at : at + size], bits[row])
    return found


def wrapped_rows(total: Words, sizes: Sequence[int]) -> list[int]:
    """The rows of a sum that wrapped around, by their check words."""
    hashes, end = _Hashes(sizes), sum(sizes)
    for piece in _pieces(tuple(sizes)):
        hashes.add(piece, _residues(total[piece.own]))
    differ = hashes.values() != total[end : end + CHECKS * len(sizes)] % np.uint64(PRIME)
    return np.flatnonzero(differ.reshape(-1, CHECKS).any(1)).tolist()


class _Piece(NamedTuple):
    """Some values that are worked on at a time, and the rows that they belong to."""

    own: slice
    rows: Integers
    counts: Integers
    starts: Integers  # where each of the rows begins in the piece


@lru_cache(maxsize=16)
def _pieces(sizes: tuple[int, ...]) -> tuple[_Piece, ...]:
    """All values in pieces that stay in the cache; rows without values belong to none."""
    ends, found = np.cumsum(np.array(sizes, np.int64)), []
    total = int(ends[-1]) if sizes else 0
    for start in range(0, total, PIECE):
        stop = min(start + PIECE, total)
        inside = np.clip(ends, start, stop)
        counts = np.diff(inside, prepend=start)
        rows = np.flatnonzero(counts)
        starts = np.cumsum(counts[rows]) - counts[rows]
        found.append(_Piece(slice(start, stop), rows, counts[rows], starts))
    return tuple(found)


class _Hashes:
    """sum_i r_i s_i mod p of each row, for each vector r, from residues that come piece by piece."""

    def __init__(self, sizes: Sequence[int]) -> None:
        total = max(sum(sizes), 1)
        self._drawn = _coefficients(1 << (total - 1).bit_length())
        self._sums = np.zeros((CHECKS, len(sizes)), np.int64)

    def add(self, piece: _Piece, residues: Integers) -> None:
        """Products have 48 bits; without those above 2^31 as many as there are add up to less than 2^63."""
        for sums, row in zip(self._sums, self._drawn[:, piece.own], strict=True):
            products = row * residues
            sums[piece.rows] += np.add.reduceat((products & PRIME) + (products >> 31), piece.starts)

    def values(self) -> Words:
        """Those of the first row, of the second, and on."""
        return (self._sums % PRIME).T.reshape(-1).astype(np.uint64)


def _residues(words: Words) -> Integers:
    """Integers congruent to the words, as signed numbers, modulo 2^31 - 1, and below 2^33."""
    integers = words.view(np.int64)
    return (integers & PRIME) + (integers >> 31)


def _quotients(count: int, n: int) -> Words:
    """Random integers u such that n check words add up to less than 2^64."""
    drawn = np.frombuffer(secrets.token_bytes(4 * count), np.uint32).astype(np.uint64)
    return drawn >> np.uint64((n - 1).bit_length())


@lru_cache(maxsize=32)
def _coefficients(size: int) -> npt.NDArray[np.int16]:
    """Two fixed rows of integers from 1 to 2^15 - 1: AES-256-CTR under a key of zeros and of ones."""
    keys = bytes(32), bytes([1]) * 32
    streams = [Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(2 * size)) for key in keys]
    return np.stack([np.frombuffer(stream, "<u2") for stream in streams]).astype(np.int16) & 0x7FFF | 1


def _starts(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    at = 0
    for size in sizes:
        yield at, size
        at += size
