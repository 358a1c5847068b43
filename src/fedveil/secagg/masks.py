"""What is derived from which secret, and the streams that hide a vector.

    pair       = X25519 of two members, agreed once per run
    s_kj       = HKDF-SHA256(pair, salt = context, info = ("mask", both names in order))
    share key  = HKDF-SHA256(pair, salt = context, info = ("share", from, to))
    PRG(seed)  = AES-256-CTR(HKDF-SHA256(seed, info = "stream")), as little-endian words
    commitment = SHA-256(context, seed)

The context is a hash over everything that a round's clients must have in common (`messages.context`): run, round,
attempt, roster, exponents and the whole broadcast. So two clients whose broadcasts differ in one bit have masks that do
not cancel, and no mask or key occurs twice. A seed is committed to and stretched under different labels, so that a
commitment says nothing about the stream.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedveil.errors import Aborted
from fedveil.secagg.fixed import Words
from fedveil.secagg.shares import SEED, WIDTH

LABEL = "fedveil secagg 1"
NONCE, TAG = 12, 16
SEALED = NONCE + WIDTH + TAG  # bytes of an encrypted share
PIECE = 2**15  # words that are worked on at a time: they and their stream stay in the cache
ZEROS = memoryview(bytes(8 * PIECE))
WORD = np.dtype("<u8")

Fill = Callable[[int], Words]


def fields(*parts: bytes | str | int) -> bytes:
    """Parts as bytes, each behind its length: no two lists of parts give the same."""
    raw = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    return b"".join(len(part).to_bytes(8, "big") + part for part in raw)


def derive(secret: bytes, salt: bytes, *info: bytes | str | int) -> bytes:
    """32 bytes from a secret, other ones for each salt and info."""
    return HKDF(SHA256(), SEED, salt, fields(LABEL, *info)).derive(secret)


def agree(own: X25519PrivateKey, key: bytes) -> bytes:
    """The secret that a member has in common with the owner of a public key."""
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(key))
    except ValueError:  # a point of small order
        raise Aborted("roster", "roster", "a member's key is of small order") from None


def pair_seed(pair: bytes, context: bytes, one: str, other: str) -> bytes:
    """The seed of the mask that two members have in common."""
    return derive(pair, context, "mask", *sorted((one, other)))


def share_key(pair: bytes, context: bytes, sender: str, receiver: str) -> bytes:
    """The key under which a share travels from one member to another."""
    return derive(pair, context, "share", sender, receiver)


def share_label(context: bytes, sender: str, receiver: str) -> bytes:
    """The associated data of an encrypted share."""
    return fields(LABEL, "share", context, sender, receiver)


def seal(share: bytes, pair: bytes, context: bytes, sender: str, receiver: str) -> bytes:
    """A share, encrypted from one member to another in one attempt."""
    nonce = os.urandom(NONCE)  # the key is used once; a random nonce holds even if a disk is set back
    key = AESGCM(share_key(pair, context, sender, receiver))
    return nonce + key.encrypt(nonce, share, share_label(context, sender, receiver))


def unseal(sealed: bytes, pair: bytes, context: bytes, sender: str, receiver: str) -> bytes | None:
    """The share, or None if it was not encrypted by this sender to this receiver in this attempt."""
    if len(sealed) != SEALED:
        return None
    key = AESGCM(share_key(pair, context, sender, receiver))
    try:
        return key.decrypt(sealed[:NONCE], sealed[NONCE:], share_label(context, sender, receiver))
    except InvalidTag:
        return None


def new_seed() -> bytes:
    """A fresh seed, from the operating system's entropy."""
    return os.urandom(SEED)


def commitment(seed: bytes, context: bytes) -> bytes:
    """What binds a client to a seed without showing it."""
    return hashlib.sha256(fields(LABEL, "commitment", context, seed)).digest()


class ShareHash:
    """The hash that binds a dealer to a share, and the member that gets the share to what it reveals."""

    def __init__(self, context: bytes, dealer: str) -> None:
        self._start = hashlib.sha256(fields(LABEL, "share hash", context, dealer))

    def __call__(self, share: bytes, place: int) -> bytes:
        """The hash of the share for the member at a place of the roster."""
        found = self._start.copy()
        found.update(place.to_bytes(8, "big") + share)
        return found.digest()


def proper_key(key: bytes) -> bool:
    """Whether an X25519 key agrees on a secret at all: a point of small order does not."""
    try:
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(key))
    except ValueError:
        return False
    return True


def keystream(seed: bytes, buffer: bytearray) -> Fill:
    """PRG(seed): a function that returns the next words of it, in the buffer, until the next call."""
    encryptor = Cipher(algorithms.AES(derive(seed, b"", "stream")), modes.CTR(bytes(16))).encryptor()
    words = np.frombuffer(buffer, WORD, PIECE)

    def fill(count: int) -> Words:
        encryptor.update_into(ZEROS[: 8 * count], buffer)
        return words[:count]

    return fill


def add_streams(
    start: Words,
    plus: Iterable[bytes] = (),
    minus: Iterable[bytes] = (),
    also: Sequence[Words] = (),
    out: Words | None = None,
) -> Words:
    """A vector, plus PRG of some seeds, minus PRG of others, plus further vectors, modulo 2^64, in one pass.

    Args:
        start: the vector; left as it is.
        plus: seeds whose streams are added.
        minus: seeds whose streams are subtracted.
        also: vectors that are added.
        out: where the result goes; a new vector by default.
    """
    buffer = bytearray(8 * PIECE + 16)
    added = [keystream(seed, buffer) for seed in plus]
    taken = [keystream(seed, buffer) for seed in minus]
    total = np.empty(start.size, np.uint64) if out is None else out
    for at in range(0, start.size, PIECE):
        piece = total[at : at + PIECE]
        so_far = start[at : at + PIECE]
        for words in also:
            so_far = np.add(so_far, words[at : at + PIECE], out=piece)
        for fill in added:
            so_far = np.add(so_far, fill(piece.size), out=piece)
        for fill in taken:
            so_far = np.subtract(so_far, fill(piece.size), out=piece)
        if so_far is not piece:  # there was nothing to add
            piece[:] = so_far
    return total


def mask(words: Words, own: bytes, place: int, pairs: Mapping[int, bytes], out: Words | None = None) -> Words:
    """y_k = x_k + PRG(b_k) + sum over j > k of PRG(s_kj) - sum over j < k of PRG(s_kj).

    Args:
        words: x_k; left as they are.
        own: b_k.
        place: k, in the roster's order.
        pairs: s_kj by j.
        out: where y_k goes; a new vector by default.
    """
    plus = [own, *(seed for other, seed in pairs.items() if other > place)]
    return add_streams(words, plus, [seed for other, seed in pairs.items() if other < place], out=out)


def unmask(uploads: Sequence[Words], own: Iterable[bytes], pairs: Mapping[tuple[int, int], bytes]) -> Words:
    """The sum of x_k, from the y_k of those who stayed.

    Args:
        uploads: y_k of those who stayed.
        own: b_k of those who stayed.
        pairs: s_kd by (k, d), for k who stayed and d who did not.
    """
    plus = [seed for (kept, lost), seed in pairs.items() if lost < kept]
    minus = [*own, *(seed for (kept, lost), seed in pairs.items() if lost > kept)]
    return add_streams(uploads[0], plus, minus, uploads[1:])
