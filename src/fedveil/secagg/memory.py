"""What a client remembers from one message to the next: its key of a run, and what it has done with it.

The X25519 key, the last attempt and the last revealed round live and die together: a key without its counter would mask
twice with the same streams. They are written before an answer leaves, so that a client that is killed and started again
refuses what it has answered already. Whoever loses the memory gets a new key with it.

Differs from the protocol on paper: the memory also holds the attempt that is under way (shares, members left), since a
client may be a new process for every message, and one process at a time may use it: two at once could be shown two
lists of members.
"""

import contextlib
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
from fedveil.secagg.identity import KEY, named, private_text
from fedveil.secagg.messages import HASH
from fedveil.secagg.shares import WIDTH

FORMAT = 1
State = dict[str, Any]


@dataclass(repr=False)
class Current:
    """The attempt that is under way.

    Attributes:
        context: of the attempt.
        round: of the federation.
        names: of all who take part, in the roster's order.
        keys: their X25519 keys.
        own: the client's share of its own seed.
        step: the last step of settling that it answered; -1 before the first.
        members: whom it agreed to last; all before the first step.
        shares: that others dealt to it, by dealer.
    """

    context: bytes
    round: int
    names: tuple[str, ...]
    keys: tuple[bytes, ...]
    own: bytes
    step: int = -1
    members: tuple[str, ...] = ()
    shares: dict[str, bytes] = field(default_factory=dict)


@dataclass(repr=False)
class Kept:
    """What is kept for one run: the key, the last attempt and round, the last round in which it revealed."""

    key: bytes
    attempt: int = -1
    round: int = -1
    revealed: int = -1
    current: Current | None = None

    def private(self) -> X25519PrivateKey:
        """The key itself."""
        return X25519PrivateKey.from_private_bytes(self.key)

    def public(self) -> bytes:
        """The public half."""
        return self.private().public_key().public_bytes_raw()


class Turn:
    """The memory while one call uses it: changes count once they are written."""

    def __init__(self, memory: "Memory", member: str | None, runs: dict[str, Kept]) -> None:
        self._memory, self.member, self.runs = memory, member, runs

    def write(self) -> None:
        """Keep what was changed, on disk if the memory has a file."""
        self._memory._write(_to_text(self.member, self.runs))


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
                yield Turn(self, *_from_text(str(self._path or "memory"), self._read()))
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
        return private_text(self._path) if self._path.exists() else ""

    def _write(self, text: str) -> None:
        if self._path is None:
            self._text = text
        else:
            write_whole(self._path, text, OWNER)


def _to_text(member: str | None, runs: dict[str, Kept]) -> str:
    kept = {run: _kept_values(found) for run, found in runs.items()}
    return json.dumps({"format": FORMAT, "member": member, "runs": kept})


def _kept_values(kept: Kept) -> State:
    now = kept.current
    own: State = {"key": kept.key.hex(), "attempt": kept.attempt, "round": kept.round, "revealed": kept.revealed}
    if now is None:
        return own | {"current": None}
    state: State = {"context": now.context.hex(), "round": now.round, "names": list(now.names), "own": now.own.hex()}
    state |= {"keys": [key.hex() for key in now.keys], "step": now.step, "members": list(now.members)}
    return own | {"current": state | {"shares": {dealer: share.hex() for dealer, share in now.shares.items()}}}


def _from_text(where: str, text: str) -> tuple[str | None, dict[str, Kept]]:
    if not text:
        return None, {}
    try:
        found = json.loads(text)
        if found["format"] != FORMAT:
            raise ValueError
        member = found["member"]
        return (None if member is None else named(where, member)), {
            run: _kept_from(state) for run, state in found["runs"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        fix = "remove it: the client then has a new key"
        raise BadArgument(where, "this memory is damaged", fix) from None


def _kept_from(state: State) -> Kept:
    now = state["current"]
    current = None if now is None else _current_from(now)
    return Kept(_bytes(state["key"], KEY), int(state["attempt"]), int(state["round"]), int(state["revealed"]), current)


def _current_from(now: State) -> Current:
    return Current(
        _bytes(now["context"], HASH),
        int(now["round"]),
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
