"""Fixed-point numbers in Z_2^64: real numbers as integers whose sums are exact modulo 2^64.

With b fractional bits, a value x is sent as rint(x 2^b) mod 2^64. For n clients and values below 2^e,

    b = 62 - ceil(log2 n) - e

so that the sum of n values stays below 2^62: the sum of the integers is exact, and each client's rounding costs at most
2^-(b+1) per element. `decode` then rounds the sum to float64, which adds at most 2^-53 of its magnitude.

Nothing is saturated or refused. Reduction modulo 2^64 is linear, so whatever exponents a server chooses, the sum of the
words depends only on the sum of the integers. Saturation is not linear: with a well-chosen exponent, the sum
would reveal the client with the smallest values. A client may not report that its values do not fit either, because the
report would give whoever chose the exponent one bit of information about the client's data.

Instead, every row has two check words, which are linear too. With s_i the integers before their reduction, p = 2^31 - 1
and r a fixed public vector of 15-bit integers, a client's check word is

    (sum_i r_i s_i mod p) + p u,    u random

Modulo p, the sum of these words is the sum of r_i times the true sums. If a sum of s_i leaves [-2^63, 2^63), element i
of the opened row is wrong by m_i 2^64, and the row does not match unless p divides sum_i r_i m_i. That never happens if
only one element wrapped around, and happens with probability 2^-30 if several did. u hides the quotient by p, which is
not a function of the sum. r is fixed, because it only guards against accidents: a client that wants to corrupt a sum
can do so anyway.
"""

import math
import secrets
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fedveil.checks import check_count, is_number
from fedveil.errors import BadArgument

Words = npt.NDArray[np.uint64]
Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

HEADROOM = 8
"""Bits between the largest magnitude seen so far and the largest that fits."""

MIN_EXPONENT, MAX_EXPONENT = -32, 96
"""The range of exponents that clients accept."""

MAX_MAGNITUDE = 2.0**512
"""Magnitudes in a client's mean must be below this, so that they fit in a float64 after scaling."""

CHECKS = 2
"""The number of check words per row."""

PRIME = 2**31 - 1
PIECE_SIZE = 2**14  # number of values processed at a time, small enough to fit in the cache


def exponent(largest: float) -> int:
    """Return the exponent e with `largest` below 2^(e - 8), so that values 2^8 times as large still fit.

    >>> exponent(1.0), exponent(0.75), exponent(0.0)
    (9, 8, 8)
    """
    if not is_number(largest) or not 0 <= largest < math.inf:
        raise BadArgument("exponent", f"the largest magnitude must be finite and at least 0, got {largest!r}")
    return math.frexp(largest)[1] + HEADROOM


def bits(n: int, exponent: int) -> int:
    """Return the number of fractional bits when n clients send values below 2^exponent.

    >>> bits(10, 8), bits(1000, -3)
    (50, 55)
    """
    check_count("bits", "n", n)
    return 62 - (n - 1).bit_length() - exponent


def scale(values: Floats, bits: int) -> Floats:
    """Return rint(x 2^b) as float64, exact except for the rounding; values must be finite."""
    return np.asarray(np.rint(np.ldexp(values, bits)))


def in_range(integers: Floats) -> bool:
    """Return whether all integers are in [-2^63, 2^63), so that reduction does not change them."""
    return bool(np.abs(integers).max(initial=0.0) < 2.0**63)


def reduce(integers: Floats, unchanged: bool | None = None) -> Words:
    """Reduce integers, stored as float64, modulo 2^64; `unchanged` is `in_range(integers)`, if known."""
    if in_range(integers) if unchanged is None else unchanged:
        return integers.astype(np.int64).view(np.uint64)
    remainder = np.fmod(integers, 2.0**64)  # exact, as are the next two lines: their results fit in a float64
    remainder = np.where(remainder >= 2.0**63, remainder - 2.0**64, remainder)
    remainder = np.where(remainder < -(2.0**63), remainder + 2.0**64, remainder)
    return remainder.astype(np.int64).view(np.uint64)


def encode(values: npt.ArrayLike, bits: int) -> Words:
    """Return rint(x 2^b) mod 2^64; raise BadArgument unless all values are finite."""
    result = np.asarray(values, np.float64)
    if not np.isfinite(result).all():
        raise BadArgument("encode", "a value is not finite")
    return reduce(scale(result, bits))


def decode(total: Words, bits: int | Integers) -> Floats:
    """Decode the sum of values from the sum of their words."""
    if total.dtype != np.uint64:
        raise BadArgument("decode", f"words must be uint64, got {total.dtype}")
    return np.asarray(np.ldexp(total.view(np.int64).astype(np.float64), -bits))


def encode_rows(values: Floats, sizes: Sequence[int], bits: Sequence[int], n: int, checks: bool = True) -> Words:
    """Encode consecutive rows, each with its own number of fractional bits, followed by the check words of each row.

    Args:
        values: the finite values of all rows, concatenated.
        sizes: number of values in each row.
        bits: number of fractional bits of each row.
        n: number of clients whose words are added.
        checks: whether to append check words.
    """
    words = np.empty(len(values) + (CHECKS * len(sizes) if checks else 0), np.uint64)
    scales, hashes = np.exp2(np.array(bits, np.float64)), _Hashes(sizes)
    for piece in _pieces(tuple(sizes)):
        integers = values[piece.span] * np.repeat(scales[piece.rows], piece.counts)
        np.rint(integers, out=integers)
        unchanged = in_range(integers)
        words[piece.span] = reduced = reduce(integers, unchanged)
        if checks:
            hashes.add(piece, _residues(reduced) if unchanged else np.fmod(integers, float(PRIME)).astype(np.int64))
    if checks:
        words[len(values) :] = hashes.values() + np.uint64(PRIME) * _quotients(CHECKS * len(sizes), n)
    return words


def decode_rows(total: Words, sizes: Sequence[int], bits: Sequence[int]) -> Floats:
    """Decode the sum of all rows from the sum of their encoded words; check words are skipped."""
    return decode(total[: sum(sizes)], np.repeat(np.array(bits, np.int64), sizes))


def wrapped_rows(total: Words, sizes: Sequence[int]) -> list[int]:
    """Return the indices of the rows of a sum that wrapped around, according to their check words."""
    hashes, end = _Hashes(sizes), sum(sizes)
    for piece in _pieces(tuple(sizes)):
        hashes.add(piece, _residues(total[piece.span]))
    mismatches = hashes.values() != total[end : end + CHECKS * len(sizes)] % np.uint64(PRIME)
    return np.flatnonzero(mismatches.reshape(-1, CHECKS).any(1)).tolist()


class _Piece(NamedTuple):
    """Values that are processed together, and the rows that they belong to."""

    span: "slice[int, int, None]"
    rows: Integers
    counts: Integers
    starts: Integers  # index in the piece at which each row begins


@lru_cache(maxsize=16)
def _pieces(sizes: tuple[int, ...]) -> tuple[_Piece, ...]:
    """Divide all values into pieces that fit in the cache; empty rows are omitted."""
    ends, result = np.cumsum(np.array(sizes, np.int64)), []
    total = int(ends[-1]) if sizes else 0
    for start in range(0, total, PIECE_SIZE):
        stop = min(start + PIECE_SIZE, total)
        clipped_ends = np.clip(ends, start, stop)
        counts = np.diff(clipped_ends, prepend=start)
        rows = np.flatnonzero(counts)
        starts = np.cumsum(counts[rows]) - counts[rows]
        result.append(_Piece(slice(start, stop), rows, counts[rows], starts))
    return tuple(result)


class _Hashes:
    """The sums of r_i s_i mod p over i, for each row and each vector r, accumulated piece by piece."""

    def __init__(self, sizes: Sequence[int]) -> None:
        total = max(sum(sizes), 1)
        self._vectors = _coefficients(1 << (total - 1).bit_length())
        self._sums = np.zeros((CHECKS, len(sizes)), np.int64)

    def add(self, piece: _Piece, residues: Integers) -> None:
        """Add the products of one piece; each has 48 bits and is folded, so that their sum stays below 2^63."""
        for sums, row in zip(self._sums, self._vectors[:, piece.span], strict=True):
            products = row * residues
            sums[piece.rows] += np.add.reduceat((products & PRIME) + (products >> 31), piece.starts)

    def values(self) -> Words:
        """Return the hashes, row by row."""
        return (self._sums % PRIME).T.reshape(-1).astype(np.uint64)


def _residues(words: Words) -> Integers:
    """Return integers below 2^33 that are congruent to the words, read as signed, modulo 2^31 - 1."""
    integers = words.view(np.int64)
    return (integers & PRIME) + (integers >> 31)


def _quotients(count: int, n: int) -> Words:
    """Draw integers u such that the sum of n check words stays below 2^64."""
    words = np.frombuffer(secrets.token_bytes(4 * count), np.uint32).astype(np.uint64)
    return words >> np.uint64((n - 1).bit_length())


@lru_cache(maxsize=32)
def _coefficients(size: int) -> npt.NDArray[np.int16]:
    """Return two fixed rows of integers from 1 to 2^15 - 1: AES-256-CTR with all key bytes 0, and all 1."""
    keys = bytes(32), bytes([1]) * 32
    streams = [Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(2 * size)) for key in keys]
    return np.stack([np.frombuffer(stream, "<u2") for stream in streams]).astype(np.int16) & 0x7FFF | 1
