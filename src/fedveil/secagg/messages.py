"""What travels, as typed values and as bytes. Nothing is pickled; sizes are checked before anything is read.

A message is the length of its head (8 bytes), the head (JSON, padded to a multiple of 8 bytes), and raw bytes whose
number follows from the head and the roster. Whatever cannot be read is a BadArgument. Secrets travel in M2 (encrypted),
M4 and M6 (opened on purpose); those messages have no repr.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedveil.errors import BadArgument
from fedveil.secagg.fixed import CHECKS, HIGHEST, LOWEST, Words
from fedveil.secagg.identity import KEY, SIGNATURE, named
from fedveil.secagg.masks import LABEL, SEALED, WORD, fields
from fedveil.secagg.shares import SEED, WIDTH

FORMAT = 2
HASH = 32
LONGEST_HEAD = 2**20
LONGEST_RUN = 200
MOST_MEMBERS = 10_000
MOST_COUNT = 2**53  # of rounds, attempts and steps: what JSON holds everywhere
MOST_WORDS = 2**36
HEAD = 2  # words before the rows: 1 for each client, and its records

Values = dict[str, Any]


@dataclass(frozen=True)
class Hello:
    """M0: a member's X25519 key for one run, signed by its identity."""

    run: str
    name: str
    key: bytes
    signature: bytes

    @staticmethod
    def signed(run: str, name: str, key: bytes) -> bytes:
        """What the signature covers."""
        return fields(LABEL, "hello", run, name, key)

    def proof(self, challenge: bytes) -> bytes:
        """The bytes that a member signs to show that it says hello now."""
        return fields(LABEL, "proof", self.run, self.name, self.key, challenge)

    def values(self) -> Values:
        """For JSON."""
        return {"run": self.run, "name": self.name, "key": self.key.hex(), "signature": self.signature.hex()}

    @classmethod
    def from_values(cls, values: object) -> "Hello":
        """The inverse of `values`; anything else is a BadArgument."""
        found = _object("hello", values)
        key, signature = _raw("hello", found, "key", KEY), _raw("hello", found, "signature", SIGNATURE)
        return cls(named_run("hello", found.get("run")), named("hello", found.get("name")), key, signature)


@dataclass(frozen=True)
class Opening:
    """The part of M1 that concerns secure aggregation: who takes part, in which attempt of which round.

    Attributes:
        run: the run that all the M0s are for.
        round: of the federation.
        attempt: strictly increasing over a run.
        roster: the M0s of those who take part; their order gives every member its place.
        exponents: of the fixed point, one for each row.
        rows: how many values each row has.
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
        """How many words a client sends."""
        return HEAD + sum(self.rows) + (CHECKS * len(self.rows) if self.checks else 0)

    @property
    def names(self) -> tuple[str, ...]:
        """Those who take part, in order."""
        return tuple(hello.name for hello in self.roster)

    def values(self) -> Values:
        """For JSON, so that it can travel in another message."""
        hellos = [hello.values() for hello in self.roster]
        own: Values = {"run": self.run, "round": self.round, "attempt": self.attempt}
        own |= {"exponents": list(self.exponents), "rows": list(self.rows), "checks": self.checks}
        return own | {"roster": hellos}

    @classmethod
    def from_values(cls, values: object) -> "Opening":
        """The inverse of `values`; anything else is a BadArgument."""
        found = _object("opening", values)
        roster = found.get("roster")
        if type(roster) is not list or not 0 < len(roster) <= MOST_MEMBERS:
            raise BadArgument("opening", f"its roster must be a list of 1 to {MOST_MEMBERS:,} members")
        exponents = _integers("opening", found, "exponents", LOWEST, HIGHEST)
        rows = _integers("opening", found, "rows", 0, MOST_WORDS)
        if len(rows) != len(exponents) or sum(rows) > MOST_WORDS or type(found.get("checks")) is not bool:
            raise BadArgument("opening", "its rows, exponents and checks do not belong together")
        counts = _count("opening", found, "round"), _count("opening", found, "attempt")
        hellos = tuple(Hello.from_values(hello) for hello in roster)
        return cls(named_run("opening", found.get("run")), *counts, hellos, exponents, rows, found["checks"])


def context(opening: Opening, digest: bytes) -> bytes:
    """What masks, keys, shares and signatures of an attempt are bound to: the opening, and H = SHA-256(M1).

    Differs from the protocol on paper: H alone is bound there. The opening goes in besides, so that clients whose
    rosters differ have nothing in common even if what the caller hashed did not hold the roster.
    """
    if type(digest) is not bytes or len(digest) != HASH:
        raise BadArgument("digest", f"it must be the {HASH} bytes of SHA-256")
    text = json.dumps(opening.values(), sort_keys=True)
    return hashlib.sha256(fields(LABEL, "context", text, digest)).digest()


@dataclass(frozen=True, repr=False)
class Upload:
    """M2: the masked words, encrypted shares of the self seed, and hashes that bind the client to them.

    Attributes:
        context: of the attempt.
        commitments: in the roster's order; at the client's own place that of its self seed, elsewhere of pair seeds.
        hashes: of the shares, in the roster's order.
        sealed: encrypted shares in the roster's order, without the client's own.
        words: y_k.
    """

    context: bytes
    commitments: tuple[bytes, ...]
    hashes: tuple[bytes, ...]
    sealed: tuple[bytes, ...]
    words: Words

    def to_bytes(self) -> bytes:
        """The message."""
        words: list[bytes | memoryview] = [self.words.astype(WORD, copy=False).data]
        return pack("upload", {"context": self.context.hex()}, [*words, *self.commitments, *self.hashes, *self.sealed])

    @classmethod
    def from_bytes(cls, data: bytes, members: int, size: int) -> "Upload":
        """An upload of `size` words, for a roster of `members`."""
        head, body = unpack(data, "upload", 8 * size + 2 * members * HASH + (members - 1) * SEALED)
        words = np.frombuffer(body[: 8 * size], WORD).astype(np.uint64, copy=False)
        rest, block = body[8 * size :], members * HASH
        return cls(
            _raw("upload", head, "context", HASH),
            _cut(rest[:block], HASH),
            _cut(rest[block : 2 * block], HASH),
            _cut(rest[2 * block :], SEALED),
            words,
        )


@dataclass(frozen=True)
class Settle:
    """M3, the part for all: whom the sum is over."""

    context: bytes
    step: int
    members: tuple[str, ...]

    def signed(self) -> bytes:
        """What a client signs if it agrees: context (and in it run, attempt and H), step and members."""
        return fields(LABEL, "settled", self.context, self.step, *self.members)

    def to_bytes(self) -> bytes:
        """The message."""
        return pack("settle", _settle_values(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Settle":
        """The inverse."""
        return _settle_from("settle", unpack(data, "settle", 0)[0])


@dataclass(frozen=True, repr=False)
class Settled:
    """M4: a signature, the pair seeds with those outside, and whose share is no good.

    Attributes:
        context: of the attempt.
        step: as in M3.
        failed: dealers whose share the client cannot decrypt.
        signature: over `Settle.signed`.
        seeds: of the pairs with those outside, in the roster's order.
    """

    context: bytes
    step: int
    failed: tuple[str, ...]
    signature: bytes
    seeds: tuple[bytes, ...]

    def to_bytes(self) -> bytes:
        """The message."""
        head = {"context": self.context.hex(), "step": self.step, "failed": list(self.failed)}
        return pack("settled", head, (self.signature, *self.seeds))

    @classmethod
    def from_bytes(cls, data: bytes, outside: int) -> "Settled":
        """An answer with seeds for this many members outside."""
        head, body = unpack(data, "settled", SIGNATURE + outside * SEED)
        found = _raw("settled", head, "context", HASH), _count("settled", head, "step")
        return cls(*found, _names("settled", head, "failed"), bytes(body[:SIGNATURE]), _cut(body[SIGNATURE:], SEED))


@dataclass(frozen=True)
class Reveal:
    """M5: proof that enough clients agreed on the same members."""

    settle: Settle
    signatures: Mapping[str, bytes]

    def to_bytes(self) -> bytes:
        """The message."""
        head = _settle_values(self.settle) | {"signers": list(self.signatures)}
        return pack("reveal", head, tuple(self.signatures.values()))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Reveal":
        """The inverse."""
        head, body = unpack(data, "reveal")
        signers = _names("reveal", head, "signers")
        if len(body) != SIGNATURE * len(signers):
            raise BadArgument("reveal", f"it has {len(body)} bytes for {len(signers)} signatures")
        return cls(_settle_from("reveal", head), dict(zip(signers, _cut(body, SIGNATURE), strict=True)))


@dataclass(frozen=True, repr=False)
class Revealed:
    """M6: shares of the self seeds of those whom the sum is over, by dealer."""

    context: bytes
    shares: Mapping[str, bytes]

    def to_bytes(self) -> bytes:
        """The message."""
        head = {"context": self.context.hex(), "dealers": list(self.shares)}
        return pack("revealed", head, tuple(self.shares.values()))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Revealed":
        """The inverse."""
        head, body = unpack(data, "revealed")
        dealers = _names("revealed", head, "dealers")
        if len(body) != WIDTH * len(dealers):
            raise BadArgument("revealed", f"it has {len(body)} bytes for {len(dealers)} shares")
        return cls(_raw("revealed", head, "context", HASH), dict(zip(dealers, _cut(body, WIDTH), strict=True)))


def pack(kind: str, values: Mapping[str, Any], body: Iterable[bytes | memoryview] = ()) -> bytes:
    """A message."""
    head = json.dumps({"format": FORMAT, "kind": kind, **values}).encode()
    head += b" " * (-len(head) % 8)
    return b"".join((len(head).to_bytes(8, "little"), head, *body))


def unpack(data: bytes, kind: str, size: int | None = None) -> tuple[Values, memoryview]:
    """The head and the raw bytes of a message of that kind, of which there must be `size` if that is known."""
    if type(data) is not bytes or len(data) < 8:
        raise BadArgument(kind, "it is no message")
    start = 8 + int.from_bytes(data[:8], "little")
    if start > min(len(data), LONGEST_HEAD):
        raise BadArgument(kind, "its head is longer than it may be")
    if size is not None and len(data) != start + size:
        raise BadArgument(kind, f"it must have {size:,} bytes behind its head, got {len(data) - start:,}")
    try:
        head = json.loads(data[8:start])
    except (ValueError, RecursionError):
        raise BadArgument(kind, "its head is no JSON", "send what fedveil wrote") from None
    found = _object(kind, head)
    if (found.get("kind"), found.get("format")) != (kind, FORMAT):
        raise BadArgument(kind, f"it is another message, or not in format {FORMAT}", "the same fedveil everywhere")
    return found, memoryview(data)[start:]


def _settle_values(settle: Settle) -> Values:
    return {"context": settle.context.hex(), "step": settle.step, "members": list(settle.members)}


def _settle_from(kind: str, head: Values) -> Settle:
    return Settle(_raw(kind, head, "context", HASH), _count(kind, head, "step"), _names(kind, head, "members"))


def _object(where: str, values: object) -> Values:
    if type(values) is not dict:
        raise BadArgument(where, "it is no JSON object")
    return values


def _raw(where: str, values: Values, name: str, size: int) -> bytes:
    """Bytes that travel as lower-case hex."""
    text = values.get(name)
    if type(text) is not str or len(text) != 2 * size or not set(text) <= set("0123456789abcdef"):
        raise BadArgument(where, f"{name} must be {size} bytes in hex")
    return bytes.fromhex(text)


def _count(where: str, values: Values, name: str) -> int:
    value = values.get(name)
    if type(value) is not int or not 0 <= value < MOST_COUNT:
        raise BadArgument(where, f"{name} must be an integer of at least 0")
    return value


def _integers(where: str, values: Values, name: str, least: int, most: int) -> tuple[int, ...]:
    found = values.get(name)
    if type(found) is not list or not all(type(each) is int and least <= each <= most for each in found):
        raise BadArgument(where, f"{name} must be a list of integers from {least} to {most:,}")
    return tuple(found)


def named_run(where: str, run: object) -> str:
    """The name of a run, or BadArgument."""
    if type(run) is not str or not 0 < len(run) <= LONGEST_RUN or not run.isprintable():
        raise BadArgument(where, f"run must be a printable text of 1 to {LONGEST_RUN} characters")
    return run


def _names(where: str, values: Values, name: str) -> tuple[str, ...]:
    """Names, none of them twice; whoever uses them looks whether they are those of members."""
    found = values.get(name)
    if type(found) is not list or len(found) > MOST_MEMBERS:
        raise BadArgument(where, f"{name} must be a list of names")
    if not all(type(item) is str for item in found) or len(set(found)) != len(found):
        raise BadArgument(where, f"{name} must be a list of names, none of them twice")
    return tuple(found)


def _cut(body: memoryview, size: int) -> tuple[bytes, ...]:
    raw = bytes(body)
    return tuple([raw[at : at + size] for at in range(0, len(raw), size)])


def sealed_bytes(shares: Sequence[bytes], hashes: Sequence[bytes]) -> bytes:
    """M3, the part for one client: the shares that the others dealt to it and their hashes, in the members' order."""
    return pack("sealed", {}, [*shares, *hashes])


def sealed_from(data: bytes, count: int) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """The inverse for this many dealers: encrypted shares, and their hashes."""
    body = unpack(data, "sealed", count * (SEALED + HASH))[1]
    return _cut(body[: count * SEALED], SEALED), _cut(body[count * SEALED :], HASH)
