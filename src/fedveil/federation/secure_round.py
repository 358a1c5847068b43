"""Rounds with secure aggregation: greet, upload, settle, reveal. The server sees only the sum."""

import hmac
import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedveil import secagg
from fedveil.defences.interface import AnyRound
from fedveil.errors import BadArgument, UpdateRefused
from fedveil.federation import protocol
from fedveil.federation.protocol import SERVER, Engine, Fault, FaultKind, FaultLog, Member, SecureTerms, Step
from fedveil.federation.rounds import Observer
from fedveil.federation.sums import Sums, Words
from fedveil.scheme.result import Aggregate
from fedveil.secagg import Aborted, Conduct, Hello, Opening, Roster, Tally
from fedveil.secagg.identity import SIGNATURE_SIZE, channel_key, tag_message
from fedveil.secagg.masks import is_valid_key
from fedveil.secagg.policy import Policy

MAX_KEY_USES = Policy.key_rounds  # number of attempts after which clients replace their keys by default
END_TIMEOUT = 5.0  # seconds that clients have to confirm the end of the run
R = TypeVar("R")
Messages = tuple[bytes, Mapping[str, bytes]]  # bytes for all clients, and additional bytes for each client by name


@dataclass(frozen=True)
class Greeting:
    """A client's hello, the key for tags on messages to the client, and the number of attempts that have used it."""

    hello: Hello
    channel: bytes
    uses: int = 0

    def __repr__(self) -> str:
        return f"Greeting({self.hello.name!r})"  # the channel key is secret


@dataclass
class _Attempt:
    """An attempt at a sum: the members by name, the opening, the tally, and whether the reveal has begun."""

    names: Mapping[str, Member]
    opening: Opening
    tally: Tally
    is_revealing: bool = False


class SecureRound:
    """Runs rounds with secure aggregation, and stores the clients' keys and conduct and the format of sums.

    A round takes three exchanges, plus one whenever a client drops out between them. If a round fails before
    the reveal, it is repeated with new noise and new masks. Once clients have been asked to reveal, a failed round is
    not repeated: the sum is lost, and the model stays unchanged. A client that is proven to have lied is excluded for
    the rest of the run and listed in the record.

    Args:
        engine: sends messages to the clients.
        sums: encodes and decodes sums.
        roster: the members that may take part.
        session: identifier of the run.
        min_answers: the minimum number of updates in a sum.
    """

    def __init__(self, engine: Engine, sums: Sums, roster: Roster, session: str, min_answers: int) -> None:
        self.engine, self.sums, self._roster, self._session = engine, sums, roster, session
        self.min_answers, self.answer_time = min_answers, 0.0
        self.min_clients = max(min_answers, secagg.MIN_MEMBERS)
        self.conduct = Conduct()
        self._greetings: dict[Member, Greeting] = {}  # including clients that are currently absent
        self._to_greet_again: set[Member] = set()  # clients that may have lost their key
        self._conflicting: set[Member] = set()  # clients in disputes in this round; left out if there are enough others
        self._round = -1
        self._impostors: dict[Member, str] = {}  # clients without a valid hello, with the reason
        self._reported: set[str] = set()  # excluded clients that are already listed in a record
        self._attempt = 0
        self._key = X25519PrivateKey.generate()

    @property
    def excluded(self) -> dict[str, str]:
        """The clients that are excluded from the run, with the reason for each."""
        return {str(member): reason for member, reason in self._impostors.items()} | dict(self.conduct.excluded)

    def select(self, round_number: int, members: list[Member]) -> list[Member]:
        """Omit excluded clients and, if there are enough others, clients in disputes in this round."""
        if round_number != self._round:
            self._round, self._conflicting = round_number, set()
        members = [member for member in members if not self._is_excluded(member)]
        undisputed_members = [member for member in members if member not in self._conflicting]
        return undisputed_members if len(undisputed_members) >= secagg.MIN_MEMBERS else members

    def collect(
        self,
        round_number: int,
        defence_round: AnyRound,
        members: Sequence[Member],
        faults: FaultLog,
        observer: Observer | None,
    ) -> Aggregate | None:
        """Try once to obtain a sum; return None if the round may be repeated. `observer` is not called."""
        attempt = self._start(round_number, defence_round, members, faults)
        if attempt is None:
            return None
        failure, total = "", None
        try:
            total = self._settle_and_reveal(attempt, faults)
        except Aborted as error:
            faults.add(Fault(SERVER, FaultKind.ABORTED, f"{error.where}: {error.what}"))
            self._conflicting |= {attempt.names[name] for name in attempt.tally.conflicting_members}
            if not attempt.is_revealing:
                return None
            failure = error.what
        self.answer_time = time.perf_counter()
        result = self._decode(defence_round, total, attempt.opening, failure)
        newly_excluded = {name: reason for name, reason in self.excluded.items() if name not in self._reported}
        self._reported.update(newly_excluded)
        notes = {**result.notes, **({"excluded": newly_excluded} if newly_excluded else {})}
        answer_figures = {} if self.engine.traffic is None else {"answers": len(attempt.tally.survivors)}
        return replace(result, figures={**result.figures, **answer_figures}, notes=notes)

    def close(self) -> None:
        """Tell the clients that the run has ended, so that they forget the run's keys."""
        members = [member for member in self.engine.members() if member in self._greetings]
        if members:
            end_step = Step.make(self._session, "end", b"")
            list(self.engine.run_step(end_step, dict.fromkeys(members, b""), self._channels(members), END_TIMEOUT))

    def _start(
        self, round_number: int, defence_round: AnyRound, members: Sequence[Member], faults: FaultLog
    ) -> _Attempt | None:
        """Ask clients for their masked updates; return None if there are too few clients."""
        greeted_members = self._greet(members, faults)
        names = {self._greetings[member].hello.name: member for member in greeted_members}
        num_required = max(self.min_answers, secagg.threshold(max(len(names), secagg.MIN_MEMBERS)))
        if len(names) < num_required:
            message = f"{len(names)} clients are present, but secure aggregation needs at least {num_required}"
            faults.add(Fault(SERVER, FaultKind.TOO_FEW, message))
            return None
        self._attempt += 1
        for member in greeted_members:
            greeting = self._greetings[member]
            self._greetings[member] = replace(greeting, uses=greeting.uses + 1)
        hellos = tuple(self._greetings[names[name]].hello for name in sorted(names))
        layout = self.sums.layout(defence_round, len(hellos))
        opening = Opening(self._session, round_number, self._attempt, hellos, *layout)
        terms = SecureTerms(opening, self.sums.clip)
        digest, uploads = self.engine.ask_masked(
            round_number, defence_round, greeted_members, terms, self._channels(greeted_members)
        )
        attempt = _Attempt(names, opening, Tally(opening, digest, self._roster, self.conduct))
        for member, upload in self._receive(uploads, faults):
            self._take(member, partial(attempt.tally.take_upload, self._name(member), upload), faults)
        return attempt

    def _settle_and_reveal(self, attempt: _Attempt, faults: FaultLog) -> Words:
        """Settle until all remaining clients agree, then reveal; return the sum."""
        tally = attempt.tally
        while not tally.has_agreement():
            self._check_noise(attempt)
            self._run_step(attempt, "settle", tally.settle(), tally.take_settle_reply, faults)
        attempt.is_revealing = True
        reveal = tally.reveal(), dict.fromkeys(tally.survivors, b"")
        self._run_step(attempt, "reveal", reveal, tally.take_reveal_reply, faults)
        return tally.total()

    def _check_noise(self, attempt: _Attempt) -> None:
        """Abort if so many clients have dropped out that the others would refuse to reveal the sum."""
        num_asked, num_remaining = len(attempt.opening.roster), len(attempt.tally.survivors)
        if num_remaining < (num_required := self.sums.min_members(num_asked)):
            message = (
                f"at least {num_required} of {num_asked} clients must remain for enough noise, got {num_remaining}"
            )
            raise Aborted("few", "settle", message, "allow more clients to drop out: fedveil.Privacy(vanishing=...)")

    def _run_step(
        self, attempt: _Attempt, step: str, messages: Messages, receive: Callable[[str, bytes], None], faults: FaultLog
    ) -> None:
        """Send a step to the clients in `messages`; clients without a valid reply count as dropped out."""
        shared_bytes, bytes_by_name = messages
        extras = {attempt.names[name]: extra for name, extra in bytes_by_name.items()}
        message = Step.make(self._session, step, shared_bytes)
        for member, body in self._receive(self.engine.run_step(message, extras, self._channels(extras)), faults):
            self._take(member, partial(receive, self._name(member), body), faults)

    def _decode(self, defence_round: AnyRound, total: Words | None, opening: Opening, failure: str) -> Aggregate:
        """Return the result of a sum, or an empty result if there is no usable sum."""
        if total is not None:
            try:
                return self.sums.aggregate(defence_round, total, opening)
            except (Aborted, UpdateRefused) as error:
                failure = error.what
        defence_round.count_lost()
        return Aggregate({}, {}, 0.0, notes={"skipped": failure})

    def _greet(self, members: Sequence[Member], faults: FaultLog) -> list[Member]:
        """Ask clients whose key is unknown or outdated for a new one; return the clients with a valid key."""
        to_renew = {member for member, greeting in self._greetings.items() if greeting.uses >= MAX_KEY_USES}
        to_greet = [
            member for member in members if member not in self._greetings or member in self._to_greet_again | to_renew
        ]
        if to_greet:
            challenge = secrets.token_bytes(protocol.CHALLENGE_SIZE)
            step = Step.make(self._session, "hello", challenge + self._key.public_key().public_bytes_raw())
            for member, body in self._receive(self.engine.run_step(step, dict.fromkeys(to_greet, b""), None), faults):
                hello = self._take(member, partial(self._check_hello, member, body, challenge), faults)
                if hello is not None:
                    self._greetings[member] = Greeting(hello, channel_key(self._key, hello.key, self._session))
                    self._to_greet_again.discard(member)
        known_members = [
            member for member in members if member in self._greetings and member not in self._to_greet_again
        ]
        return [m for m in known_members if self._greetings[m].uses < MAX_KEY_USES and not self._is_excluded(m)]

    def _check_hello(self, member: Member, body: bytes, challenge: bytes) -> Hello:
        """Verify a client's hello and return it. A client may reconnect as another member."""
        try:
            values = json.loads(body)
            hello, sent_proof = Hello.from_values(values), bytes.fromhex(str(values.get("proof")))
        except (ValueError, AttributeError, RecursionError) as error:
            raise BadArgument("hello", "the greeting cannot be read") from error
        if hello.run != self._session:
            raise BadArgument("hello", "the greeting is for another run")
        proof = hello.proof(challenge)
        for signature, signed_bytes in (
            (hello.signature, Hello.signed_bytes(hello.run, hello.name, hello.key)),
            (sent_proof[:SIGNATURE_SIZE], proof),
        ):
            if len(signature) != SIGNATURE_SIZE or not self._roster.verifies(hello.name, signature, signed_bytes):
                self._impostors[member] = f"its greeting is not signed by {hello.name}"
                raise BadArgument("hello", self._impostors[member])
        if not is_valid_key(hello.key):
            self.conduct.exclude(hello.name, "its key is of small order")
            raise BadArgument("hello", f"the key of {hello.name} is of small order")
        tag = tag_message(channel_key(self._key, hello.key, self._session), proof)
        if not hmac.compare_digest(sent_proof[SIGNATURE_SIZE:], tag):
            self.conduct.exclude(hello.name, "it does not have the private key for the public key that it sent")
            raise BadArgument("hello", f"{hello.name} does not have the private key for the public key that it sent")
        for old_member in [
            known_member
            for known_member in self._greetings
            if self._name(known_member) == hello.name and known_member != member
        ]:
            del self._greetings[old_member]
        return hello

    def _name(self, member: Member) -> str:
        return self._greetings[member].hello.name

    def _is_excluded(self, member: Member) -> bool:
        greeting = self._greetings.get(member)
        return member in self._impostors or (greeting is not None and greeting.hello.name in self.conduct.excluded)

    def _channels(self, members: Sequence[Member] | Mapping[Member, bytes]) -> dict[Member, bytes]:
        return {member: self._greetings[member].channel for member in members}

    def _receive(
        self, replies: Iterable[tuple[Member, bytes] | Fault], faults: FaultLog
    ) -> Iterator[tuple[Member, bytes]]:
        """Yield replies and record faults; clients with faults may have lost their keys and are greeted again."""
        for reply in replies:
            if isinstance(reply, Fault):
                faults.add(reply)
                self._to_greet_again.add(reply.member)
            else:
                yield reply

    def _take(self, member: Member, receive: Callable[[], R], faults: FaultLog) -> R | None:
        """Return the result of `receive`; if it raises an exception, record a fault and return None."""
        try:
            return receive()
        except Exception as error:  # nothing that a client sends may end the run
            faults.add(replace(protocol.describe_refusal(member, error), kind=FaultKind.MALFORMED))
            return None
