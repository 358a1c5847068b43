"""The server's signature on every message, which a client checks before it looks at anything else.

It travels before the bytes that are for one client alone, and covers them and the bytes that all clients get. So the
bytes for all stay the same for all, and their hash is what masks are bound to.
"""

import hashlib

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fedveil.errors import Aborted
from fedveil.secagg.identity import SIGNATURE, Identity
from fedveil.secagg.masks import LABEL, fields


def sign(server: Identity, common: bytes, own: bytes = b"") -> bytes:
    """What is sent to one client besides `common`: the server's signature, then `own`."""
    return server.sign(_covered(common, own)) + own


def admit(server: bytes, common: bytes, own: bytes) -> bytes:
    """The bytes behind the signature; if it is not that of the server whose key is given, Aborted."""
    signature, rest = own[:SIGNATURE], own[SIGNATURE:]
    try:
        Ed25519PublicKey.from_public_bytes(server).verify(signature, _covered(common, rest))
    except (InvalidSignature, ValueError):
        what = "the message is not signed by the server that this client's policy names"
        raise Aborted("server", "message", what, "look at `server` in the policy") from None
    return rest


def _covered(common: bytes, own: bytes) -> bytes:
    return fields(LABEL, "server", hashlib.sha256(common).digest(), own)
