"""The client's side: it answers four messages, and refuses whatever could open a single client.

    hello   ->  M0   its key for a run, signed
    upload  M1 -> M2   its words, masked
    settle  M3 -> M4   agrees on those left; opens its pair seeds with those who are not
    reveal  M5 -> M6   once: its shares of the self seeds of those left

It knows nothing of transport. Every answer is written to its memory before it is returned.
"""

from collections.abc import Mapping

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedveil.checks import whole
from fedveil.errors import Aborted, BadArgument
from fedveil.secagg import masks, rules
from fedveil.secagg.fixed import Words
from fedveil.secagg.identity import Identity, Roster
from fedveil.secagg.memory import Current, Kept, Memory, Turn
from fedveil.secagg.messages import (
    Hello,
    Opening,
    Reveal,
    Revealed,
    Settle,
    Settled,
    Upload,
    context,
    named_run,
    sealed_from,
)
from fedveil.secagg.shares import split_seed


class Party:
    """A client in secure aggregation.

    Args:
        identity: its signing key.
        roster: who may take part, from a file of its own; it must be in it.
        memory: what it remembers; by default, only while this object lives.
        colluders: how many other clients may tell the server all they know; attempts with too few members to withstand
            that are refused.
    """

    def __init__(self, identity: Identity, roster: Roster, memory: Memory | None = None, *, colluders: int = 1) -> None:
        if identity.name not in roster.names or roster.key_of(identity.name) != identity.public():
            raise BadArgument(
                "Party", f"{identity.name} is not in the roster with this key", "add its line to the file"
            )
        self._identity, self._roster = identity, roster
        self._memory = memory or Memory()
        self._colluders = whole("Party", "colluders", colluders, 0)
        self._verified: set[Hello] = set()
        self._agreed: dict[tuple[bytes, bytes], bytes] = {}  # by own private and the other's public key
        self._public: dict[bytes, bytes] = {}  # of the private key used last
        self._masked: Words = np.empty(0, np.uint64)  # kept from round to round: new memory costs more than the masks

    def __repr__(self) -> str:
        return f"Party({self.name!r})"

    @property
    def name(self) -> str:
        """The member's name."""
        return self._identity.name

    def hello(self, run: str) -> Hello:
        """M0: this client's key for a run, new when it is first asked for."""
        named_run("hello", run)
        with self._memory.turn() as turn:
            if turn.member not in (None, self.name):
                raise BadArgument("memory", f"it belongs to another member than {self.name}", "a file of its own")
            if run not in turn.runs:
                turn.member = self.name
                turn.runs[run] = Kept(X25519PrivateKey.generate().private_bytes_raw())
                turn.write()
            key = turn.runs[run].public()
        return Hello(run, self.name, key, self._identity.sign(Hello.signed(run, self.name, key)))

    def upload(self, opening: Opening, digest: bytes, words: Words) -> bytes:
        """M2: the words, masked, with shares of the seed that hides them.

        Args:
            opening: as it arrived in M1.
            digest: SHA-256 of all the bytes of M1.
            words: uint64; the first is 1, so that the sum shows how many it is over. They are left as they are.
        """
        if not isinstance(words, np.ndarray) or words.dtype != np.uint64 or words.ndim != 1:
            raise BadArgument("upload", "words must be a vector of uint64", "fedveil.secagg.encode")
        if not words.size or words[0] != 1:
            raise BadArgument("upload", "the first word must be 1")
        bound = context(opening, digest)
        with self._memory.turn() as turn:
            kept = self._admitted(turn, opening)
            own, names = masks.new_seed(), opening.names
            place = names.index(self.name)
            shares = split_seed(own, rules.threshold(len(names)), len(names))
            keys = tuple(hello.key for hello in opening.roster)
            kept.current = Current(bound, opening.round, names, keys, shares[place], members=names)
            kept.attempt, kept.round = opening.attempt, opening.round
            pairs = self._pairs(kept, kept.current)
            turn.write()
            seeds = {
                other: masks.pair_seed(pairs[name], bound, self.name, name)
                for other, name in enumerate(names)
                if other != place
            }
            sealed = tuple(masks.seal(shares[k], pairs[names[k]], bound, self.name, names[k]) for k in seeds)
            commitments = tuple(masks.commitment(seeds.get(k, own), bound) for k in range(len(names)))
            if self._masked.size != words.size:
                self._masked = np.empty(words.size, np.uint64)
            masks.mask(words, own, place, seeds, self._masked)
            return Upload(bound, commitments, sealed, self._masked).to_bytes()

    def settle(self, message: bytes, own: bytes = b"") -> bytes:
        """M4: agreement with those left, and the pair seeds with those who are not.

        Args:
            message: M3, the part for all.
            own: M3, the part for this client: at step 0 the shares that the others dealt to it.
        """
        settle = Settle.from_bytes(message)
        with self._memory.turn() as turn:
            kept, current = self._under_way(turn, settle.context)
            rules.next_step(current, settle)
            rules.inside(current, settle.members)
            rules.many_left(current, settle.members, self.name)
            pairs = self._pairs(kept, current)
            failed: tuple[str, ...] = ()
            if settle.step == 0:
                current.shares = {self.name: current.own} | self._unsealed(settle, own, pairs)
                failed = tuple(name for name in settle.members if name not in current.shares)
            current.step, current.members = settle.step, settle.members
            turn.write()
        seeds = tuple(
            masks.pair_seed(pairs[name], current.context, self.name, name)
            for name in current.names
            if name not in settle.members
        )
        signature = self._identity.sign(settle.signed())
        return Settled(settle.context, settle.step, failed, signature, seeds).to_bytes()

    def reveal(self, message: bytes) -> bytes:
        """M6: this client's shares of the self seeds of those left; its last word in the round."""
        reveal = Reveal.from_bytes(message)
        with self._memory.turn() as turn:
            kept, current = self._under_way(turn, reveal.settle.context)
            rules.agreed(current, reveal, self._roster, self.name)
            shares = {name: current.shares[name] for name in current.members if name in current.shares}
            kept.revealed, kept.current = current.round, ended(current)
            turn.write()
        return Revealed(reveal.settle.context, shares).to_bytes()

    def _admitted(self, turn: Turn, opening: Opening) -> Kept:
        """What is kept for the run of an opening that this client takes part in."""
        kept = turn.runs.get(opening.run)
        if kept is None or turn.member != self.name:
            raise Aborted("run", "opening", f"{self.name} has no key for this run", "ask for its hello first")
        rules.enough(len(opening.roster), self._colluders)
        rules.known(opening, self._roster, self._verified)
        if kept.key not in self._public:
            self._public = {kept.key: kept.public()}
        rules.included(opening, self.name, self._public[kept.key])
        rules.new_attempt(kept, opening)
        rules.new_round(kept, opening)
        return kept

    def _under_way(self, turn: Turn, context: bytes) -> tuple[Kept, Current]:
        """The attempt that a message is about."""
        for kept in turn.runs.values():
            if kept.current is not None and kept.current.context == context and turn.member == self.name:
                return kept, kept.current
        raise Aborted("attempt", self.name, "this attempt is not under way: it has ended, or never began here")

    def _pairs(self, kept: Kept, current: Current) -> dict[str, bytes]:
        """What this client has in common with each other member."""
        others = {name: key for name, key in zip(current.names, current.keys, strict=True) if name != self.name}
        if missing := [key for key in others.values() if (kept.key, key) not in self._agreed]:
            private = kept.private()
            self._agreed |= {(kept.key, key): masks.agree(private, key) for key in missing}
        return {name: self._agreed[kept.key, key] for name, key in others.items()}

    def _unsealed(self, settle: Settle, own: bytes, pairs: Mapping[str, bytes]) -> dict[str, bytes]:
        """The others' shares by dealer, as far as they can be decrypted."""
        dealers = [name for name in settle.members if name != self.name]
        found = {}
        for dealer, sealed in zip(dealers, sealed_from(own, len(dealers)), strict=True):
            share = masks.unseal(sealed, pairs[dealer], settle.context, dealer, self.name)
            if share is not None:
                found[dealer] = share
        return found


def ended(current: Current) -> Current | None:
    """What is left of an attempt that was revealed: nothing, so that it is never revealed again."""
    return None
