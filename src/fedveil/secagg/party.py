"""The client's side: it answers the server's messages, and refuses any that could reveal a single client's update.

    hello   -> M0      its key for a run, signed
    admit   M1         checks the opening and records that it was admitted, before the client computes anything
    upload  -> M2      its words, masked
    settle  M3 -> M4   agrees on the remaining members; reveals its pair seeds with members that dropped out
    reveal  M5 -> M6   once: its shares of the self seeds of the remaining members

The party is independent of the transport. Every reply is recorded in the client's memory before it is returned.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedveil.errors import Aborted, BadArgument
from fedveil.secagg import masks, messages, rules
from fedveil.secagg.fixed import Words
from fedveil.secagg.identity import TAGGED, Identity, Roster, SecretHolder, admit_message, channel_key, tag_message
from fedveil.secagg.memory import Current, Memory, RunMemory, State, short_digest
from fedveil.secagg.messages import Hello, Opening, Reveal, RevealReply, Settle, SettleReply, Upload, context
from fedveil.secagg.policy import Policy

DAY = 86_400  # seconds


class Ticket(SecretHolder):
    """The right to upload once in an admitted attempt. It contains the self seed; its repr reveals nothing."""

    def __init__(self, opening: Opening, context: bytes, self_seed: bytes, shares: list[bytes]) -> None:
        self.opening = opening
        self._context, self._self_seed, self._shares, self._used = context, self_seed, shares, False


class Party(SecretHolder):
    """A client in secure aggregation.

    Args:
        identity: the client's signing key.
        roster: the members that may take part, from the client's own file; the client must be one of them.
        memory: the client's memory; by default, one that lasts as long as this object.
        policy: the client's policy, which no server can change.
        clock: function that returns the time in seconds since 1970.
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
        if identity.name not in roster.names or roster.public_key(identity.name) != identity.public():
            problem = f"{identity.name} is not in the roster with this key"
            raise BadArgument("Party", problem, "add its line to the roster file")
        self.name, self._identity, self._roster = identity.name, identity, roster
        self._memory, self.policy, self._clock = memory or Memory(), policy or Policy(), clock
        self._verified: set[Hello] = set()
        # the secrets shared with other members, by this client's private and the member's public key
        self._pair_cache: dict[tuple[bytes, bytes], bytes] = {}
        self._channels: dict[str, bytes] = {}  # keys for the server's tags, by run
        self._masked: Words = np.empty(0, np.uint64)  # reused, because allocating memory takes longer than masking

    def hello(self, run: str, server: bytes = b"") -> Hello:
        """Return M0, this client's key for a run. The first call generates the key; an expired key is replaced.

        Args:
            run: name of the run.
            server: the server's X25519 key for the run, from which the key for its tags is derived; may be empty.
        """
        messages.check_run_name("hello", run)
        with self._memory.turn() as turn:
            state, now = turn.state, int(self._clock())
            if state.member not in (None, self.name):
                raise BadArgument("memory", f"it belongs to a member other than {self.name}", "use one file per member")
            if state.has_tombstone(run):
                raise Aborted("run", "hello", "this run has ended for this client")
            self._forget_old_keys(state, now)
            memory = state.runs.get(run)
            if memory is None or rules.needs_new_key(memory, self.policy, now):
                self._generate_key(state, run, now, server)
                turn.write()  # this also saves the removal of expired keys
            elif server and memory.server != server:
                memory.server = server
                turn.write()
                self._forget_secrets()
            key = state.runs[run].public
        return Hello(run, self.name, key, self._identity.sign(Hello.signed_bytes(run, self.name, key)))

    def prove(self, hello: Hello, challenge: bytes) -> bytes:
        """Prove that this client's hello is fresh, and that it owns the key in it.

        The proof is a signature, followed by a tag with the channel key, which only the owner of the key can compute.
        """
        if hello.run not in self._channels:
            self._load_channels()
        signed_bytes = hello.proof(challenge)
        return self._identity.sign(signed_bytes) + tag_message(self._channels[hello.run], signed_bytes)

    def authenticate(self, digest: bytes, extra: bytes) -> bytes:
        """Check the server's signature or tag on a message, and return the bytes for this client only.

        Args:
            digest: digest of the bytes that all clients get (`identity.Digest`).
            extra: the received bytes for this client only.
        """
        if self.policy.server is None:
            problem = "this client's policy does not specify a server, so it refuses secure aggregation"
            fix = "run fedveil keys policy KEY_FILE --server HEX (fedveil help secure-aggregation)"
            raise BadArgument("policy", problem, fix)
        try:
            return admit_message(self.policy.server, self._channels.values(), digest, extra)
        except Aborted:
            if extra[:1] != TAGGED:
                raise
            self._load_channels()  # this object may be new, or another process may have replaced a key
            return admit_message(self.policy.server, self._channels.values(), digest, extra)

    def _load_channels(self) -> None:
        with self._memory.turn() as turn:
            runs = {run: memory for run, memory in turn.state.runs.items() if memory.server and memory.key}
            self._channels = {run: channel_key(memory.private(), memory.server, run) for run, memory in runs.items()}

    def end(self, run: str) -> None:
        """Forget the key of a run, and never accept the run again."""
        with self._memory.turn() as turn:
            if run in turn.state.runs:
                turn.state.end(run)
                turn.write()
        self._forget_secrets()

    def sweep(self) -> None:
        """Forget keys that are older than the policy allows."""
        with self._memory.turn() as turn:
            if self._forget_old_keys(turn.state, int(self._clock())):
                turn.write()

    def admit(self, opening: Opening, digest: bytes, subject: bytes | None = None, min_members: int = 0) -> Ticket:
        """Check an opening and record that it was admitted; do not compute anything for it before this call.

        Args:
            opening: the opening received in M1.
            digest: SHA-256 of all the bytes of M1.
            subject: 32-byte digest of the sum's subject: the broadcast, and which records take part; by default the
                digest of M1.
            min_members: the minimum number of members in the sum, if larger than the threshold.
        """
        attempt_context = context(opening, digest)
        with self._memory.turn() as turn:
            run = self._check_opening(turn.state, opening)
            self_seed, names = masks.new_seed(), opening.names
            shares = masks.split_seed(self_seed, rules.threshold(len(names)), len(names))
            keys = tuple(hello.key for hello in opening.roster)
            subject_digest, share = digest if subject is None else subject, shares[names.index(self.name)]
            run.current = Current(
                attempt_context, opening.round, subject_digest, names, keys, share, members=names, least=min_members
            )
            run.attempt, run.round, run.uses = opening.attempt, opening.round, run.uses + 1
            self._pair_secrets(run, run.current)  # refuses a key of small order
            turn.write()
        return Ticket(opening, attempt_context, self_seed, shares)

    def upload(self, ticket: Ticket, words: Words) -> bytes:
        """Return M2: the masked words, with shares of the seed that masks them.

        Args:
            ticket: from `admit`; valid once.
            words: a uint64 vector, which is not modified. Its first element is 1, so that the sum shows the number of
                its members.
        """
        opening, attempt_context = ticket.opening, ticket._context
        if not isinstance(words, np.ndarray) or words.dtype != np.uint64 or words.shape != (opening.size,):
            raise BadArgument("upload", f"words must be a vector of {opening.size} uint64", "use secagg.encode")
        if words[0] != 1:
            raise BadArgument("upload", "the first word must be 1")
        with self._memory.turn() as turn:
            run, current = self._find_attempt(turn.state, attempt_context)
            if ticket._used or current.step != -1 or (run.attempt, run.round) != (opening.attempt, opening.round):
                raise Aborted("attempt", self.name, "the client has already uploaded, or admitted a newer attempt")
            ticket._used = True
            pairs, others = self._pair_secrets(run, current), dict(enumerate(opening.names))
            index, count = opening.names.index(self.name), len(others)
            del others[index]
            seeds = {k: masks.pair_seed(pairs[name], attempt_context, self.name, name) for k, name in others.items()}
            shares, self_seed = ticket._shares, ticket._self_seed
            sealed = tuple(
                masks.seal(shares[k], pairs[name], attempt_context, self.name, name) for k, name in others.items()
            )
            commitments = tuple(masks.commitment(seeds.get(k, self_seed), attempt_context) for k in range(count))
            hashes = tuple(masks.share_hash(attempt_context, self.name, k, shares[k]) for k in range(count))
            if self._masked.size != words.size:
                self._masked = np.empty(words.size, np.uint64)
            masks.mask(words, self_seed, index, seeds, self._masked)
            return Upload(attempt_context, commitments, hashes, sealed, self._masked).to_bytes()

    def settle(self, message: bytes, extra: bytes = b"") -> bytes:
        """Return M4: agreement on the remaining members, and the pair seeds with members that dropped out.

        Args:
            message: the part of M3 for all clients.
            extra: the part of M3 for this client: at step 0, the shares that the others dealt to it.
        """
        settle = Settle.from_bytes(message)
        with self._memory.turn() as turn:
            run, current = self._find_attempt(turn.state, settle.context)
            rules.check_step(current, settle)
            rules.check_members(current, settle.members)
            rules.check_survivors(current, settle.members, self.name)
            pairs = self._pair_secrets(run, current)
            failed: tuple[str, ...] = ()
            if settle.step == 0:
                index = current.names.index(self.name)
                current.shares = {self.name: current.own} | self._open_shares(settle, extra, pairs, index)
                failed = tuple(name for name in settle.members if name not in current.shares)
            current.step, current.members = settle.step, settle.members
            turn.write()
        dropped = [name for name in current.names if name not in settle.members]
        seeds = tuple(masks.pair_seed(pairs[name], current.context, self.name, name) for name in dropped)
        signature = self._identity.sign(settle.signed_bytes())
        return SettleReply(settle.context, settle.step, failed, signature, seeds).to_bytes()

    def reveal(self, message: bytes) -> bytes:
        """Return M6, the last message: this client's shares of the self seeds of the remaining members."""
        reveal = Reveal.from_bytes(message)
        with self._memory.turn() as turn:
            state, day = turn.state, int(self._clock()) // DAY
            run, current = self._find_attempt(state, reveal.settle.context)
            rules.check_agreement(current, reveal, self._roster, self.name)
            rules.check_budget(state, run, self.policy, day)
            digests = short_digest(current.subject), short_digest("\n".join(sorted(current.members)).encode())
            rules.check_same_members(state, *digests)
            shares = {name: current.shares[name] for name in current.members if name in current.shares}
            run.revealed = current.round
            run.forget_attempt()
            run.sums += 1
            state.day = day, state.count_sums(day) + 1
            state.remember_sum(*digests)
            turn.write()
        return RevealReply(reveal.settle.context, shares).to_bytes()

    def _generate_key(self, state: State, run: str, now: int, server: bytes) -> None:
        """Give a run a new key, and keep its counters."""
        if run not in state.runs and state.is_full():
            fix = "remove the memory file when no run is in progress"
            raise Aborted("full", "hello", "the table of runs in this client's memory is full", fix)
        private = X25519PrivateKey.generate()
        keys = private.private_bytes_raw(), private.public_key().public_bytes_raw()
        previous, state.member = state.runs.get(run, RunMemory(*keys, now)), self.name
        state.runs[run] = replace(
            previous, key=keys[0], public=keys[1], created=now, uses=0, server=server, current=None
        )
        self._forget_secrets()

    def _forget_old_keys(self, state: State, now: int) -> bool:
        """Remove expired keys, but not their counters; return whether any key was removed."""
        lifetime = 3600 * self.policy.key_hours
        expired = [run for run in state.runs.values() if run.key and not 0 <= now - run.created < lifetime]
        for run in expired:
            run.key, run.current = b"", None
        if expired:
            self._forget_secrets()
        return bool(expired)

    def _forget_secrets(self) -> None:
        """Discard everything derived from keys that may have been removed."""
        self._pair_cache.clear()
        self._channels.clear()

    def _check_opening(self, state: State, opening: Opening) -> RunMemory:
        """Return the memory of an opening's run; abort unless this client may take part in it."""
        run = state.runs.get(opening.run)
        if run is None or state.member != self.name:
            raise Aborted("run", "opening", f"{self.name} has no key for this run", "request its hello first")
        now = int(self._clock())
        if rules.needs_new_key(run, self.policy, now):
            raise Aborted("key", "opening", "this client's key for the run must be replaced", "request its hello")
        rules.check_roster_size(len(opening.roster), self.policy)
        rules.check_roster(opening, self._roster, self._verified)
        rules.check_membership(opening, self.name, run.public)
        rules.check_attempt(run, opening)
        rules.check_round(run, opening)
        rules.check_budget(state, run, self.policy, now // DAY)
        return run

    def _find_attempt(self, state: State, context: bytes) -> tuple[RunMemory, Current]:
        """Return the memory of a run and its attempt in progress, given the context of a message."""
        for run in state.runs.values():
            if run.current is not None and run.current.context == context and state.member == self.name:
                return run, run.current
        raise Aborted(
            "attempt", self.name, "this attempt is not in progress: it has ended, or this client has not admitted it"
        )

    def _pair_secrets(self, run: RunMemory, current: Current) -> dict[str, bytes]:
        """Return the secret that this client shares with each other member."""
        others = {name: key for name, key in zip(current.names, current.keys, strict=True) if name != self.name}
        if missing := [key for key in others.values() if (run.key, key) not in self._pair_cache]:
            private = run.private()
            self._pair_cache |= {(run.key, key): masks.agree(private, key) for key in missing}
        return {name: self._pair_cache[run.key, key] for name, key in others.items()}

    def _open_shares(self, settle: Settle, extra: bytes, pairs: Mapping[str, bytes], index: int) -> dict[str, bytes]:
        """Decrypt the others' shares, by dealer, and keep those that match their hashes."""
        dealers = [name for name in settle.members if name != self.name]
        result = {}
        for dealer, (sealed, expected_hash) in zip(dealers, messages.unpack_dealt(extra, len(dealers)), strict=True):
            share = masks.unseal(sealed, pairs[dealer], settle.context, dealer, self.name)
            if share is None or not masks.is_field_element(share):
                continue
            if masks.share_hash(settle.context, dealer, index, share) == expected_hash:
                result[dealer] = share
        return result
