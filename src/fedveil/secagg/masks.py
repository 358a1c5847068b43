"""Derive keys, seeds and commitments from secrets, split seeds into shares, and mask vectors with key streams.

    pair       = X25519 secret of two members, agreed once per run
    s_kj       = HKDF-SHA256(pair, salt = context, info = ("mask", both names, sorted))
    share key  = HKDF-SHA256(pair, salt = context, info = ("share", from, to))
    PRG(seed)  = AES-256-CTR(HKDF-SHA256(seed, info = "stream")), as little-endian words
    commitment = SHA-256(context, seed)

The context is a hash of everything that the clients of a round must have in common (`messages.context`): run, round,
attempt, roster, exponents and the entire broadcast. If the broadcasts of two clients differ in one bit, their masks do
not cancel. No mask or key is used twice. A seed is committed to and expanded with different labels, so that a
commitment reveals nothing about the stream.

Self seeds are shared as in Shamir (1979): any t of n shares determine the secret, and t - 1 reveal nothing about it.
The secret is the value at 0 of a polynomial of degree t - 1 over GF(p) whose other coefficients are uniform; the share
of member x = 1 .. n is its value at x. With p = 2^521 - 1, one element can represent any 32-byte seed. A wrong share
yields a different secret, which may also be below 2^256; `Tally` compares it with the dealer's commitment.
"""

import hashlib
import math
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedveil.errors import Aborted, BadArgument
from fedveil.secagg.fixed import Words

LABEL = "fedveil secagg 1"
SEED_SIZE = 32  # size of a seed in bytes
PRIME = 2**521 - 1  # size of the field of shares
SHARE_SIZE = 66  # size of a share in bytes
NONCE_SIZE, TAG_SIZE = 12, 16
SEALED_SIZE = NONCE_SIZE + SHARE_SIZE + TAG_SIZE  # size of an encrypted share in bytes
PIECE_SIZE = 2**15  # number of words processed at a time: they and their stream fit in the cache
ZEROS = memoryview(bytes(8 * PIECE_SIZE))
WORD = np.dtype("<u8")

Fill = Callable[[int], Words]
Seeds = Iterable[bytes]


def fields(*parts: bytes | str | int) -> bytes:
    """Encode fields as bytes, each preceded by its length, so that different lists of fields yield different bytes."""
    result = b""
    for part in parts:
        raw = part if isinstance(part, bytes) else str(part).encode()
        result += len(raw).to_bytes(8, "big") + raw
    return result


def derive(secret: bytes, salt: bytes, *info: bytes | str | int) -> bytes:
    """Derive 32 bytes from a secret, different for each salt and info."""
    return HKDF(SHA256(), SEED_SIZE, salt, fields(LABEL, *info)).derive(secret)


def agree(private: X25519PrivateKey, public: bytes) -> bytes:
    """Return the secret that a member shares with the owner of a public key."""
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:  # a point of small order
        raise Aborted("roster", "roster", "a member's key is of small order") from None


def is_valid_key(key: bytes) -> bool:
    """Return whether an X25519 public key can be used to agree on a secret: it must not be of small order."""
    try:
        agree(X25519PrivateKey.generate(), key)
    except Aborted:
        return False
    return True


def pair_seed(pair: bytes, context: bytes, name: str, other_name: str) -> bytes:
    """Return the seed of the mask that two members share."""
    return derive(pair, context, "mask", *sorted((name, other_name)))


def share_key(pair: bytes, context: bytes, sender: str, receiver: str) -> bytes:
    """Return the key that encrypts a share from one member to another."""
    return derive(pair, context, "share", sender, receiver)


def share_label(context: bytes, sender: str, receiver: str) -> bytes:
    """Return the associated data of an encrypted share."""
    return fields(LABEL, "share", context, sender, receiver)


def seal(share: bytes, pair: bytes, context: bytes, sender: str, receiver: str) -> bytes:
    """Encrypt a share from one member to another in one attempt."""
    nonce = os.urandom(NONCE_SIZE)  # the key is used only once; a random nonce is safe even if a disk is restored
    key = AESGCM(share_key(pair, context, sender, receiver))
    return nonce + key.encrypt(nonce, share, share_label(context, sender, receiver))


def unseal(sealed: bytes, pair: bytes, context: bytes, sender: str, receiver: str) -> bytes | None:
    """Decrypt a share; return None if it was not encrypted by this sender for this receiver in this attempt."""
    if len(sealed) != SEALED_SIZE:
        return None
    key = AESGCM(share_key(pair, context, sender, receiver))
    try:
        return key.decrypt(sealed[:NONCE_SIZE], sealed[NONCE_SIZE:], share_label(context, sender, receiver))
    except InvalidTag:
        return None


def new_seed() -> bytes:
    """Draw a seed from the operating system's entropy."""
    return os.urandom(SEED_SIZE)


def commitment(seed: bytes, context: bytes) -> bytes:
    """Return the hash that binds a client to a seed without revealing it."""
    return hashlib.sha256(fields(LABEL, "commitment", context, seed)).digest()


def share_hash(context: bytes, dealer: str, index: int, share: bytes) -> bytes:
    """Return the hash that binds a dealer and the member at an index to the share dealt to that member."""
    return hashlib.sha256(fields(LABEL, "share hash", context, dealer) + index.to_bytes(8, "big") + share).digest()


def split(
    secret: int, t: int, n: int, *, prime: int = PRIME, draw: Callable[[int], int] = secrets.randbelow
) -> list[int]:
    """Split a secret into shares at the points 1 .. n.

    Args:
        secret: an element of GF(prime).
        t: number of shares needed to recover the secret.
        n: number of shares.
        prime: size of the field, greater than n.
        draw: function that returns a uniform random integer below its argument.
    """
    if not 1 <= t <= n < prime or not 0 <= secret < prime:
        raise BadArgument("split", f"t must be from 1 to n, and n and the secret below the prime, got t={t}, n={n}")
    coefficients = [secret, *(draw(prime) for _ in range(t - 1))]
    return [_evaluate(coefficients, x, prime) for x in range(1, n + 1)]


def _evaluate(coefficients: list[int], x: int, prime: int) -> int:
    y = 0
    for coefficient in reversed(coefficients):
        y = (y * x + coefficient) % prime
    return y


@lru_cache(maxsize=64)
def weights(points: tuple[int, ...], prime: int = PRIME) -> tuple[int, ...]:
    """Return the weights of the shares at these points: the values of the Lagrange polynomials at 0."""
    others = {point: [other_point for other_point in points if other_point != point] for point in points}
    denominators = [math.prod(other_point - point for other_point in others[point]) for point in points]
    pairs = zip(points, denominators, strict=True)
    return tuple([math.prod(others[point]) * pow(value, -1, prime) % prime for point, value in pairs])


def join(shares: Mapping[int, int], *, prime: int = PRIME) -> int:
    """Recover a secret from its shares, keyed by their points."""
    return sum(w * y for w, y in zip(weights(tuple(shares), prime), shares.values(), strict=True)) % prime


def split_seed(seed: bytes, t: int, n: int) -> list[bytes]:
    """Split a 32-byte seed into shares at the points 1 .. n."""
    return [share.to_bytes(SHARE_SIZE, "big") for share in split(int.from_bytes(seed, "big"), t, n)]


def join_seed(shares: Mapping[int, bytes]) -> bytes:
    """Recover a seed from t shares, keyed by their points; abort if they are not shares of a seed."""
    if not all(is_field_element(share) for share in shares.values()):
        raise Aborted("share", "join_seed", "a share is not an element of the field")
    secret = join({point: int.from_bytes(share, "big") for point, share in shares.items()})
    if secret >= 2 ** (8 * SEED_SIZE):
        raise Aborted("share", "join_seed", "the shares do not belong to one seed: at least one of them is wrong")
    return secret.to_bytes(SEED_SIZE, "big")


def is_field_element(share: bytes) -> bool:
    """Return whether bytes are the canonical encoding of a field element."""
    return len(share) == SHARE_SIZE and int.from_bytes(share, "big") < PRIME


def keystream(seed: bytes, buffer: bytearray) -> Fill:
    """Return a function that writes the next words of PRG(seed) to the buffer; they are valid until the next call."""
    encryptor = Cipher(algorithms.AES(derive(seed, b"", "stream")), modes.CTR(bytes(16))).encryptor()
    words = np.frombuffer(buffer, WORD, len(buffer) // 8)

    def fill(count: int) -> Words:
        encryptor.update_into(ZEROS[: 8 * count], buffer)
        return words[:count]

    return fill


def add_streams(
    start: Words, plus: Seeds = (), minus: Seeds = (), vectors: Sequence[Words] = (), out: Words | None = None
) -> Words:
    """Add streams and further vectors to a vector, and subtract other streams, modulo 2^64.

    Args:
        start: the vector; not modified.
        plus: seeds whose streams are added.
        minus: seeds whose streams are subtracted.
        vectors: further vectors to add.
        out: buffer for the result; a new vector by default.
    """
    buffer = bytearray(8 * min(PIECE_SIZE, start.size) + 16)
    signs = [(np.add, plus), (np.subtract, minus)]
    streams = [(combine, keystream(seed, buffer)) for combine, seeds in signs for seed in seeds]
    total = np.empty(start.size, np.uint64) if out is None else out
    for offset in range(0, start.size, PIECE_SIZE):
        piece = total[offset : offset + PIECE_SIZE]
        partial = start[offset : offset + PIECE_SIZE]
        for words in vectors:
            partial = np.add(partial, words[offset : offset + PIECE_SIZE], out=piece)
        for combine, fill in streams:
            partial = combine(partial, fill(piece.size), out=piece)
        if partial is not piece:  # there was nothing to add
            piece[:] = partial
    return total


def mask(words: Words, self_seed: bytes, index: int, pairs: Mapping[int, bytes], out: Words | None = None) -> Words:
    """Return y_k = x_k + PRG(b_k) + sum over j > k of PRG(s_kj) - sum over j < k of PRG(s_kj).

    Args:
        words: x_k; not modified.
        self_seed: b_k.
        index: k, the client's position in the roster.
        pairs: s_kj, keyed by j.
        out: buffer for y_k; a new vector by default.
    """
    plus = [self_seed, *(seed for member, seed in pairs.items() if member > index)]
    return add_streams(words, plus, [seed for member, seed in pairs.items() if member < index], out=out)


def unmask(uploads: Sequence[Words], self_seeds: Seeds, pairs: Mapping[tuple[int, int], bytes]) -> Words:
    """Return the sum of the survivors' x_k, given their y_k.

    Args:
        uploads: y_k of the survivors.
        self_seeds: b_k of the survivors.
        pairs: s_kd, keyed by (k, d), for each survivor k and each member d that dropped out.
    """
    plus = [seed for (survivor, lost), seed in pairs.items() if lost < survivor]
    minus = [*self_seeds, *(seed for (survivor, lost), seed in pairs.items() if lost > survivor)]
    return add_streams(uploads[0], plus, minus, uploads[1:])
