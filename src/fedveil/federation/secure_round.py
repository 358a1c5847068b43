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

RENEWAL = Policy.key_rounds  # number of attempts after which clients replace their keys by default
FAREWELL = 5.0  # seconds that clients have to confirm the end of the run
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
    """An attempt at a sum: its members by name, its opening and tally, and whether the reveal has begun."""

    names: Mapping[str, Member]
    opening: Opening
    tally: Tally
    revealing: bool = False


class SecureRound:
    """Runs rounds with secure aggregation, and stores the clients' keys and conduct and the format of sums.

    A round takes three exchanges, and one more whenever a client drops out between them. If it fails before the reveal,
    it is repeated with new noise and new masks. Once clients have been asked to reveal, a failed round is not
    repeated: its sum is lost, and the model stays unchanged. A client that is proven to have lied is excluded for the
    rest of the run and listed in the record.

    Args:
        engine: sends messages to the clients.
        sums: encodes and decodes sums.
        roster: the members that may take part.
        session: identifier of the run.
        min_answers: the minimum number of updates in a sum.
    """

    def __init__(self, engine: Engine, sums: Sums, roster: Roster, session: str, min_answers: int) -> None:
        self.engine, self.sums, self._roster, self._session = engine, sums, roster, session
        self.min_answers, self.answered = min_answers, 0.0
        self.min_clients = max(min_answers, secagg.MIN_MEMBERS)
        self.conduct = Conduct()
        self._greetings: dict[Member, Greeting] = {}  # including clients that are currently absent
        self._doubtful: set[Member] = set()  # clients that may have lost their key
        self._conflicting: set[Member] = set()  # clients in disputes in this round, left out if there are enough others
        self._round = -1
        self._impostors: dict[Member, str] = {}  # clients without a valid hello, with the reason
        self._reported: set[str] = set()  # excluded clients that are already listed in a record
        self._attempt = 0
        self._key = X25519PrivateKey.generate()

    @property
    def excluded(self) -> dict[str, str]:
        """The clients that are excluded from the run, with the reason for each."""
        return {str(member): why for member, why in self._impostors.items()} | dict(self.conduct.excluded)

    def select(self, number: int, members: list[Member]) -> list[Member]:
        """Leave out excluded clients and, if there are enough others, clients in disputes in this round."""
        if number != self._round:
            self._round, self._conflicting = number, set()
        members = [member for member in members if not self._is_excluded(member)]
        undisputed = [member for member in members if member not in self._conflicting]
        return undisputed if len(undisputed) >= secagg.MIN_MEMBERS else members

    def collect(
        self,
        number: int,
        defence_round: AnyRound,
        members: Sequence[Member],
        faults: FaultLog,
        observer: Observer | None,
    ) -> Aggregate | None:
        """Try once to open a sum; return None if the round may be repeated. `observer` is not called."""
        attempt = self._start(number, defence_round, members, faults)
        if attempt is None:
            return None
        why, total = "", None
        try:
            total = self._settle_and_reveal(attempt, faults)
        except Aborted as error:
            faults.add(Fault(SERVER, FaultKind.ABORTED, f"{error.where}: {error.what}"))
            self._conflicting |= {attempt.names[name] for name in attempt.tally.conflicting_members}
            if not attempt.revealing:
                return None
            why = error.what
        self.answered = time.perf_counter()
        result = self._decode(defence_round, total, attempt.opening, why)
        new = {name: why for name, why in self.excluded.items() if name not in self._reported}
        self._reported.update(new)
        notes = {**result.notes, **({"excluded": new} if new else {})}
        answers = {} if self.engine.traffic is None else {"answers": len(attempt.tally.survivors)}
        return replace(result, figures={**result.figures, **answers}, notes=notes)

    def close(self) -> None:
        """Tell the clients that the run has ended, so that they forget its keys."""
        members = [member for member in self.engine.members() if member in self._greetings]
        if members:
            end = Step.make(self._session, "end", b"")
            list(self.engine.take_step(end, dict.fromkeys(members, b""), self._channels(members), FAREWELL))

    def _start(
        self, number: int, defence_round: AnyRound, members: Sequence[Member], faults: FaultLog
    ) -> _Attempt | None:
        """Ask clients for their masked updates; return None if there are too few clients."""
        present = self._greet(members, faults)
        names = {self._greetings[member].hello.name: member for member in present}
        needed = max(self.min_answers, secagg.threshold(max(len(names), secagg.MIN_MEMBERS)))
        if len(names) < needed:
            text = f"{len(names)} clients are present, but secure aggregation needs at least {needed}"
            faults.add(Fault(SERVER, FaultKind.TOO_FEW, text))
            return None
        self._attempt += 1
        for member in present:
            known = self._greetings[member]
            self._greetings[member] = replace(known, uses=known.uses + 1)
        hellos = tuple(self._greetings[names[name]].hello for name in sorted(names))
        layout = self.sums.layout(defence_round, len(hellos))
        opening = Opening(self._session, number, self._attempt, hellos, *layout)
        terms = SecureTerms(opening, self.sums.clip)
        digest, uploads = self.engine.ask_masked(number, defence_round, present, terms, self._channels(present))
        attempt = _Attempt(names, opening, Tally(opening, digest, self._roster, self.conduct))
        for member, upload in self._receive(uploads, faults):
            self._take(member, partial(attempt.tally.take_upload, self._name(member), upload), faults)
        return attempt

    def _settle_and_reveal(self, attempt: _Attempt, faults: FaultLog) -> Words:
        """Settle until all remaining clients agree, then reveal; return the sum."""
        tally = attempt.tally
        while not tally.has_agreement():
            self._check_noise(attempt)
            self._take_step(attempt, "settle", tally.settle(), tally.take_settle_reply, faults)
        attempt.revealing = True
        reveal = tally.reveal(), dict.fromkeys(tally.survivors, b"")
        self._take_step(attempt, "reveal", reveal, tally.take_reveal_reply, faults)
        return tally.total()

    def _check_noise(self, attempt: _Attempt) -> None:
        """Abort if so many clients have dropped out that the others would refuse to open the sum."""
        asked, left = len(attempt.opening.roster), len(attempt.tally.survivors)
        if left < (least := self.sums.min_members(asked)):
            what = f"{left} of {asked} clients remain: at least {least} are needed for enough noise"
            raise Aborted("few", "settle", what, "allow more clients to drop out: fedveil.Privacy(vanishing=...)")

    def _take_step(
        self, attempt: _Attempt, step: str, messages: Messages, take: Callable[[str, bytes], None], faults: FaultLog
    ) -> None:
        """Send a step to the clients in `messages`; clients without a valid reply count as dropped out."""
        common, individual = messages
        expected = {attempt.names[name]: extra for name, extra in individual.items()}
        message = Step.make(self._session, step, common)
        for member, body in self._receive(self.engine.take_step(message, expected, self._channels(expected)), faults):
            self._take(member, partial(take, self._name(member), body), faults)

    def _decode(self, defence_round: AnyRound, total: Words | None, opening: Opening, why: str) -> Aggregate:
        """Return the result of a sum, or an empty result if there is no sum or it cannot be used."""
        if total is not None:
            try:
                return self.sums.aggregate(defence_round, total, opening)
            except (Aborted, UpdateRefused) as error:
                why = error.what
        defence_round.count_lost()
        return Aggregate({}, {}, 0.0, notes={"skipped": why})

    def _greet(self, members: Sequence[Member], faults: FaultLog) -> list[Member]:
        """Return the clients whose keys are known and fresh, after asking the others for theirs."""
        stale = {member for member, greeting in self._greetings.items() if greeting.uses >= RENEWAL}
        new = [member for member in members if member not in self._greetings or member in self._doubtful | stale]
        if new:
            challenge = secrets.token_bytes(protocol.CHALLENGE)
            step = Step.make(self._session, "hello", challenge + self._key.public_key().public_bytes_raw())
            for member, body in self._receive(self.engine.take_step(step, dict.fromkeys(new, b""), None), faults):
                hello = self._take(member, partial(self._check_hello, member, body, challenge), faults)
                if hello is not None:
                    self._greetings[member] = Greeting(hello, channel_key(self._key, hello.key, self._session))
                    self._doubtful.discard(member)
        fresh = [member for member in members if member in self._greetings and member not in self._doubtful]
        return [m for m in fresh if self._greetings[m].uses < RENEWAL and not self._is_excluded(m)]

    def _check_hello(self, member: Member, body: bytes, challenge: bytes) -> Hello:
        """Verify a client's hello and return it. A client may reconnect as another member."""
        try:
            values = json.loads(body)
            hello, sent_proof = Hello.from_values(values), bytes.fromhex(str(values.get("proof")))
        except (ValueError, AttributeError, RecursionError) as error:
            raise BadArgument("hello", "it cannot be read") from error
        if hello.run != self._session:
            raise BadArgument("hello", "it is for another run")
        proof = hello.proof(challenge)
        for signature, covered in (
            (hello.signature, Hello.signed_bytes(hello.run, hello.name, hello.key)),
            (sent_proof[:SIGNATURE_SIZE], proof),
        ):
            if len(signature) != SIGNATURE_SIZE or not self._roster.verifies(hello.name, signature, covered):
                self._impostors[member] = f"its hello is not signed by {hello.name}"
                raise BadArgument("hello", self._impostors[member])
        if not is_valid_key(hello.key):
            self.conduct.exclude(hello.name, "its key is of small order")
            raise BadArgument("hello", f"the key of {hello.name} is of small order")
        tag = tag_message(channel_key(self._key, hello.key, self._session), proof)
        if not hmac.compare_digest(sent_proof[SIGNATURE_SIZE:], tag):
            self.conduct.exclude(hello.name, "it does not own the key that it presents")
            raise BadArgument("hello", f"{hello.name} does not own the key that it presents")
        for other in [other for other in self._greetings if self._name(other) == hello.name and other != member]:
            del self._greetings[other]
        return hello

    def _name(self, member: Member) -> str:
        return self._greetings[member].hello.name

    def _is_excluded(self, member: Member) -> bool:
        known = self._greetings.get(member)
        return member in self._impostors or (known is not None and known.hello.name in self.conduct.excluded)

    def _channels(self, members: Sequence[Member] | Mapping[Member, bytes]) -> dict[Member, bytes]:
        return {member: self._greetings[member].channel for member in members}

    def _receive(
        self, replies: Iterable[tuple[Member, bytes] | Fault], faults: FaultLog
    ) -> Iterator[tuple[Member, bytes]]:
        """Yield replies and record faults; clients with faults may have lost their keys and are greeted again."""
        for reply in replies:
            if isinstance(reply, Fault):
                faults.add(reply)
                self._doubtful.add(reply.member)
            else:
                yield reply

    def _take(self, member: Member, take: Callable[[], R], faults: FaultLog) -> R | None:
        """Return the result of `take`; if it raises, record a fault and return None."""
        try:
            return take()
        except Exception as error:  # nothing that a client sends may end the run
            faults.add(replace(protocol.describe_refusal(member, error), kind=FaultKind.MALFORMED))
            return None
