"""Signing keys, the roster of members that may take part, and the server's mark on every message.

A member creates an identity once (`fedveil keys new NAME`), keeps the file, and sends its roster line to the others
through a channel that the server does not control. The roster prevents a server from inventing clients.

A message to a client consists of bytes that all clients get and a few bytes for this client only. The mark precedes
the bytes for this client and covers both parts; a client checks it first. The common bytes are therefore identical for
all clients, and masks are bound to their digest.

    signature   made with the server's Ed25519 key, which the client's policy specifies
    tag         HMAC-SHA256 with a key that the server and the client agree on when the client says hello in reply to
                a signed message. No other member has the key, so the tag is as good as a signature for this client,
                and 100 times faster.
"""

import hashlib
import hmac
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedveil.errors import Aborted, BadArgument
from fedveil.files import OWNER, write_atomically
from fedveil.secagg.masks import LABEL, agree, derive, fields

KEY_SIZE = 32  # size of a private or public key in bytes
SIGNATURE_SIZE = 64
TAG_SIZE = 32
SIGNED, TAGGED = b"s", b"t"  # the first byte of a mark
MAX_FILE_SIZE = 2**26
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
HEX = re.compile(r"[0-9a-f]{64}")
JsonObject = dict[str, Any]  # type: ignore[explicit-any]
IDENTITY = """# The signing key of one member. Keep it on this machine; `fedveil keys show` prints the public part.
name = "{name}"
private = "{private}"
"""
ROSTER = "# The members that may take part, one per line: name and public key (from `fedveil keys show FILE`)\n"


def check_member_name(where: str, name: object) -> str:
    """Check a member's name and return it; raise BadArgument for anything else."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        problem = "a member's name must have 1 to 64 letters, digits or . _ @ - and begin with a letter or digit"
        raise BadArgument(where, problem)
    return name


def read_private_file(path: Path) -> str:
    """Return the text of a file that only its owner can read or change; refuse any other file."""
    return _read_file(path, 0o077, "others can read or change this private file", f"chmod 600 {path}")


def read_trusted_file(path: Path) -> str:
    """Return the text of a file that only its owner can change; refuse any other file."""
    problem = "others can change this file, which determines whom this machine trusts"
    return _read_file(path, 0o022, problem, f"chmod 644 {path}")


def _read_file(path: Path, forbidden_bits: int, problem: str, fix: str) -> str:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if os.name == "posix" and status.st_mode & forbidden_bits:
                raise BadArgument(str(path), f"{problem} (mode {stat.S_IMODE(status.st_mode):o})", f"run {fix}")
            if os.name == "posix" and status.st_uid not in (os.geteuid(), 0):
                problem = f"it belongs to another user (uid {status.st_uid})"
                raise BadArgument(str(path), problem, f"change its owner, then run {fix}")
            return file.read(MAX_FILE_SIZE).decode()
    except OSError as error:
        raise BadArgument(str(path), f"cannot be read: {error.strerror or type(error).__name__}") from None
    except UnicodeDecodeError:
        raise BadArgument(str(path), "is not a text file") from None


def parse_toml(path: Path, text: str) -> JsonObject:
    """Parse the text of a TOML file; errors do not quote it."""
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        problem = f"is not TOML: {type(error).__name__}"
        raise BadArgument(str(path), problem, "correct or replace the file") from None


def is_signature(key: Ed25519PublicKey | bytes, signature: bytes, message: bytes) -> bool:
    """Return whether the owner of a public key signed a message."""
    try:
        public = Ed25519PublicKey.from_public_bytes(key) if isinstance(key, bytes) else key
        public.verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


class SecretHolder:
    """An object that contains secrets. It cannot be pickled or copied, and its repr shows at most its name."""

    name = ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})" if self.name else f"{type(self).__name__}()"

    def __reduce__(self) -> str:
        raise BadArgument(
            type(self).__name__, "secrets cannot be pickled or copied", "create the object where it is used"
        )


class Identity(SecretHolder):
    """A member's name and Ed25519 key."""

    def __init__(self, name: str, key: Ed25519PrivateKey) -> None:
        self.name = check_member_name("Identity", name)
        self._key = key

    @classmethod
    def new(cls, name: str) -> "Identity":
        """Generate a new key from the operating system's entropy."""
        return cls(name, Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: Path) -> "Identity":
        """Load a file written by `save`; refuse a file that others can read."""
        result = parse_toml(path, read_private_file(path))
        name, private = result.get("name"), result.get("private")
        if not isinstance(private, str) or not HEX.fullmatch(private):
            raise BadArgument(str(path), "is not an identity file", "run fedveil keys new NAME")
        return cls(check_member_name(str(path), name), Ed25519PrivateKey.from_private_bytes(bytes.fromhex(private)))

    def save(self, path: Path) -> Path:
        """Write the private key to a new file that only its owner can read."""
        private = self._key.private_bytes_raw().hex()
        return write_atomically(path, IDENTITY.format(name=self.name, private=private), OWNER, new=True)

    def public(self) -> bytes:
        """Return the public key, 32 bytes."""
        return self._key.public_key().public_bytes_raw()

    def sign(self, message: bytes) -> bytes:
        """Return the signature of a message, 64 bytes."""
        return self._key.sign(message)

    def line(self) -> str:
        """Return the member's line in a roster."""
        return f"{self.name} {self.public().hex()}"


class Roster:
    """The members that may take part, by name, with their public keys."""

    def __init__(self, members: Mapping[str, bytes]) -> None:
        for name, key in members.items():
            check_member_name("Roster", name)
            if type(key) is not bytes or len(key) != KEY_SIZE:
                raise BadArgument("Roster", f"the public key of {name} must have {KEY_SIZE} bytes")
        if len(set(members.values())) != len(members):
            raise BadArgument("Roster", "two members have the same public key")
        self._members = dict(members)
        self._keys: dict[str, Ed25519PublicKey] = {}  # parsed on first use

    def __repr__(self) -> str:
        return f"Roster({', '.join(self.names)})"

    @classmethod
    def read(cls, path: Path) -> "Roster":
        """Read a text file with one member per line: a name and a public key in hex. # starts a comment.

        A file that others can change is refused.
        """
        members: dict[str, bytes] = {}
        for number, line in enumerate(read_trusted_file(path).splitlines(), 1):
            words, where = line.partition("#")[0].split(), f"{path}, line {number}"
            if not words:
                continue
            if len(words) != 2 or not HEX.fullmatch(words[1]):
                raise BadArgument(where, "a line must contain a name and a public key of 64 hexadecimal digits")
            if check_member_name(where, words[0]) in members:
                raise BadArgument(where, f"{words[0]} is listed twice")
            members[words[0]] = bytes.fromhex(words[1])
        return cls(members)

    def write(self, path: Path) -> Path:
        """Write a file that `read` accepts."""
        lines = "".join(f"{name} {key.hex()}\n" for name, key in self._members.items())
        return write_atomically(path, ROSTER + lines, 0o644)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all members, in the order of the file."""
        return tuple(self._members)

    def public_key(self, name: str) -> bytes:
        """Return a member's public key; raise BadArgument if the roster does not contain the name."""
        if name not in self._members:
            raise BadArgument("roster", f"it does not contain {name!r}")
        return self._members[name]

    def verifies(self, name: str, signature: bytes, message: bytes) -> bool:
        """Return whether a member of the roster signed a message; False for anyone else."""
        try:
            if name not in self._keys:
                self._keys[name] = Ed25519PublicKey.from_public_bytes(self._members[name])
        except (KeyError, ValueError):
            return False
        return is_signature(self._keys[name], signature, message)


class Digest(NamedTuple):
    """The digests of a message's head and of its tensors, which are hashed only once."""

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


def channel_key(private: X25519PrivateKey, public: bytes, run: str) -> bytes:
    """Return the key for tags between the server and one client in a run."""
    return derive(agree(private, public), b"", "server", run)


def sign_message(server: Identity, common: bytes, extra: bytes = b"") -> bytes:
    """Sign a message to one client; return the signature, followed by `extra`, the bytes for this client."""
    return SIGNED + server.sign(_covered_bytes(Digest.compute(common).combine(), extra)) + extra


def tag_message(key: bytes, digest: bytes, extra: bytes = b"") -> bytes:
    """Tag a message, given its digest, with a client's channel key; return the tag, followed by `extra`."""
    return TAGGED + hmac.digest(key, _covered_bytes(digest, extra), "sha256") + extra


def admit_message(server: bytes, channels: Iterable[bytes], digest: bytes, extra: bytes) -> bytes:
    """Return the bytes after the mark; abort if the mark is not the server's.

    Args:
        server: the server's public key.
        channels: keys for the tags in the runs that the client takes part in.
        digest: digest of the bytes that all clients get.
        extra: the received bytes for this client only.
    """
    first_byte, size = extra[:1], SIGNATURE_SIZE if extra[:1] == SIGNED else TAG_SIZE
    mark, client_bytes = extra[1 : 1 + size], extra[1 + size :]
    signed_bytes = _covered_bytes(digest, client_bytes)
    if first_byte == TAGGED and any(
        hmac.compare_digest(mark, hmac.digest(key, signed_bytes, "sha256")) for key in channels
    ):
        return client_bytes
    if first_byte == SIGNED and is_signature(server, mark, signed_bytes):
        return client_bytes
    problem = "the message is not signed by the server in this client's policy"
    raise Aborted("server", "message", problem, "compare `server` in the policy with the server's public key") from None


def _covered_bytes(digest: bytes, extra: bytes) -> bytes:
    return fields(LABEL, "message", digest, extra)
