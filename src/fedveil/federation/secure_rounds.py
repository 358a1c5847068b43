"""The server's side of rounds under secure aggregation: greet, upload, settle, reveal. Any engine."""

import dataclasses
import hmac
import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedveil import secagg
from fedveil.defences.interface import AnyRound
from fedveil.errors import BadArgument, FedveilError, UpdateRefused
from fedveil.federation.engine import Fault, Member, fault
from fedveil.federation.masked import CHALLENGE
from fedveil.federation.protocol import Step, read, take_masked, write
from fedveil.federation.secure import Sums, Words, check_combination, open_sum
from fedveil.graph.inputs import Inputs
from fedveil.scheme.result import Aggregate, Note
from fedveil.secagg import Aborted, Conduct, Hello, Opening, Roster, Tally, signed
from fedveil.secagg.identity import SIGNATURE
from fedveil.secagg.masks import proper_key
from fedveil.secagg.policy import Policy
from fedveil.secagg.signed import Digest
from fedveil.wire import as_bytes, as_tensor

if TYPE_CHECKING:
    from fedveil.federation.rounds import RemoteServer

KEPT_FAULTS = 20  # of a round, in its record
RENEWAL = Policy.key_rounds  # attempts after which clients replace their keys, unless their policies say otherwise
FAREWELL = 5.0  # seconds in which members may answer that they have heard of the end
Found = TypeVar("Found")


class _Traffic:
    """Bytes of a round's exchanges."""

    def __init__(self) -> None:
        self.down, self.up, self.asked, self.exchanges = 0, 0, 0, 0


class _SumAttempt(NamedTuple):
    """An attempt whose sum was opened, or was not after clients had begun to reveal."""

    total: Words | None
    opening: Opening
    tally: Tally
    why: str  # there is no sum


class _Member(NamedTuple):
    """A member's key, the key of the tags on messages to it, and in how many attempts it was used."""

    hello: Hello
    channel: bytes
    uses: int = 0

    def __repr__(self) -> str:
        return f"_Member({self.hello.name!r})"  # not the key


class SecureRounds:
    """The members' keys and attempts of one run, their conduct, and what is known of the size of their numbers.

    A round takes three exchanges, and one more whenever a member vanishes between them. Before the reveal a round that
    fails is repeated, with a new veil and new masks. Once members were asked to reveal it never is: then its sum is
    lost, and the model stays as it is. A member whose lie is proven is excluded for the run and named in the record.
    """

    def __init__(self, server: "RemoteServer", example: Inputs, roster: Roster) -> None:
        check_combination(server.defence, server.model, server.limits)
        client = server.defence.client(server.model, example, server.loss)
        self.server, self.sums = server, Sums(server.defence, client, server.model, example)
        self.conduct = Conduct()
        self._greeted: dict[Member, _Member] = {}  # also members that are away
        self._doubtful: set[Member] = set()  # members that may have lost their key
        self._quarrelling: set[Member] = set()  # in a failed attempt of this round: left out if others are enough
        self._impostors: dict[Member, str] = {}  # members without a proper hello, and why
        self._attempt, self._roster = 0, roster
        self._key = X25519PrivateKey.generate()

    @property
    def excluded(self) -> dict[str, str]:
        """Members that take no further part in the run, and why."""
        return {str(member): why for member, why in self._impostors.items()} | dict(self.conduct.excluded)

    def exchange(self) -> Aggregate:
        """One round. Raises `TooFewAnswers` if no attempt gets as far as revealing."""
        server, before = self.server, self.excluded
        deadline, faults, traffic = time.monotonic() + server.patience, list[Fault](), _Traffic()
        self._quarrelling.clear()
        for attempt in range(1, server.attempts + 1):
            guilty = {found.member for found in faults if found.guilty}
            nodes = [node for node in server._nodes(deadline, guilty) if not self._is_excluded(node)]
            calm = [node for node in nodes if node not in self._quarrelling]
            nodes = calm if len(calm) >= secagg.LEAST else nodes
            began = time.perf_counter()
            own_round = server.defence_server.start_round(server.model)
            try:
                opened = self._attempt_sum(own_round, nodes, faults, traffic)
                answered = time.perf_counter()
                result = self._result(own_round, opened) if opened is not None else None
            finally:
                own_round.release()  # no secret is left, however the attempt ends
            if opened is not None and result is not None:
                figures: dict[str, float] = {"asked": len(nodes), "answers": len(opened.tally.survivors)}
                figures |= {"exchanges": traffic.exchanges, "seconds_waiting": answered - began}
                figures |= {"bytes_down": round(traffic.down / traffic.asked), "bytes_total": traffic.down + traffic.up}
                figures |= {"bytes_up": round(traffic.up / traffic.asked)}
                figures["seconds_recovery"] = time.perf_counter() - answered
                figures |= {"attempts": attempt} if attempt > 1 else {}
                new = {name: why for name, why in self.excluded.items() if name not in before}
                notes: dict[str, Note] = {**result.notes}
                notes |= {"excluded": new} if new else {}
                notes |= {"faults": [str(found) for found in faults[:KEPT_FAULTS]]} if faults else {}
                return dataclasses.replace(result, figures={**result.figures, **figures}, notes=notes)
            if attempt < server.attempts:
                time.sleep(server.pause)
        wanted = max(server.min_answers, secagg.threshold(secagg.LEAST))
        raise server._too_few(f"{server.attempts} attempts did not open a sum of {wanted} updates or more", faults)

    def close(self) -> None:
        """Tell the members that the run has ended, so that they forget its keys."""
        members = [member for member in self.server.engine.members() if member in self._greeted]
        if members:
            message = write(Step(self.server._session, "end", {"body": as_tensor(b"")}))
            own = self._add_tags(message, dict.fromkeys(members, b""))
            list(self.server._send(message, own, "end", FAREWELL, tagged=True))

    def _attempt_sum(
        self, own_round: AnyRound, nodes: list[Member], faults: list[Fault], traffic: _Traffic
    ) -> _SumAttempt | None:
        """One attempt; None if it may be repeated."""
        server = self.server
        present = self._greet(nodes, faults, traffic)
        names = {self._name(member): member for member in present}
        needed = max(server.min_answers, secagg.threshold(max(len(names), secagg.LEAST)))
        if len(names) < needed:
            text = f"{len(names)} members are there, and secure aggregation needs {needed} or more"
            self._note(fault("server", "too few", text), faults)
            return None
        self._attempt += 1
        opening = self._opening(sorted(names), names, own_round)
        clip = {} if self.sums.clip is None else {"clip": self.sums.clip}
        ask = server._make_ask(own_round, opening.values() | clip)
        data = write(ask)
        tally = Tally(opening, Digest.of(data).whole(), self._roster, self.conduct)

        def take(member: Member, reply: bytes) -> None:
            masked = take_masked(reply, ask, 0)
            tally.take_upload(self._name(member), as_bytes("answer", masked.tensors, "upload"))

        for member, reply in self._exchange(data, dict.fromkeys(present, b""), "upload", faults, traffic):
            self._hear(member, partial(take, member, reply), faults)
        return self._open(opening, tally, names, faults, traffic)

    def _opening(self, order: list[str], names: Mapping[str, Member], own_round: AnyRound) -> Opening:
        hellos = []
        for name in order:
            known = self._greeted[names[name]]
            self._greeted[names[name]] = known._replace(uses=known.uses + 1)
            hellos.append(known.hello)
        layout = self.sums.layout(own_round)
        return Opening(self.server._session, self.server.round, self._attempt, tuple(hellos), *layout)

    def _open(
        self, opening: Opening, tally: Tally, names: Mapping[str, Member], faults: list[Fault], traffic: _Traffic
    ) -> _SumAttempt | None:
        """The steps after the uploads; None if the attempt may be repeated."""
        revealing = False

        def send(step: str, common: bytes, own: Mapping[str, bytes]) -> Iterator[tuple[str, bytes | None]]:
            nonlocal revealing
            revealing = step == "reveal"
            message = write(Step(self.server._session, step, {"body": as_tensor(common)}))
            wanted = {names[name]: extra for name, extra in own.items()}
            for member, reply in self._exchange(message, wanted, step, faults, traffic):
                yield self._name(member), self._hear(member, partial(self._body, reply, step), faults)

        def refused(name: str, error: BadArgument) -> None:
            self._note(fault(names[name], "malformed", f"{error.where}: {error.what}"), faults)

        try:
            return _SumAttempt(open_sum(tally, send, refused), opening, tally, "")
        except Aborted as error:
            self._note(fault("server", "aborted", f"{error.where}: {error.what}"), faults)
            self._quarrelling |= {names[name] for name in tally.quarrelling}
            return _SumAttempt(None, opening, tally, error.what) if revealing else None

    def _result(self, own_round: AnyRound, opened: _SumAttempt) -> Aggregate:
        """The gradient; nothing if there is no sum, or if a client has spoilt it."""
        why = opened.why
        if opened.total is not None:
            try:
                return self.sums.aggregate(own_round, opened.total, opened.opening)
            except (Aborted, UpdateRefused) as error:
                why = error.what
        return Aggregate({}, {}, 0.0, notes={"skipped": why})

    def _greet(self, nodes: list[Member], faults: list[Fault], traffic: _Traffic) -> list[Member]:
        """Those whose keys are known and fresh, after asking the others for theirs."""
        stale = {member for member, greeted in self._greeted.items() if greeted.uses >= RENEWAL}
        new = [node for node in nodes if node not in self._greeted or node in self._doubtful | stale]
        if new:
            challenge = secrets.token_bytes(CHALLENGE)
            body = challenge + self._key.public_key().public_bytes_raw()
            message = write(Step(self.server._session, "hello", {"body": as_tensor(body)}))
            for member, reply in self._exchange(message, dict.fromkeys(new, b""), "hello", faults, traffic):
                hello = self._hear(member, partial(self._hello, member, reply, challenge), faults)
                if hello is not None:
                    channel = signed.channel(self._key, hello.key, self.server._session)
                    self._greeted[member] = _Member(hello, channel)
                    self._doubtful.discard(member)
        fresh = [node for node in nodes if node in self._greeted and node not in self._doubtful]
        return [node for node in fresh if self._greeted[node].uses < RENEWAL and not self._is_excluded(node)]

    def _hello(self, member: Member, reply: bytes, challenge: bytes) -> Hello:
        """A member's hello, if it is its own; one that came back under another number keeps its name."""
        try:
            values = json.loads(self._body(reply, "hello"))
            hello, shown = Hello.from_values(values), bytes.fromhex(str(values.get("proof")))
        except (ValueError, AttributeError, RecursionError) as error:
            raise BadArgument("hello", "it cannot be read") from error
        if hello.run != self.server._session:
            raise BadArgument("hello", "it is of another run")
        proof = hello.proof(challenge)
        for signature, covered in (
            (hello.signature, Hello.signed_bytes(hello.run, hello.name, hello.key)),
            (shown[:SIGNATURE], proof),
        ):
            if len(signature) != SIGNATURE or not self._roster.verifies(hello.name, signature, covered):
                self._impostors[member] = f"its hello is not signed by {hello.name}"
                raise BadArgument("hello", self._impostors[member])
        if not proper_key(hello.key):
            self.conduct.exclude(hello.name, "its key is of small order")
            raise BadArgument("hello", f"the key of {hello.name} is of small order")
        tag = signed.tag(signed.channel(self._key, hello.key, self.server._session), proof)
        if not hmac.compare_digest(shown[SIGNATURE:], tag):
            self.conduct.exclude(hello.name, "it does not have the key that it shows")
            raise BadArgument("hello", f"{hello.name} does not have the key that it shows")
        for other in [other for other in self._greeted if self._name(other) == hello.name and other != member]:
            del self._greeted[other]
        return hello

    def _body(self, reply: bytes, step: str) -> bytes:
        found = read(reply, Step, most=1)
        if (found.session, found.step) != (self.server._session, step):
            raise BadArgument("step", "it answers another step")
        return as_bytes("step", found.tensors, "body")

    def _name(self, member: Member) -> str:
        return self._greeted[member].hello.name

    def _is_excluded(self, member: Member) -> bool:
        known = self._greeted.get(member)
        return member in self._impostors or (known is not None and known.hello.name in self.conduct.excluded)

    def _exchange(
        self, common: bytes, own: Mapping[Member, bytes], step: str, faults: list[Fault], traffic: _Traffic
    ) -> Iterator[tuple[Member, bytes]]:
        """The answers of one exchange; faults go to the list, and whose they are is greeted again."""
        server = self.server
        traffic.exchanges += 1
        traffic.asked = max(traffic.asked, len(own))
        traffic.down += sum(len(common) + len(extra) for extra in own.values())
        tagged = step != "hello"
        own = self._add_tags(common, own) if tagged else own
        for member, reply in server._send(common, own, f"{server.round} {step}", server.timeout, tagged=tagged):
            if isinstance(reply, Fault):
                self._note(reply, faults)
                self._doubtful.add(member)
            else:
                traffic.up += len(reply)
                yield member, reply

    def _add_tags(self, common: bytes, own: Mapping[Member, bytes]) -> dict[Member, bytes]:
        """The bytes for each member alone, under its tag."""
        digest = Digest.of(common).whole()
        return {member: signed.tag(self._greeted[member].channel, digest, extra) for member, extra in own.items()}

    def _hear(self, member: Member, take: Callable[[], Found], faults: list[Fault]) -> Found | None:
        """Return the result of `take`; None, and a fault, if it refuses the reply."""
        try:
            return take()
        except FedveilError as error:
            self._note(fault(member, "malformed", f"{error.where}: {error.what}"), faults)
        except Exception as error:  # nothing that a member sends may end the run
            self._note(fault(member, "malformed", f"{type(error).__name__}"), faults)
        return None

    def _note(self, found: Fault, faults: list[Fault]) -> None:
        self.server._note(found, faults)
