"""Shamir's secret sharing: any t of n shares give the secret, t - 1 of them say nothing about it.

The secret is the value at 0 of a polynomial of degree t - 1 over GF(p) whose other coefficients are uniform; the share
of member x = 1 .. n is its value at x. p = 2^521 - 1 holds any 32-byte seed in one element. A wrong share gives some
other secret, which may also be below 2^256: only the dealer's commitment tells, and `Tally` compares it.
"""

import secrets
from collections.abc import Callable, Mapping
from functools import lru_cache

from fedveil.errors import Aborted, BadArgument

PRIME = 2**521 - 1
WIDTH = 66  # bytes of a share
LARGEST = PRIME.to_bytes(WIDTH, "big")  # shares are below it: bytes of equal length compare as integers do
SEED = 32  # bytes of a seed


def split(
    secret: int, t: int, n: int, *, prime: int = PRIME, draw: Callable[[int], int] = secrets.randbelow
) -> list[int]:
    """Return the shares at 1 .. n.

    Args:
        secret: an element of GF(prime).
        t: number of shares that give it back.
        n: number of shares.
        prime: size of the field; above n.
        draw: returns a uniform integer below its argument, from the operating system.
    """
    if not 1 <= t <= n < prime or not 0 <= secret < prime:
        raise BadArgument("split", f"t must be between 1 and n, and n and the secret below the prime, got t={t}, n={n}")
    coefficients = [secret, *(draw(prime) for _ in range(t - 1))]
    return [_evaluate(coefficients, x, prime) for x in range(1, n + 1)]


def _evaluate(coefficients: list[int], x: int, prime: int) -> int:
    y = 0
    for coefficient in reversed(coefficients):
        y = (y * x + coefficient) % prime
    return y


@lru_cache(maxsize=64)
def weights(points: tuple[int, ...], prime: int = PRIME) -> tuple[int, ...]:
    """Return the factors of the shares at these points: the Lagrange polynomials at 0."""
    found = []
    for own in points:
        above = below = 1
        for other in points:
            if other != own:
                above, below = above * other % prime, below * (other - own) % prime
        found.append(above * pow(below, -1, prime) % prime)
    return tuple(found)


def join(shares: Mapping[int, int], *, prime: int = PRIME) -> int:
    """Return the secret of the polynomial through these shares, keyed by their points."""
    return sum(w * y for w, y in zip(weights(tuple(shares), prime), shares.values(), strict=True)) % prime


def split_seed(seed: bytes, t: int, n: int) -> list[bytes]:
    """Return the shares of a 32-byte seed at 1 .. n."""
    if len(seed) != SEED:
        raise BadArgument("split_seed", f"a seed has {SEED} bytes, got {len(seed)}")
    return [share.to_bytes(WIDTH, "big") for share in split(int.from_bytes(seed, "big"), t, n)]


def join_seed(shares: Mapping[int, bytes]) -> bytes:
    """Return the seed from t shares, keyed by their points; abort if they are not shares of a seed."""
    if not all(is_field_element(share) for share in shares.values()):
        raise Aborted("share", "join_seed", "a share is not an element of the field")
    secret = join({point: int.from_bytes(share, "big") for point, share in shares.items()})
    if secret >= 2 ** (8 * SEED):
        raise Aborted("share", "join_seed", "the shares do not belong to one seed: at least one of them is wrong")
    return secret.to_bytes(SEED, "big")


def is_field_element(share: bytes) -> bool:
    """Tell whether bytes are an element of the field in its one encoding."""
    return len(share) == WIDTH and share < LARGEST
