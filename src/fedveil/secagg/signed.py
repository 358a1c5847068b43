"""The server's mark on every message, which a client checks before it looks at anything else.

A message to one client consists of bytes that all clients get and a few for this client alone. The mark precedes the
latter and covers both, so that the common bytes are identical for all clients, and masks are bound to their digest.

    signature   by the server's Ed25519 key, which the client's policy names
    tag         HMAC-SHA256 under a key that server and client agree on when the client says hello in reply to a signed
                message: as good as a signature for this client, at 1 % of the cost. No other member has the key.
"""

import hashlib
import hmac
from collections.abc import Iterable
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedveil.errors import Aborted
from fedveil.secagg.identity import SIGNATURE, Identity, is_signature
from fedveil.secagg.masks import LABEL, agree, derive, fields

SIGNED, TAGGED = b"s", b"t"
TAG = 32


class Digest(NamedTuple):
    """The digests of a message's head and of its tensors, which are hashed once."""

    head: bytes
    body: bytes

    @classmethod
    def compute(cls, common: bytes) -> "Digest":
        """Hash the bytes that all clients get."""
        start = 8 + int.from_bytes(common[:8], "little")
        return cls(hashlib.sha256(common[:start]).digest(), hashlib.sha256(memoryview(common)[start:]).digest())

    def combine(self) -> bytes:
        """Return the digest of the whole message, to which masks, shares and signatures are bound."""
        return hashlib.sha256(self.head + self.body).digest()


def channel(own: X25519PrivateKey, other: bytes, run: str) -> bytes:
    """Return the key of the tags between the server and one client in a run."""
    return derive(agree(own, other), b"", "server", run)


def sign(server: Identity, common: bytes, own: bytes = b"") -> bytes:
    """Mark a message to one client: return the server's signature, followed by `own`."""
    return SIGNED + server.sign(_covered_bytes(Digest.compute(common).combine(), own)) + own


def tag(key: bytes, digest: bytes, own: bytes = b"") -> bytes:
    """Mark a message to one client with a tag under its channel key; `digest` is that of the common bytes."""
    return TAGGED + hmac.digest(key, _covered_bytes(digest, own), "sha256") + own


def admit(server: bytes, channels: Iterable[bytes], digest: bytes, own: bytes) -> bytes:
    """Return the bytes behind the mark; abort if the mark is not the server's.

    Args:
        server: the server's public key.
        channels: keys of the tags of the runs that the client takes part in.
        digest: of the bytes that all clients get.
        own: the bytes that arrived for this client alone.
    """
    kind, size = own[:1], SIGNATURE if own[:1] == SIGNED else TAG
    mark, rest = own[1 : 1 + size], own[1 + size :]
    covered = _covered_bytes(digest, rest)
    if kind == TAGGED and any(hmac.compare_digest(mark, hmac.digest(key, covered, "sha256")) for key in channels):
        return rest
    if kind == SIGNED and is_signature(server, mark, covered):
        return rest
    what = "the message is not signed by the server that this client's policy names"
    raise Aborted("server", "message", what, "compare `server` in the policy with the server's public key") from None


def _covered_bytes(digest: bytes, own: bytes) -> bytes:
    return fields(LABEL, "message", digest, own)
