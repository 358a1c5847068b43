"""The messages of the protocol, as typed values and as bytes. Nothing is pickled; sizes are checked before decoding.

A message consists of the length of its head (8 bytes), the head (JSON, padded to a multiple of 8 bytes), and raw bytes
whose number is determined by the head and the roster. Malformed messages raise BadArgument. Secrets are sent in M2
(encrypted), M4 and M6 (revealed on purpose); those messages have no repr.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fedveil.errors import BadArgument
from fedveil.secagg.fixed import CHECKS, MAX_EXPONENT, MIN_EXPONENT, Words
from fedveil.secagg.identity import KEY_SIZE, SIGNATURE_SIZE, JsonObject, check_member_name
from fedveil.secagg.masks import LABEL, SEALED_SIZE, SEED_SIZE, SHARE_SIZE, WORD, fields

FORMAT = 2
HASH_SIZE = 32
MAX_HEAD = 2**20
MAX_RUN_NAME = 200
MAX_MEMBERS = 10_000
MAX_COUNT = 2**53  # bound on rounds, attempts and steps; JSON parsers represent them exactly
MAX_WORDS = 2**36
HEAD_WORDS = 2  # words before the rows: the constant 1, and the client's number of records


@dataclass(frozen=True)
class Hello:
    """M0: a member's X25519 key for one run, signed by its identity."""

    run: str
    name: str
    key: bytes
    signature: bytes

    @staticmethod
    def signed_bytes(run: str, name: str, key: bytes) -> bytes:
        """Return the bytes that the signature covers."""
        return fields(LABEL, "hello", run, name, key)

    def proof(self, challenge: bytes) -> bytes:
        """Return the bytes that a member signs to prove that its hello is fresh."""
        return fields(LABEL, "proof", self.run, self.name, self.key, challenge)

    def values(self) -> JsonObject:
        """Return the fields as JSON values."""
        return {"run": self.run, "name": self.name, "key": self.key.hex(), "signature": self.signature.hex()}

    @classmethod
    def from_values(cls, values: object) -> "Hello":
        """Parse the result of `values`; raise BadArgument for anything else."""
        result = _Fields("hello", values)
        run, name = check_run_name("hello", result.get("run")), check_member_name("hello", result.get("name"))
        return cls(run, name, result.raw("key", KEY_SIZE), result.raw("signature", SIGNATURE_SIZE))


@dataclass(frozen=True)
class Opening:
    """The part of M1 that concerns secure aggregation: the members, the round and the attempt.

    Attributes:
        run: the run to which all the M0s belong.
        round: round of the federation.
        attempt: number of the attempt, strictly increasing over a run.
        roster: the M0s of the members that take part; a member's index is its position in this tuple.
        exponents: fixed-point exponent of each row.
        rows: number of values in each row.
        checks: whether check words follow the rows.
    """

    run: str
    round: int
    attempt: int
    roster: tuple[Hello, ...]
    exponents: tuple[int, ...]
    rows: tuple[int, ...]
    checks: bool = True

    @property
    def size(self) -> int:
        """The number of words that a client sends."""
        return HEAD_WORDS + sum(self.rows) + (CHECKS * len(self.rows) if self.checks else 0)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the members, in the order of the roster."""
        return tuple(hello.name for hello in self.roster)

    def values(self) -> JsonObject:
        """Return the fields as JSON values, to be sent in another message."""
        lists = {"exponents": list(self.exponents), "rows": list(self.rows)}
        return vars(self) | lists | {"roster": [hello.values() for hello in self.roster]}

    @classmethod
    def from_values(cls, values: object) -> "Opening":
        """Parse the result of `values`; raise BadArgument for anything else."""
        result = _Fields("opening", values)
        roster, checks = result.get("roster"), result.get("checks")
        if type(roster) is not list or not 0 < len(roster) <= MAX_MEMBERS:
            raise BadArgument("opening", f"its roster must be a list of 1 to {MAX_MEMBERS:,} members")
        exponents = result.integers("exponents", MIN_EXPONENT, MAX_EXPONENT)
        rows = result.integers("rows", 0, MAX_WORDS)
        if len(rows) != len(exponents) or sum(rows) > MAX_WORDS or type(checks) is not bool:
            raise BadArgument("opening", "its rows, exponents and checks are inconsistent")
        counts = result.count("round"), result.count("attempt")
        hellos = tuple(Hello.from_values(hello) for hello in roster)
        return cls(check_run_name("opening", result.get("run")), *counts, hellos, exponents, rows, checks)


@lru_cache(maxsize=8)
def context(opening: Opening, digest: bytes) -> bytes:
    """Hash the opening and H = SHA-256(M1): masks, keys, shares and signatures of an attempt are bound to the result.

    The published protocol uses only H. Including the opening ensures that clients with different rosters have nothing
    in common, even if the bytes that the caller hashed did not contain the roster.
    """
    if type(digest) is not bytes or len(digest) != HASH_SIZE:
        raise BadArgument("digest", f"it must be a SHA-256 digest of {HASH_SIZE} bytes")
    text = json.dumps(opening.values(), sort_keys=True)
    return hashlib.sha256(fields(LABEL, "context", text, digest)).digest()


@dataclass(frozen=True, repr=False)
class Upload:
    """M2: the masked words, encrypted shares of the self seed, and hashes that bind the client to them.

    Attributes:
        context: context of the attempt.
        commitments: hashes of the pair seeds and, at the client's own index, of the self seed, in the order of the
            roster.
        hashes: hashes of the shares, in the order of the roster.
        sealed: encrypted shares in the order of the roster, without the client's own.
        words: the masked words, y_k.
    """

    context: bytes
    commitments: tuple[bytes, ...]
    hashes: tuple[bytes, ...]
    sealed: tuple[bytes, ...]
    words: Words

    def to_bytes(self) -> bytes:
        """Encode the message."""
        words: list[bytes | memoryview] = [self.words.astype(WORD, copy=False).data]
        return pack("upload", {"context": self.context.hex()}, [*words, *self.commitments, *self.hashes, *self.sealed])

    @classmethod
    def from_bytes(cls, data: bytes, members: int, size: int) -> "Upload":
        """Decode an upload of `size` words for a roster with this number of members."""
        head, body = unpack(data, "upload", 8 * size + 2 * members * HASH_SIZE + (members - 1) * SEALED_SIZE)
        words = np.frombuffer(body[: 8 * size], WORD).astype(np.uint64, copy=False)
        remaining_bytes, block = body[8 * size :], members * HASH_SIZE
        hashes = _split(remaining_bytes[:block], HASH_SIZE), _split(remaining_bytes[block : 2 * block], HASH_SIZE)
        return cls(head.raw("context", HASH_SIZE), *hashes, _split(remaining_bytes[2 * block :], SEALED_SIZE), words)


@dataclass(frozen=True)
class Settle:
    """The part of M3 for all clients: the members whose vectors are summed."""

    context: bytes
    step: int
    members: tuple[str, ...]

    def signed_bytes(self) -> bytes:
        """Return the bytes that a client signs if it agrees: context (with run, attempt and H), step and members."""
        return fields(LABEL, "settled", self.context, self.step, *self.members)

    def values(self) -> JsonObject:
        """Return the fields as JSON values."""
        return {"context": self.context.hex(), "step": self.step, "members": list(self.members)}

    def to_bytes(self) -> bytes:
        """Encode the message."""
        return pack("settle", self.values())

    @classmethod
    def from_bytes(cls, data: bytes) -> "Settle":
        """Decode the message."""
        return unpack(data, "settle", 0)[0].settle()


def pack_dealt(sealed: Iterable[bytes], hashes: Iterable[bytes]) -> bytes:
    """Encode the part of M3 for one client at step 0: the encrypted shares that others dealt to it, and their hashes.

    Shares and hashes are in the order of the members.
    """
    return pack("sealed", {}, [*sealed, *hashes])


def unpack_dealt(data: bytes, count: int) -> list[tuple[bytes, bytes]]:
    """Decode the encrypted shares of `count` dealers, each share with its hash."""
    _, body = unpack(data, "sealed", count * (SEALED_SIZE + HASH_SIZE))
    return list(
        zip(
            _split(body[: count * SEALED_SIZE], SEALED_SIZE),
            _split(body[count * SEALED_SIZE :], HASH_SIZE),
            strict=True,
        )
    )


@dataclass(frozen=True, repr=False)
class SettleReply:
    """M4: a signature, the seeds of pairs with members that dropped out, and the dealers of unusable shares.

    Attributes:
        context: context of the attempt.
        step: the step of the M3 that this message answers.
        failed: dealers whose share the client cannot use.
        signature: signature of `Settle.signed_bytes`.
        seeds: seeds of the pairs with members that dropped out, in the order of the roster.
    """

    context: bytes
    step: int
    failed: tuple[str, ...]
    signature: bytes
    seeds: tuple[bytes, ...]

    def to_bytes(self) -> bytes:
        """Encode the message."""
        head = {"context": self.context.hex(), "step": self.step, "failed": list(self.failed)}
        return pack("settled", head, (self.signature, *self.seeds))

    @classmethod
    def from_bytes(cls, data: bytes, num_dropped: int) -> "SettleReply":
        """Decode a reply with the seeds of `num_dropped` members."""
        head, body = unpack(data, "settled", SIGNATURE_SIZE + num_dropped * SEED_SIZE)
        result = head.raw("context", HASH_SIZE), head.count("step"), head.names("failed")
        return cls(*result, bytes(body[:SIGNATURE_SIZE]), _split(body[SIGNATURE_SIZE:], SEED_SIZE))


@dataclass(frozen=True)
class Reveal:
    """M5: proof that enough clients agreed on the same members."""

    settle: Settle
    signatures: Mapping[str, bytes]

    def to_bytes(self) -> bytes:
        """Encode the message."""
        head = self.settle.values() | {"signers": list(self.signatures)}
        return pack("reveal", head, self.signatures.values())

    @classmethod
    def from_bytes(cls, data: bytes) -> "Reveal":
        """Decode the message."""
        head, body = unpack(data, "reveal")
        return cls(head.settle(), head.split_by_member("signers", body, SIGNATURE_SIZE))


@dataclass(frozen=True, repr=False)
class RevealReply:
    """M6: shares of the self seeds of the members whose vectors are summed, by dealer."""

    context: bytes
    shares: Mapping[str, bytes]

    def to_bytes(self) -> bytes:
        """Encode the message."""
        head = {"context": self.context.hex(), "dealers": list(self.shares)}
        return pack("revealed", head, self.shares.values())

    @classmethod
    def from_bytes(cls, data: bytes) -> "RevealReply":
        """Decode the message."""
        head, body = unpack(data, "revealed")
        return cls(head.raw("context", HASH_SIZE), head.split_by_member("dealers", body, SHARE_SIZE))


class _Fields:
    """The fields of a received JSON object; all accessors except `get` raise BadArgument if a field is malformed."""

    def __init__(self, kind: str, values: object) -> None:
        if type(values) is not dict:
            raise BadArgument(kind, "it is not a JSON object")
        self._kind, self._values = kind, values

    def get(self, name: str) -> object:
        """Return the value of a field without checking it; None if the field is missing."""
        return self._values.get(name)

    def raw(self, name: str, size: int) -> bytes:
        """Return bytes that were sent as lower-case hex."""
        text = self.get(name)
        if type(text) is not str or len(text) != 2 * size or not set(text) <= set("0123456789abcdef"):
            raise BadArgument(self._kind, f"{name} must be {size} bytes in hex")
        return bytes.fromhex(text)

    def count(self, name: str) -> int:
        """Return an integer of at least 0."""
        value = self.get(name)
        if type(value) is not int or not 0 <= value < MAX_COUNT:
            raise BadArgument(self._kind, f"{name} must be a nonnegative integer")
        return value

    def integers(self, name: str, minimum: int, maximum: int) -> tuple[int, ...]:
        """Return integers between two bounds."""
        result = self.get(name)
        if type(result) is not list or not all(type(value) is int and minimum <= value <= maximum for value in result):
            raise BadArgument(self._kind, f"{name} must be a list of integers from {minimum} to {maximum:,}")
        return tuple(result)

    def names(self, name: str) -> tuple[str, ...]:
        """Return distinct names; the caller checks that they are members."""
        result = self.get(name)
        if type(result) is not list or len(result) > MAX_MEMBERS or not all(type(item) is str for item in result):
            raise BadArgument(self._kind, f"{name} must be a list of at most {MAX_MEMBERS:,} names")
        if len(set(result)) != len(result):
            raise BadArgument(self._kind, f"{name} must not contain duplicates")
        return tuple(result)

    def settle(self) -> Settle:
        """Return the fields of M3."""
        return Settle(self.raw("context", HASH_SIZE), self.count("step"), self.names("members"))

    def split_by_member(self, field: str, body: memoryview, size: int) -> dict[str, bytes]:
        """Split raw bytes into equal blocks, one for each member listed in a field, and return them by member."""
        names = self.names(field)
        if len(body) != size * len(names):
            raise BadArgument(
                self._kind, f"expected {size * len(names)} bytes for {len(names)} {field}, got {len(body)}"
            )
        return dict(zip(names, _split(body, size), strict=True))


def pack(kind: str, values: JsonObject, body: Iterable[bytes | memoryview] = ()) -> bytes:
    """Encode a message from its head and raw bytes."""
    head = json.dumps({"format": FORMAT, "kind": kind, **values}).encode()
    head += b" " * (-len(head) % 8)
    return b"".join((len(head).to_bytes(8, "little"), head, *body))


def unpack(data: bytes, kind: str, size: int | None = None) -> tuple[_Fields, memoryview]:
    """Return the head and the raw bytes of a message of this kind; if `size` is given, require that many raw bytes."""
    if type(data) is not bytes or len(data) < 8:
        raise BadArgument(kind, "it is not a message")
    start = 8 + int.from_bytes(data[:8], "little")
    if start > min(len(data), MAX_HEAD):
        raise BadArgument(kind, "its head is longer than allowed")
    if size is not None and len(data) != start + size:
        raise BadArgument(kind, f"it must have {size:,} bytes after its head, got {len(data) - start:,}")
    try:
        head = json.loads(data[8:start])
    except (ValueError, RecursionError):
        raise BadArgument(kind, "its head is not JSON", "send the bytes that Fedveil encoded") from None
    result = _Fields(kind, head)
    if (result.get("kind"), result.get("format")) != (kind, FORMAT):
        problem = f"it is a different kind of message, or not in format {FORMAT}"
        raise BadArgument(kind, problem, "install the same version of Fedveil everywhere")
    return result, memoryview(data)[start:]


def check_run_name(where: str, run: object) -> str:
    """Check the name of a run and return it; raise BadArgument for anything else."""
    if type(run) is not str or not 0 < len(run) <= MAX_RUN_NAME or not run.isprintable():
        raise BadArgument(where, f"run must be printable text of 1 to {MAX_RUN_NAME} characters")
    return run


def _split(body: memoryview, size: int) -> tuple[bytes, ...]:
    raw = bytes(body)
    return tuple([raw[start : start + size] for start in range(0, len(raw), size)])
