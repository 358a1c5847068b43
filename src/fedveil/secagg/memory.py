"""A client's memory from one message to the next: its key of a run, what it has done with it, what it opened.

The X25519 key and the last attempt live together: a key without its counter would mask twice with the same streams.
Both are written before an answer leaves, so that a client that is killed and started again refuses what it has answered
already. Counters of a run only grow, also when its key is replaced.

Keys die. A key is replaced after some rounds or hours (`Policy`), and one that is older is removed, while the counters
of its run stay. A run that has ended leaves a tombstone: its name is never accepted again. The table of runs is
bounded, and a full one refuses new runs rather than forget old ones.

Differs from the protocol on paper: the memory also holds the attempt that is under way (shares, members left), since a
client may be a new process for every message, and one process at a time may use it: two at once could be shown two
lists of members.
"""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from filelock import FileLock, Timeout

from fedveil.errors import Aborted, BadArgument
from fedveil.files import OWNER, refusals, write_whole
from fedveil.secagg.identity import KEY, named, read_private
from fedveil.secagg.messages import HASH
from fedveil.secagg.shares import WIDTH

FORMAT = 2
MOST_RUNS = 1024  # that a memory knows, tombstones included
MOST_SUMS = 1000  # opened sums of which the broadcast and the members are kept
SHORT = 16  # bytes of a digest that is kept
Values = dict[str, Any]


@dataclass(repr=False)
class Current:
    """The attempt that is under way.

    Attributes:
        context: of the attempt.
        round: of the federation.
        subject: digest of what the sum is about: the broadcast, and which records take part.
        names: of all who take part, in the roster's order.
        keys: their X25519 keys.
        own: the client's share of its own seed.
        step: the last step of settling that it answered; -1 before the first.
        members: whom it agreed to last; all before the first step.
        shares: that others dealt to it, by dealer.
    """

    context: bytes
    round: int
    subject: bytes
    names: tuple[str, ...]
    keys: tuple[bytes, ...]
    own: bytes
    step: int = -1
    members: tuple[str, ...] = ()
    shares: dict[str, bytes] = field(default_factory=dict)


@dataclass(repr=False)
class Kept:
    """The part of the memory for one run.

    Attributes:
        key: the private key; empty once it is gone.
        created: when, in seconds since 1970 by the client's clock.
        uses: attempts that the key was used in.
        attempt, round: of the last opening that was admitted.
        revealed: the last round in which it revealed.
        sums: how many sums it has helped to open.
        server: the server's X25519 key of the run; empty without.
        current: the attempt that is under way.
    """

    key: bytes
    created: int
    uses: int = 0
    attempt: int = -1
    round: int = -1
    revealed: int = -1
    sums: int = 0
    server: bytes = b""
    current: Current | None = None

    def private(self) -> X25519PrivateKey:
        """The key itself."""
        return X25519PrivateKey.from_private_bytes(self.key)

    def public(self) -> bytes:
        """The public half."""
        return self.private().public_key().public_bytes_raw()


@dataclass(repr=False)
class State:
    """Everything that a client remembers.

    Attributes:
        member: whose memory it is.
        runs: by name.
        ended: short digests of the names of runs that have ended.
        day: of the last opened sum, in days since 1970, and how many were opened on it.
        opened: subject and members of the last opened sums, as short digests behind one another: read in every turn,
            searched only before a sum is opened.
    """

    member: str | None = None
    runs: dict[str, Kept] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    day: tuple[int, int] = (0, 0)
    opened: str = ""

    def members_of(self, subject: str) -> list[str]:
        """The members over whom sums on a subject were opened."""
        size = 4 * SHORT  # characters of two digests
        found = [self.opened[at : at + size] for at in range(0, len(self.opened), size)]
        return [each[2 * SHORT :] for each in found if each.startswith(subject)]

    def remember_sum(self, subject: str, members: str) -> None:
        """Remember an opened sum; the oldest is forgotten once there are too many."""
        if members not in self.members_of(subject):
            self.opened = (self.opened + subject + members)[-4 * SHORT * MOST_SUMS :]

    def end(self, run: str) -> None:
        """Forget a run's key, and never accept the run again."""
        if self.runs.pop(run, None) is not None:
            self.ended.append(short(run.encode()))

    def has_ended(self, run: str) -> bool:
        """Whether there is a tombstone of a run."""
        return short(run.encode()) in self.ended

    def full(self) -> bool:
        """Whether the table of runs is full."""
        return len(self.runs) + len(self.ended) >= MOST_RUNS

    def sums_on(self, day: int) -> int:
        """Sums that were opened on a day."""
        return self.day[1] if day == self.day[0] else 0


def short(data: bytes) -> str:
    """A digest as it is kept."""
    return hashlib.sha256(data).digest()[:SHORT].hex()


class Turn:
    """The memory while one call uses it: changes count once they are written."""

    def __init__(self, memory: "Memory", state: State) -> None:
        self._memory, self.state = memory, state

    def write(self) -> None:
        """Keep what was changed, on disk if the memory has a file."""
        self._memory._write(_to_text(self.state))


class Memory:
    """A client's memory: in a file that only its owner can read, or in this process. It shows nothing of itself.

    Args:
        path: of the file; without it the memory ends with the process, and the next one has a new key.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._text = ""
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return "Memory()"

    def __reduce__(self) -> str:
        raise BadArgument("Memory", "private keys are not pickled", "Memory(path)")

    def packed(self) -> bytes:
        """The whole memory as bytes, for a client whose state is kept elsewhere. They hold private keys."""
        return self._read().encode()

    @classmethod
    def unpacked(cls, data: bytes) -> "Memory":
        """A memory in this process, from what `packed` gave."""
        memory = cls()
        with contextlib.suppress(UnicodeDecodeError):
            memory._text = data.decode("ascii")
        _from_text("memory", memory._text)
        return memory

    @contextlib.contextmanager
    def turn(self) -> Iterator[Turn]:
        """The memory for one call alone; what is not written is forgotten. In use elsewhere: Aborted."""
        if not self._lock.acquire(blocking=False):
            raise Aborted("busy", "memory", "another thread uses this client's memory")
        try:
            with self._alone():
                yield Turn(self, _from_text(str(self._path or "memory"), self._read()))
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if self._path is None:
            yield
            return
        with refusals(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self._path.with_name(self._path.name + ".lock"), timeout=0, mode=OWNER)
            try:
                lock.acquire()
            except Timeout:
                raise Aborted("busy", "memory", "another process uses this client's memory") from None
        try:
            yield
        finally:
            lock.release()

    def _read(self) -> str:
        if self._path is None:
            return self._text
        return read_private(self._path) if self._path.exists() else ""

    def _write(self, text: str) -> None:
        if self._path is None:
            self._text = text
        else:
            write_whole(self._path, text, OWNER)


def _to_text(state: State) -> str:
    runs = {run: _kept_values(found) for run, found in state.runs.items()}
    values: Values = {"format": FORMAT, "member": state.member, "day": state.day, "opened": state.opened}
    return json.dumps(values | {"ended": state.ended, "runs": runs})


def _kept_values(kept: Kept) -> Values:
    now = kept.current
    own: Values = {"key": kept.key.hex(), "created": kept.created, "uses": kept.uses, "sums": kept.sums}
    own |= {"attempt": kept.attempt, "round": kept.round, "revealed": kept.revealed, "server": kept.server.hex()}
    if now is None:
        return own | {"current": None}
    values: Values = {"context": now.context.hex(), "round": now.round, "names": list(now.names), "own": now.own.hex()}
    values |= {"keys": [key.hex() for key in now.keys], "step": now.step, "members": list(now.members)}
    values["subject"] = now.subject.hex()
    return own | {"current": values | {"shares": {dealer: share.hex() for dealer, share in now.shares.items()}}}


def _from_text(where: str, text: str) -> State:
    if not text:
        return State()
    try:
        found = json.loads(text)
        if found["format"] != FORMAT:
            raise ValueError
        member, day, opened = found["member"], found["day"], found["opened"]
        return State(
            None if member is None else named(where, member),
            {run: _kept_from(values) for run, values in found["runs"].items()},
            [_bytes(ended, SHORT).hex() for ended in found["ended"]],
            (int(day[0]), int(day[1])),
            bytes.fromhex(opened).hex() if len(opened) % (4 * SHORT) == 0 else _bytes(opened, 0).hex(),
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        fix = "remove it: the client then has a new key"
        raise BadArgument(where, "this memory is damaged", fix) from None


def _kept_from(values: Values) -> Kept:
    now = values["current"]
    counts = {name: int(values[name]) for name in ("created", "uses", "attempt", "round", "revealed", "sums")}
    server = _bytes(values["server"], KEY) if values["server"] else b""
    key = _bytes(values["key"], KEY) if values["key"] else b""
    return Kept(key, **counts, server=server, current=None if now is None else _current_from(now))


def _current_from(now: Values) -> Current:
    return Current(
        _bytes(now["context"], HASH),
        int(now["round"]),
        _bytes(now["subject"], HASH),
        tuple(map(str, now["names"])),
        tuple(_bytes(key, KEY) for key in now["keys"]),
        _bytes(now["own"], WIDTH),
        int(now["step"]),
        tuple(map(str, now["members"])),
        {str(dealer): _bytes(share, WIDTH) for dealer, share in now["shares"].items()},
    )


def _bytes(text: str, size: int) -> bytes:
    raw = bytes.fromhex(text)
    if len(raw) != size:
        raise ValueError
    return raw
