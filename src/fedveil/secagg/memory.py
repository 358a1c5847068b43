"""A client's memory between messages: its key for each run, how the key was used, and which sums were opened.

The X25519 key and the last attempt are stored together: a key without its counter could mask twice with the same
streams. Both are written before a reply is sent, so that a client that is killed and restarted refuses messages that it
has already answered. A run's counters only grow, even when its key is replaced.

Keys expire. A key is replaced after a number of rounds or hours (`Policy`), and an expired key is removed, but the
counters of its run are kept. A run that has ended leaves a tombstone: its name is never accepted again. The table of
runs is bounded; when it is full, new runs are refused, and old runs are not forgotten.

Unlike in the published protocol, the memory also contains the attempt in progress (shares, remaining members), because
a client may be a new process for every message. Only one process may use the memory at a time; otherwise, a server
could show different lists of members to two processes of a client.
"""

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from filelock import FileLock, Timeout
from pydantic import BeforeValidator, PlainSerializer, TypeAdapter

from fedveil.errors import Aborted, BadArgument
from fedveil.files import OWNER, convert_os_errors, write_atomically
from fedveil.secagg.identity import KEY_SIZE, SecretHolder, read_private_file
from fedveil.secagg.masks import SHARE_SIZE
from fedveil.secagg.messages import HASH_SIZE

MAX_RUNS = 1024  # maximum number of runs in a memory, including tombstones
MAX_SUMS = 1000  # maximum number of opened sums whose subject and members are stored
SHORT_DIGEST = 16  # size of a stored digest in bytes


def _hex_field(*sizes: int) -> BeforeValidator:
    """Parse bytes from hex, and require one of these sizes."""

    def parse(text: str) -> bytes:
        raw = bytes.fromhex(text)
        if len(raw) not in sizes:
            raise ValueError
        return raw

    return BeforeValidator(parse)


HEX = PlainSerializer(bytes.hex)
Hash = Annotated[bytes, _hex_field(HASH_SIZE), HEX]
Key = Annotated[bytes, _hex_field(KEY_SIZE), HEX]
RemovableKey = Annotated[bytes, _hex_field(0, KEY_SIZE), HEX]
Share = Annotated[bytes, _hex_field(SHARE_SIZE), HEX]


@dataclass(repr=False)
class Current:
    """The attempt in progress.

    Attributes:
        context: context of the attempt.
        round: round of the federation.
        subject: digest of the sum's subject: the broadcast, and which records take part.
        names: the names of all members of the attempt, in the order of its roster.
        keys: the X25519 keys of these members.
        own: the client's share of its own seed.
        step: the last step of settling that the client answered; -1 before the first step.
        members: the members that the client last agreed to; all members before the first step.
        shares: the shares that were dealt to the client, keyed by dealer.
        least: the minimum number of members in the sum.
    """

    context: Hash
    round: int
    subject: Hash
    names: tuple[str, ...]
    keys: tuple[Key, ...]
    own: Share
    step: int = -1
    members: tuple[str, ...] = ()
    shares: dict[str, Share] = field(default_factory=dict)
    least: int = 0


@dataclass(repr=False)
class RunMemory:
    """The part of the memory for one run.

    Attributes:
        key: the private key; empty once it has been removed.
        public: the public key.
        created: time at which the key was created, in seconds since 1970 by the client's clock.
        uses: number of attempts that used the key.
        attempt, round: attempt and round of the last admitted opening.
        revealed: the last round in which the client revealed shares.
        sums: number of sums that the client has helped to open.
        server: the server's X25519 key for the run; empty if there is none.
        current: the attempt in progress.
    """

    key: RemovableKey
    public: Key
    created: int
    uses: int = 0
    attempt: int = -1
    round: int = -1
    revealed: int = -1
    sums: int = 0
    server: RemovableKey = b""
    current: Current | None = None

    def private(self) -> X25519PrivateKey:
        """Return the private key as an `X25519PrivateKey`."""
        return X25519PrivateKey.from_private_bytes(self.key)

    def forget_attempt(self) -> None:
        """Drop the attempt in progress, so that it is never revealed twice."""
        self.current = None


@dataclass(repr=False)
class State:
    """Everything that a client remembers.

    Attributes:
        member: the name of the member that the memory belongs to.
        runs: the memory of each run, by the run's name.
        ended: short digests of the names of runs that have ended.
        day: the day of the last opened sum, in days since 1970, and the number of sums opened on it.
        opened: subject and members of the last opened sums, as concatenated short digests; read in every turn, but
            searched only before a sum is opened.
        format: version of the file's format.
    """

    member: str | None = None
    runs: dict[str, RunMemory] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    day: tuple[int, int] = (0, 0)
    opened: str = ""
    format: Literal[3] = 3

    def opened_members(self, subject: str) -> list[str]:
        """Return the digests of the lists of members over which sums on a subject were opened."""
        if subject not in self.opened:  # the usual case, and much faster than the search below
            return []
        size = 2 * SHORT_DIGEST  # in hex
        starts = range(0, len(self.opened), 2 * size)
        return [self.opened[start:][size : 2 * size] for start in starts if self.opened.startswith(subject, start)]

    def remember_sum(self, subject: str, members: str) -> None:
        """Remember an opened sum; beyond the limit, the oldest sum is forgotten."""
        if members not in self.opened_members(subject):
            self.opened = (self.opened + subject + members)[-4 * SHORT_DIGEST * MAX_SUMS :]

    def end(self, run: str) -> None:
        """Forget a run's key, and never accept the run again."""
        if self.runs.pop(run, None) is not None:
            self.ended.append(short_digest(run.encode()))

    def has_tombstone(self, run: str) -> bool:
        """Return whether a run has ended."""
        return short_digest(run.encode()) in self.ended

    def is_full(self) -> bool:
        """Return whether the table of runs is full."""
        return len(self.runs) + len(self.ended) >= MAX_RUNS

    def count_sums(self, day: int) -> int:
        """Return the number of sums opened on a day."""
        return self.day[1] if day == self.day[0] else 0


def short_digest(data: bytes) -> str:
    """Return a shortened digest in hex, as stored in the memory."""
    return hashlib.sha256(data).digest()[:SHORT_DIGEST].hex()


class Turn(NamedTuple):
    """Access to the memory during one call. Changes take effect when they are written (to the file, if any)."""

    state: State
    write: Callable[[], None]


class Memory(SecretHolder):
    """A client's memory, stored in this process or in a file that only its owner can read. Its repr reveals nothing.

    Args:
        path: path of the file; without a file, the memory, and with it the key, is lost when the process ends.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path, self._text, self._lock = path, "", threading.Lock()

    def to_bytes(self) -> bytes:
        """Return the entire memory, private keys included, for a client that stores its state elsewhere."""
        return self._load_text().encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Memory":
        """Restore a memory in this process from the result of `to_bytes`."""
        memory = cls()
        memory._text = data.decode(errors="replace")
        _from_text("memory", memory._text)
        return memory

    @contextlib.contextmanager
    def turn(self) -> Iterator[Turn]:
        """Lock the memory for one call; unwritten changes are lost. Abort if the memory is in use."""
        release = self._acquire()
        try:
            state = _from_text(str(self._path or "memory"), self._load_text())
            yield Turn(state, lambda: self._write(_to_text(state)))
        finally:
            release()

    def _acquire(self) -> Callable[[], None]:
        """Lock the memory, against other processes if it has a file, and return a function that releases it."""
        if self._path is not None:
            with convert_os_errors(self._path), contextlib.suppress(Timeout):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                lock = FileLock(self._path.with_name(self._path.name + ".lock"), timeout=0, mode=OWNER)
                lock.acquire()
                return lock.release
        elif self._lock.acquire(blocking=False):
            return self._lock.release
        raise Aborted("busy", "memory", "another thread or process is using this client's memory")

    def _load_text(self) -> str:
        if self._path is None:
            return self._text
        return read_private_file(self._path) if self._path.exists() else ""

    def _write(self, text: str) -> None:
        if self._path is None:
            self._text = text
        else:
            write_atomically(self._path, text, OWNER)


@lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[State]:
    return TypeAdapter(State)


def _to_text(state: State) -> str:
    return _adapter().dump_json(state).decode()


def _from_text(where: str, text: str) -> State:
    if not text:
        return State()
    try:
        state = _adapter().validate_json(text)
        if _to_text(state) != text or len(bytes.fromhex(state.opened)) % (2 * SHORT_DIGEST):
            raise ValueError  # a missing counter must not be set to its default
    except (ValueError, TypeError):  # not chained: pydantic's errors quote values, which are secret here
        fix = "remove it; the client then generates a new key"
        raise BadArgument(where, "this memory is damaged", fix) from None
    return state
