"""Fixed point in Z_2^64: real numbers as integers that add without error, modulo 2^64.

With b bits behind the point a value x travels as rint(x 2^b) mod 2^64. For n clients and values below 2^e,

    b = 62 - ceil(log2 n) - e

so that n of them add to less than 2^62: the sum of the integers is exact, and each client's rounding costs at most
2^-(b+1) per element. `decode` then rounds the sum to float64: at most 2^-53 of its magnitude more.

Nothing is saturated or refused. Reduction modulo 2^64 is linear, so whatever exponents a server chooses, the sum of
the words is a function of the sum of the integers alone. A saturated value is not: with a well-chosen exponent the sum
would show the smallest client by itself. Nor may a client say that its values do not fit, since that is a bit about
its data for whoever chose the exponent.

Instead every row has check words, which are sums over the row as well: sum_i r_i floor(s_i / 2^16) for two fixed public
vectors r of odd 16-bit integers, and sum_i r_i floor(s_i / 2^k + 1/2) for the first of them and k = 80, 144, where s_i
is the integer before its reduction. If the sum of a row's integers leaves [-2^63, 2^63), the check words of the sum
disagree with it: an element that is off by m 2^64 changes the first two by r_i m 2^48 mod 2^64. That is 0 if m is a
multiple of 2^16, which takes an integer of 2^80 or more, and the other two see those up to 2^208. r is public and
fixed: it guards against accidents, and a client that wants to spoil a sum can do so anyway.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fedveil.checks import number, whole
from fedveil.errors import BadArgument

Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]

HEADROOM = 8
"""Bits between the largest magnitude that was seen and the largest that fits."""

LOWEST, HIGHEST = -32, 96
"""The exponents that clients accept."""

LARGEST = 2.0**80
"""The largest magnitude of a client's mean: beyond it, check words could miss a sum that wrapped around.

With 2^22 records and the lowest exponent that is an integer below 2^208.
"""

CHECKS = 4
"""Check words per row."""

NEAR, FAR = 16, (80, 144)  # bits that check words leave out
PIECE = 2**15  # values that are worked on at a time: they stay in the cache


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


def reduce(integers: Floats) -> Words:
    """Integers, held as float64, modulo 2^64."""
    if fits(integers):
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


def encode_rows(values: Floats, sizes: Sequence[int], bits: Sequence[int], checks: bool = True) -> Words:
    """Rows behind one another, each with its own number of bits behind the point; then the check words of each row.

    Args:
        values: finite, all rows together.
        sizes: of the rows.
        bits: behind the point, one for each row.
        checks: whether check words follow.
    """
    extra = CHECKS * len(sizes) if checks else 0
    words = np.empty(len(values) + extra, np.uint64)
    for row, (at, size) in enumerate(_starts(sizes)):
        integers = scale(values[at : at + size], bits[row])
        words[at : at + size] = reduce(integers)
        if checks:
            place = len(values) + CHECKS * row
            own = words[at : at + size]
            words[place : place + CHECKS] = _check_words(own, None if fits(integers) else integers)
    return words


def decode_rows(total: Words, sizes: Sequence[int], bits: Sequence[int]) -> Floats:
    """The sum of all rows' values from the sum of `encode_rows`, whose check words are left out."""
    found = np.empty(sum(sizes), np.float64)
    for row, (at, size) in enumerate(_starts(sizes)):
        found[at : at + size] = decode(total[at : at + size], bits[row])
    return found


def longest_row(n: int) -> int:
    """How many values a row may have for the check words to be certain about a sum over n clients."""
    return 2**30 // n


def wrapped_rows(total: Words, sizes: Sequence[int], n: int) -> list[int]:
    """The rows of a sum over n clients or fewer that wrapped around, by their check words.

    Without a wrap, floor of a sum exceeds the sum of floors by 0 to n - 1 per element, and so the check words of the
    sum by at most n size 2^16 (`longest_row` keeps that below 2^46); rounding to the nearest 2^80 gives as much on
    either side. Elements that wrapped change each of the first two by a multiple of 2^48: never by 0 mod 2^64 if one
    of them did, and for several with probability 2^-30 over r.
    """
    found, end = [], sum(sizes)
    for row, (at, size) in enumerate(_starts(sizes)):
        place, window = end + CHECKS * row, n * size * 2**NEAR
        apart = _check_words(total[at : at + size]) - total[place : place + CHECKS]
        near, nearer, *far = apart.view(np.int64).tolist()
        if not (0 <= near <= window and 0 <= nearer <= window and max(map(abs, far)) <= window):
            found.append(row)
    return found


def _check_words(words: Words, integers: Floats | None = None) -> Words:
    """The check words of a row; `integers` are the row before its reduction, where that has changed them."""
    drawn = _coefficients(1 << max(len(words) - 1, 0).bit_length())
    found = [0] * CHECKS
    for at in range(0, len(words), PIECE):
        own = slice(at, at + PIECE)
        first, second = drawn[:, own].astype(np.uint64)[:, : len(words[own])]
        if integers is None:
            near = (words[own].view(np.int64) >> NEAR).view(np.uint64)
        else:
            near = reduce(np.floor(integers[own] * 2.0**-NEAR))
            for place, left_out in enumerate(FAR, 2):
                found[place] += int(np.dot(first, reduce(np.floor(integers[own] * 2.0**-left_out + 0.5))))
        found[0] += int(np.dot(first, near))
        found[1] += int(np.dot(second, near))
    return np.array([value % 2**64 for value in found], np.uint64)


@lru_cache(maxsize=32)
def _coefficients(size: int) -> npt.NDArray[np.uint16]:
    """Two fixed rows of odd 16-bit integers: AES-256-CTR under a key of zeros and of ones."""
    keys = bytes(32), bytes([1]) * 32
    streams = [Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(2 * size)) for key in keys]
    return np.stack([np.frombuffer(stream, "<u2") for stream in streams]).astype(np.uint16) | np.uint16(1)


def _starts(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    at = 0
    for size in sizes:
        yield at, size
        at += size
