"""The server's mark on every message, which a client checks before it looks at anything else.

A message to one client is the bytes that all clients get, and a few for it alone. The mark comes before the latter and
covers both, so that the bytes for all stay the same for all, and their digest is what masks are bound to.

    signature   by the server's Ed25519 key, which the client's policy names
    tag         HMAC-SHA256 under a key that the two agree on when the client says hello, to a signed message: as good
                as a signature for this client, and a hundredth of its price. No other member has that key.
"""

import hashlib
import hmac
from collections.abc import Iterable
from typing import NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedveil.errors import Aborted
from fedveil.secagg.identity import SIGNATURE, Identity
from fedveil.secagg.masks import LABEL, agree, derive, fields

SIGNED, TAGGED = b"s", b"t"
TAG = 32


class Digest(NamedTuple):
    """The digests of a message's head and of its tensors, which are hashed once."""

    head: bytes
    body: bytes

    @classmethod
    def of(cls, common: bytes) -> "Digest":
        """Those of the bytes that all clients get."""
        start = 8 + int.from_bytes(common[:8], "little")
        return cls(hashlib.sha256(common[:start]).digest(), hashlib.sha256(memoryview(common)[start:]).digest())

    def whole(self) -> bytes:
        """That of the message: what masks, shares and signatures are bound to."""
        return hashlib.sha256(self.head + self.body).digest()


def channel(own: X25519PrivateKey, other: bytes, run: str) -> bytes:
    """The key of the tags between the server and one client in a run."""
    return derive(agree(own, other), b"", "server", run)


def sign(server: Identity, common: bytes, own: bytes = b"") -> bytes:
    """Mark a message to one client: the server's signature, then `own`."""
    return SIGNED + server.sign(_covered(Digest.of(common).whole(), own)) + own


def tag(key: bytes, digest: bytes, own: bytes = b"") -> bytes:
    """Mark a message to one client with a tag under its channel key; `digest` is that of the bytes for all."""
    return TAGGED + hmac.digest(key, _covered(digest, own), "sha256") + own


def admit(server: bytes, channels: Iterable[bytes], digest: bytes, own: bytes) -> bytes:
    """The bytes behind the mark; Aborted if it is not the server's.

    Args:
        server: the server's public key.
        channels: keys of the tags of the runs that the client takes part in.
        digest: of the bytes that all clients get.
        own: what arrived for this client alone.
    """
    kind, size = own[:1], SIGNATURE if own[:1] == SIGNED else TAG
    mark, rest = own[1 : 1 + size], own[1 + size :]
    covered = _covered(digest, rest)
    if kind == TAGGED and any(hmac.compare_digest(mark, hmac.digest(key, covered, "sha256")) for key in channels):
        return rest
    if kind == SIGNED and _verifies(server, mark, covered):
        return rest
    what = "the message is not signed by the server that this client's policy names"
    raise Aborted("server", "message", what, "look at `server` in the policy") from None


def _verifies(server: bytes, signature: bytes, covered: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(server).verify(signature, covered)
    except (InvalidSignature, ValueError):
        return False
    return True


def _covered(digest: bytes, own: bytes) -> bytes:
    return fields(LABEL, "message", digest, own)
