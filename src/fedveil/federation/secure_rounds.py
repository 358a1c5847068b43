"""The server's side of rounds under secure aggregation: greet, upload, settle, reveal. Any engine."""

import dataclasses
import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from fedveil import secagg
from fedveil.defences import Aggregate
from fedveil.errors import BadArgument, FedveilError, UpdateRefused
from fedveil.federation.engine import Fault, Member, fault
from fedveil.federation.remote import Masked, Step, read, take_masked, write
from fedveil.federation.secure import Sums, Words, check_combination, open_sum
from fedveil.secagg import Aborted, Hello, Opening, Roster, Tally
from fedveil.wire import as_bytes, as_tensor

if TYPE_CHECKING:
    from fedveil.federation.rounds import RemoteServer

KEPT_FAULTS = 20  # of a round, in its record
MOST_ROOM = 24  # bits, after which a round goes on without those whose numbers do not fit


class _Traffic:
    """Bytes and seconds of a round's exchanges."""

    def __init__(self) -> None:
        self.down, self.up, self.asked, self.work, self.exchanges = 0, 0, 0, 0.0, 0


class _Opened(NamedTuple):
    """An attempt whose sum was opened, or was not after clients had begun to reveal."""

    total: Words | None
    opening: Opening
    tally: Tally
    why: str  # there is no sum


class SecureRounds:
    """The members' keys and attempts of one run, and what is known of the size of their numbers.

    A round takes three exchanges, and one more whenever a member vanishes between them. Before the reveal a round that
    fails is repeated, with a new veil and new masks. Once members were asked to reveal it never is: then its sum is
    lost, and the model stays as it is.
    """

    def __init__(self, server: "RemoteServer", roster: Roster | None = None) -> None:
        check_combination(server.defence, server.model, server.limits)
        self.server, self.sums = server, Sums(server.defence, server.model)
        self._hellos: dict[Member, Hello] = {}  # also of members that are away
        self._doubtful: set[Member] = set()  # members that may have lost their key
        self._attempt, self._roster = 0, roster

    def exchange(self) -> Aggregate:
        """One round. Raises `TooFewAnswers` if no attempt gets as far as revealing."""
        server = self.server
        deadline, faults, traffic = time.monotonic() + server.patience, list[Fault](), _Traffic()
        for attempt in range(1, server.attempts + 1):
            guilty = {found.member for found in faults if found.guilty}
            nodes = server._nodes(deadline, guilty)
            began = time.perf_counter()
            opened = self._attempted(nodes, faults, traffic)
            answered = time.perf_counter()
            if opened is not None:
                result = self._result(opened)
                details: dict[str, Any] = {"asked": len(nodes), "answers": len(opened.tally.survivors)}
                details |= {"exchanges": traffic.exchanges, "seconds_work": traffic.work}
                details |= {"bytes_down": round(traffic.down / traffic.asked), "bytes_total": traffic.down + traffic.up}
                details |= {"bytes_up": round(traffic.up / traffic.asked), "seconds_waiting": answered - began}
                details["seconds_recovery"] = time.perf_counter() - answered
                details |= {"attempts": attempt} if attempt > 1 else {}
                details |= {"faults": [str(found) for found in faults[:KEPT_FAULTS]]} if faults else {}
                return dataclasses.replace(result, details={**result.details, **details})
            server.defence.forget()
            if attempt < server.attempts:
                time.sleep(server.pause)
        wanted = max(server.min_answers, secagg.threshold(secagg.LEAST))
        raise server._too_few(f"{server.attempts} attempts did not open a sum of {wanted} updates or more", faults)

    def _attempted(self, nodes: list[Member], faults: list[Fault], traffic: _Traffic) -> _Opened | None:
        """One attempt; None if it may be repeated."""
        server = self.server
        present = self._greeted(nodes, faults, traffic)
        names = {self._hellos[member].name: member for member in self._roster_of(present)}
        needed = max(server.min_answers, secagg.threshold(max(len(names), secagg.LEAST)))
        if len(names) < secagg.LEAST or len(present) < needed:
            text = (
                f"{len(present)} of {len(names)} members are there, and secure aggregation needs {needed} of 4 or more"
            )
            self._note(fault("server", "too few", text), faults)
            return None
        broadcast = server.defence.broadcast(server.model)
        self._attempt += 1
        hellos = tuple([self._hellos[names[name]] for name in sorted(names)])
        exponents = self.sums.exponents(broadcast)
        opening = Opening(server._session, server.round, self._attempt, hellos, exponents)
        clip = {} if self.sums.clip is None else {"clip": self.sums.clip}
        ask = server._ask_of(broadcast, opening.values() | clip)
        data = write(ask)
        assert self.sums.form is not None
        tally = Tally(opening, hashlib.sha256(data).digest(), self.sums.form.size, self._roster)
        misfits = 0
        for member, reply in self._exchanged(data, dict.fromkeys(present, b""), "upload", faults, traffic):
            masked = self._heard(member, lambda reply=reply: take_masked(reply, ask, 0), faults)
            if isinstance(masked, Masked):
                traffic.work = max(traffic.work, masked.seconds)
                misfits += not masked.fits
                if masked.fits:
                    self._heard(member, lambda m=member, a=masked: self._uploaded(tally, m, a), faults)
        if misfits and (self.sums.wider < MOST_ROOM or len(tally.survivors) < needed):
            self.sums.widen()
            text = f"{misfits} updates have numbers that do not fit; all are given more room"
            self._note(fault("server", "range", text), faults)
            return None
        revealing = False

        def send(step: str, common: bytes, own: Mapping[str, bytes]) -> Iterator[tuple[str, bytes | None]]:
            nonlocal revealing
            revealing = step == "reveal"
            message = write(Step(server._session, step, {"body": as_tensor(common)}))
            wanted = {names[name]: extra for name, extra in own.items()}
            for member, reply in self._exchanged(message, wanted, step, faults, traffic):
                body = self._heard(member, lambda reply=reply: self._body(reply, step), faults)
                yield self._name(member), body if isinstance(body, bytes) else None

        def refused(name: str, error: BadArgument) -> None:
            self._note(fault(names[name], "malformed", f"{error.where}: {error.what}"), faults)

        try:
            return _Opened(open_sum(tally, send, refused), opening, tally, "")
        except Aborted as error:
            self._note(fault("server", "aborted", f"{error.where}: {error.what}"), faults)
            return _Opened(None, opening, tally, error.what) if revealing else None

    def _uploaded(self, tally: Tally, member: Member, masked: Masked) -> None:
        tally.take_upload(self._name(member), as_bytes("answer", masked.tensors, "upload"))

    def _result(self, opened: _Opened) -> Aggregate:
        """The gradient; nothing if there is no sum, or if a client has spoilt it."""
        why = opened.why
        if opened.total is not None:
            try:
                return self.sums.aggregate(opened.total, opened.opening)
            except (Aborted, UpdateRefused) as error:
                why = error.what
        return Aggregate({}, {}, 0.0, {"skipped": why})

    def _greeted(self, nodes: list[Member], faults: list[Fault], traffic: _Traffic) -> list[Member]:
        """Those whose keys are known, after asking the others for theirs."""
        new = [node for node in nodes if node not in self._hellos or node in self._doubtful]
        if new:
            message = write(Step(self.server._session, "hello", {"body": as_tensor(b"")}))
            for member, reply in self._exchanged(message, dict.fromkeys(new, b""), "hello", faults, traffic):
                hello = self._heard(member, lambda reply=reply: self._hello(reply), faults)
                if isinstance(hello, Hello) and self._heard(member, lambda m=member, h=hello: self._free(m, h), faults):
                    self._hellos[member] = hello
                    self._doubtful.discard(member)
        return [node for node in nodes if node in self._hellos and node not in self._doubtful]

    def _free(self, member: Member, hello: Hello) -> bool:
        """Whether a member may have the name that it says; one that came back under another number may."""
        if self._roster is not None:
            signed = Hello.signed(hello.run, hello.name, hello.key)
            if not self._roster.verifies(hello.name, hello.signature, signed):
                raise BadArgument("hello", f"it is not signed by {hello.name}")
        for other in [other for other, known in self._hellos.items() if known.name == hello.name and other != member]:
            if self._roster is None and other in self.server.engine.members() and other not in self._doubtful:
                raise BadArgument("hello", f"{hello.name} is the name of another member, which is there")
            del self._hellos[other]
        return True

    def _roster_of(self, present: list[Member]) -> list[Member]:
        """Those who are there; if they are too few for a roster, also members that are away, and count as vanished."""
        away = [member for member in self._hellos if member not in present]
        return [*present, *away[: max(0, secagg.LEAST - len(present))]]

    def _hello(self, reply: bytes) -> Hello:
        try:
            values = json.loads(self._body(reply, "hello"))
        except ValueError as error:
            raise BadArgument("hello", "it cannot be read") from error
        hello = Hello.from_values(values)
        if hello.run != self.server._session:
            raise BadArgument("hello", "it is of another run")
        return hello

    def _body(self, reply: bytes, step: str) -> bytes:
        found = read(reply, Step, most=1)
        if (found.session, found.step) != (self.server._session, step):
            raise BadArgument("step", "it answers another step")
        return as_bytes("step", found.tensors, "body")

    def _name(self, member: Member) -> str:
        return self._hellos[member].name

    def _exchanged(
        self, common: bytes, own: Mapping[Member, bytes], step: str, faults: list[Fault], traffic: _Traffic
    ) -> Iterator[tuple[Member, bytes]]:
        """The answers of one exchange; faults go to the list, and whose they are is greeted again."""
        server = self.server
        traffic.exchanges += 1
        traffic.asked = max(traffic.asked, len(own))
        traffic.down += sum(len(common) + len(extra) for extra in own.values())
        label = f"{server.round} {step}"
        for member, reply in server.engine.ask(common, own, label=label, timeout=server.timeout):
            if isinstance(reply, Fault):
                self._note(reply, faults)
                self._doubtful.add(member)
            else:
                traffic.up += len(reply)
                yield member, reply

    def _heard(self, member: Member, take: Any, faults: list[Fault]) -> Any:
        """What `take` makes of an answer; None, and a fault, if it refuses it."""
        try:
            return take()
        except FedveilError as error:
            self._note(fault(member, "malformed", f"{error.where}: {error.what}"), faults)
        except Exception as error:  # nothing that a member sends may end the run
            self._note(fault(member, "malformed", f"{type(error).__name__}"), faults)
        return None

    def _note(self, found: Fault, faults: list[Fault]) -> None:
        self.server._note(found, faults)
