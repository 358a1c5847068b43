"""Fixed point in Z_2^64: real numbers as integers that add without error, modulo 2^64.

With b bits behind the point a value x travels as rint(x 2^b). For n clients and values below 2^e,

    b = 62 - ceil(log2 n) - e

so that n of them add to less than 2^62: nothing wraps around, and the sum of the integers is exact. What is lost is
the rounding of each client: at most n 2^-(b+1) per summed element. `decode` then rounds the sum to float64, as any
float64 is: at most 2^-53 of its magnitude besides.
"""

import math

import numpy as np
import numpy.typing as npt

from fedveil.checks import number, whole
from fedveil.errors import BadArgument, OutOfRange

Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]
Bits = int | npt.NDArray[np.int64]

HEADROOM = 8
"""Bits between the largest magnitude that was seen and the largest that fits."""


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


def limit(n: int) -> int:
    """The largest magnitude that an integer of one of n clients may have: n of them do not wrap around."""
    return (2**63 - 1) // whole("limit", "n", n)


def encode(values: npt.ArrayLike, bits: Bits, n: int) -> Words:
    """rint(x 2^b) as words, for one of n clients.

    Args:
        values: any shape, float64.
        bits: behind the point: one number, or one for each value.
        n: how many clients' words are added.

    Raises:
        OutOfRange: a value is not finite, or too large for n of them to be added. It says how many, not which or how
            large: those are the client's data.
    """
    scaled = np.asarray(np.ldexp(np.asarray(values, np.float64), bits))
    np.rint(scaled, out=scaled)
    most = limit(n)
    outside = ~(np.abs(scaled) < 2.0**63)  # NaN too
    if not outside.any():
        whole_numbers = scaled.astype(np.int64)
        outside = np.abs(whole_numbers) > most
        if not outside.any():
            return whole_numbers.view(np.uint64)
    what = f"{np.count_nonzero(outside):,} of {scaled.size:,} values are not finite or too large for fixed point"
    raise OutOfRange("encode", what, "a larger exponent")


def decode(total: Words, bits: Bits) -> Floats:
    """The sum of values from the sum of their words."""
    if total.dtype != np.uint64:
        raise BadArgument("decode", f"words are uint64, got {total.dtype}")
    return np.asarray(np.ldexp(total.view(np.int64).astype(np.float64), np.negative(bits)))
