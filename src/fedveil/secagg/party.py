"""The client's side: it answers four messages, and refuses whatever could open a single client.

    hello   ->  M0   its key for a run, signed
    admit   M1       checks the opening, and stores that it was admitted, before the client computes anything
    upload  -> M2   its words, masked
    settle  M3 -> M4   agrees on those left; opens its pair seeds with those who are not
    reveal  M5 -> M6   once: its shares of the self seeds of those left

It knows nothing of transport. Every answer is written to its memory before it is returned.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedveil.errors import Aborted, BadArgument
from fedveil.secagg import masks, rules, signed
from fedveil.secagg.fixed import Words
from fedveil.secagg.identity import Identity, Roster
from fedveil.secagg.memory import Current, Kept, Memory, State, short
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
from fedveil.secagg.policy import Policy
from fedveil.secagg.shares import in_field, split_seed

DAY = 86_400  # seconds


class Ticket:
    """The right to upload once in an attempt that was admitted. It holds the self seed, and shows nothing."""

    def __init__(self, opening: Opening, context: bytes, own: bytes, shares: list[bytes]) -> None:
        self._opening, self._context, self._own, self._shares = opening, context, own, shares
        self._used = False

    def __repr__(self) -> str:
        return "Ticket()"

    def __reduce__(self) -> str:
        raise BadArgument("Ticket", "seeds are not pickled", "upload where the opening was admitted")

    @property
    def opening(self) -> Opening:
        """The opening that was admitted."""
        return self._opening


class Party:
    """A client in secure aggregation.

    Args:
        identity: its signing key.
        roster: who may take part, from a file of its own; it must be in it.
        memory: what it remembers; by default, only while this object lives.
        policy: what it insists on, whatever a server asks.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        identity: Identity,
        roster: Roster,
        memory: Memory | None = None,
        *,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if identity.name not in roster.names or roster.key_of(identity.name) != identity.public():
            raise BadArgument(
                "Party", f"{identity.name} is not in the roster with this key", "add its line to the file"
            )
        self._identity, self._roster = identity, roster
        self._memory, self.policy, self._clock = memory or Memory(), policy or Policy(), clock
        self._verified: set[Hello] = set()
        self._agreed: dict[tuple[bytes, bytes], bytes] = {}  # by own private and the other's public key
        self._public: dict[bytes, bytes] = {}  # of the private key used last
        self._channels: dict[str, bytes] = {}  # keys of the server's tags by run
        self._masked: Words = np.empty(0, np.uint64)  # kept from round to round: new memory costs more than the masks

    def __repr__(self) -> str:
        return f"Party({self.name!r})"

    @property
    def name(self) -> str:
        """The member's name."""
        return self._identity.name

    def hello(self, run: str, server: bytes = b"") -> Hello:
        """M0: this client's key for a run: a new one when it is first asked for, and when the last is due.

        Args:
            run: its name.
            server: the server's X25519 key of the run, from which the key of its tags follows; none without.
        """
        named_run("hello", run)
        with self._memory.turn() as turn:
            state, now = turn.state, int(self._clock())
            if state.member not in (None, self.name):
                raise BadArgument("memory", f"it belongs to another member than {self.name}", "give each its own file")
            if state.has_ended(run):
                raise Aborted("run", "hello", "this run has ended for this client")
            self._forget_old_keys(state, now)
            kept = state.runs.get(run)
            if kept is None or rules.expired(kept, self.policy, now):
                self._new_key(state, run, now)
                state.runs[run].server = server
                turn.write()  # and with it that other keys are gone
            elif server and kept.server != server:
                kept.server = server
                turn.write()
                self._forget_secrets()
            key = state.runs[run].public()
        return Hello(run, self.name, key, self._identity.sign(Hello.signed(run, self.name, key)))

    def prove(self, hello: Hello, challenge: bytes) -> bytes:
        """Show the server that this client says hello now, and that it has the key which it shows.

        A signature, then a tag under the key of the server's tags, which only the owner of the key can make.
        """
        if hello.run not in self._channels:
            self._load_channels()
        covered = hello.proof(challenge)
        return self._identity.sign(covered) + signed.tag(self._channels[hello.run], covered)

    def authenticate(self, digest: bytes, own: bytes) -> bytes:
        """Check the server's mark on a message; returns the bytes for this client alone.

        Args:
            digest: of the bytes that all clients get (`signed.digest`).
            own: what arrived for this client alone.
        """
        if self.policy.server is None:
            what = "this client's policy does not name a server, and under secure aggregation it answers one alone"
            raise BadArgument("policy", what, "fedveil keys policy KEY_FILE --server HEX (docs/secure-aggregation.md)")
        try:
            return signed.admit(self.policy.server, self._channels.values(), digest, own)
        except Aborted:
            if own[:1] != signed.TAGGED:
                raise
            self._load_channels()  # this object may be new, or another process may have replaced a key
            return signed.admit(self.policy.server, self._channels.values(), digest, own)

    def _load_channels(self) -> None:
        with self._memory.turn() as turn:
            runs = {run: kept for run, kept in turn.state.runs.items() if kept.server and kept.key}
            self._channels = {run: signed.channel(kept.private(), kept.server, run) for run, kept in runs.items()}

    def end(self, run: str) -> None:
        """Forget the key of a run, and never accept the run again."""
        with self._memory.turn() as turn:
            if run in turn.state.runs:
                turn.state.end(run)
                turn.write()
        self._forget_secrets()

    def sweep(self) -> None:
        """Forget keys that have outlived the policy."""
        with self._memory.turn() as turn:
            if self._forget_old_keys(turn.state, int(self._clock())):
                turn.write()

    def admit(self, opening: Opening, digest: bytes, subject: bytes | None = None) -> Ticket:
        """Check an opening, and store that it was admitted: nothing may be computed for it before.

        Args:
            opening: as it arrived in M1.
            digest: SHA-256 of all the bytes of M1.
            subject: 32 bytes that say what the sum is about: the broadcast, and which records take part. By default the
                digest.
        """
        bound = context(opening, digest)
        with self._memory.turn() as turn:
            kept = self._admitted(turn.state, opening)
            own, names = masks.new_seed(), opening.names
            place = names.index(self.name)
            shares = split_seed(own, rules.threshold(len(names)), len(names))
            keys = tuple(hello.key for hello in opening.roster)
            about = digest if subject is None else subject
            kept.current = Current(bound, opening.round, about, names, keys, shares[place], members=names)
            kept.attempt, kept.round, kept.uses = opening.attempt, opening.round, kept.uses + 1
            self._pairs(kept, kept.current)  # refuses a key of small order
            turn.write()
        return Ticket(opening, bound, own, shares)

    def upload(self, ticket: Ticket, words: Words) -> bytes:
        """M2: the words, masked, with shares of the seed that hides them.

        Args:
            ticket: from `admit`; it serves once.
            words: uint64; the first is 1, so that the sum shows how many it is over. They are left as they are.
        """
        opening, bound = ticket.opening, ticket._context
        if not isinstance(words, np.ndarray) or words.dtype != np.uint64 or words.shape != (opening.size,):
            raise BadArgument("upload", f"words must be a vector of {opening.size} uint64", "fedveil.secagg.encode")
        if words[0] != 1:
            raise BadArgument("upload", "the first word must be 1")
        with self._memory.turn() as turn:
            kept, current = self._under_way(turn.state, bound)
            if ticket._used or current.step != -1 or (kept.attempt, kept.round) != (opening.attempt, opening.round):
                raise Aborted("attempt", self.name, "this attempt was uploaded already, or a newer one was admitted")
            ticket._used = True
            names, pairs = opening.names, self._pairs(kept, current)
            place = names.index(self.name)
            seeds = {
                other: masks.pair_seed(pairs[name], bound, self.name, name)
                for other, name in enumerate(names)
                if other != place
            }
            shares, own = ticket._shares, ticket._own
            sealed = tuple(masks.seal(shares[k], pairs[names[k]], bound, self.name, names[k]) for k in seeds)
            commitments = tuple(masks.commitment(seeds.get(k, own), bound) for k in range(len(names)))
            share_hash = masks.ShareHash(bound, self.name)
            hashes = tuple(share_hash(shares[k], k) for k in range(len(names)))
            if self._masked.size != words.size:
                self._masked = np.empty(words.size, np.uint64)
            masks.mask(words, own, place, seeds, self._masked)
            return Upload(bound, commitments, hashes, sealed, self._masked).to_bytes()

    def settle(self, message: bytes, own: bytes = b"") -> bytes:
        """M4: agreement with those left, and the pair seeds with those who are not.

        Args:
            message: M3, the part for all.
            own: M3, the part for this client: at step 0 the shares that the others dealt to it.
        """
        settle = Settle.from_bytes(message)
        with self._memory.turn() as turn:
            kept, current = self._under_way(turn.state, settle.context)
            rules.next_step(current, settle)
            rules.inside(current, settle.members)
            rules.many_left(current, settle.members, self.name)
            pairs = self._pairs(kept, current)
            failed: tuple[str, ...] = ()
            if settle.step == 0:
                current.shares = {self.name: current.own} | self._unsealed(settle, own, pairs, current.names)
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
            state, day = turn.state, int(self._clock()) // DAY
            kept, current = self._under_way(state, reveal.settle.context)
            rules.agreed(current, reveal, self._roster, self.name)
            rules.within_budget(state, kept, self.policy, day)
            opened = short(current.subject), short("\n".join(sorted(current.members)).encode())
            rules.not_repeated(state, *opened)
            shares = {name: current.shares[name] for name in current.members if name in current.shares}
            kept.revealed, kept.current = current.round, ended(current)
            kept.sums += 1
            state.day = day, state.sums_on(day) + 1
            state.remember_sum(*opened)
            turn.write()
        return Revealed(reveal.settle.context, shares).to_bytes()

    def _new_key(self, state: State, run: str, now: int) -> None:
        """Give a run a new key."""
        if run not in state.runs and state.full():
            fix = "remove the memory file once no run is under way"
            raise Aborted("full", "hello", "this client's memory is full of runs that have ended", fix)
        key = X25519PrivateKey.generate().private_bytes_raw()
        before, state.member = state.runs.get(run), self.name
        state.runs[run] = Kept(key, now)
        if before is not None:  # counters only grow
            state.runs[run] = Kept(key, now, 0, before.attempt, before.round, before.revealed, before.sums)
        self._forget_secrets()

    def _forget_old_keys(self, state: State, now: int) -> bool:
        """Remove keys that have outlived the policy, but not their counters; returns whether there were any."""
        lifetime = 3600 * self.policy.key_hours
        old = [kept for kept in state.runs.values() if kept.key and not 0 <= now - kept.created < lifetime]
        for kept in old:
            kept.key, kept.current = b"", None
        if old:
            self._forget_secrets()
        return bool(old)

    def _forget_secrets(self) -> None:
        """Drop what was derived from keys that may be gone."""
        self._agreed.clear()
        self._public.clear()
        self._channels.clear()

    def _admitted(self, state: State, opening: Opening) -> Kept:
        """What is kept for the run of an opening that this client takes part in."""
        kept = state.runs.get(opening.run)
        if kept is None or state.member != self.name:
            raise Aborted("run", "opening", f"{self.name} has no key for this run", "ask for its hello first")
        now = int(self._clock())
        rules.alive(kept, self.policy, now)
        rules.enough(len(opening.roster), self.policy)
        rules.known(opening, self._roster, self._verified)
        if kept.key not in self._public:
            self._public = {kept.key: kept.public()}
        rules.included(opening, self.name, self._public[kept.key])
        rules.new_attempt(kept, opening)
        rules.new_round(kept, opening)
        rules.within_budget(state, kept, self.policy, now // DAY)
        return kept

    def _under_way(self, state: State, context: bytes) -> tuple[Kept, Current]:
        """The attempt that a message is about."""
        for kept in state.runs.values():
            if kept.current is not None and kept.current.context == context and state.member == self.name:
                return kept, kept.current
        raise Aborted("attempt", self.name, "this attempt is not under way: it has ended, or never began here")

    def _pairs(self, kept: Kept, current: Current) -> dict[str, bytes]:
        """What this client has in common with each other member."""
        others = {name: key for name, key in zip(current.names, current.keys, strict=True) if name != self.name}
        if missing := [key for key in others.values() if (kept.key, key) not in self._agreed]:
            private = kept.private()
            self._agreed |= {(kept.key, key): masks.agree(private, key) for key in missing}
        return {name: self._agreed[kept.key, key] for name, key in others.items()}

    def _unsealed(
        self, settle: Settle, own: bytes, pairs: Mapping[str, bytes], names: Sequence[str]
    ) -> dict[str, bytes]:
        """The others' shares by dealer, as far as they can be decrypted and are what their dealers said."""
        dealers = [name for name in settle.members if name != self.name]
        found, place = {}, names.index(self.name)
        for dealer, sealed, known in zip(dealers, *sealed_from(own, len(dealers)), strict=True):
            share = masks.unseal(sealed, pairs[dealer], settle.context, dealer, self.name)
            if share is not None and in_field(share) and masks.ShareHash(settle.context, dealer)(share, place) == known:
                found[dealer] = share
        return found


def ended(current: Current) -> Current | None:
    """What is left of an attempt that was revealed: nothing, so that it is never revealed again."""
    return None
