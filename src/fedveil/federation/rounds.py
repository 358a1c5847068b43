"""The server's side of rounds with clients elsewhere: whom to ask, what is refused, repeats, records. Any engine."""

import dataclasses
import logging
import time
from collections.abc import Iterator, Mapping, Set
from typing import Any, NamedTuple

import torch
from torch import nn

from fedveil.checks import positive, share, whole
from fedveil.defences.interface import AnyDefence, AnyRound
from fedveil.defences.registry import find_codec, find_record
from fedveil.errors import BadArgument, FedveilError, NonFiniteUpdate, StaleUpdate, TooFewAnswers
from fedveil.federation.engine import Engine, Fault, Member, fault
from fedveil.federation.evaluate import moved
from fedveil.federation.limits import Limits, Outcome, aggregate
from fedveil.federation.optimise import Optimizer, Schedule
from fedveil.federation.protocol import Ask, take, write
from fedveil.federation.remote import IDENTITY, ROSTER, server_files
from fedveil.federation.secure_rounds import SecureRounds
from fedveil.federation.server import Seen, Server
from fedveil.graph.describe import shares_in_words
from fedveil.graph.inputs import Inputs
from fedveil.records.shards import generator
from fedveil.scheme import Entropy
from fedveil.scheme.losses import Function, Loss
from fedveil.scheme.result import Aggregate
from fedveil.secagg import Identity, Roster
from fedveil.secagg.signed import sign

LOG = logging.getLogger("fedveil.rounds")
KEPT_FAULTS = 20  # of a round, in its record


class _Reply(NamedTuple):
    """An answer that is in order."""

    member: Member
    update: Any
    records: int
    seconds: float  # of its work, as it says
    size: int  # in bytes


class RemoteServer(Server):
    """A federation whose clients are members of an engine and answer with `fedveil.federation.remote.reply`.

    One exchange of messages carries one round. A round goes on with the answers that arrived in time and were in
    order, if there are at least `min_answers`, with |D_k| of those clients as weights. Otherwise it is repeated, with a
    new secret. docs/flower.md lists what happens in each kind of fault.

    Args:
        engine: what carries messages.
        model: the server's; trained in place.
        example: two records' inputs or more, for the analysis of the model; values do not matter. In the form that
            clients have them: a tensor, a tuple of arguments of forward or a dict of its keyword arguments.
        defence: as for `fedveil.Federation`. One with test entropy or a seed is refused.
        optimizer: as for `fedveil.Federation`.
        schedule: as for `fedveil.Federation`; an epoch is `rounds_per_epoch` rounds.
        schedule_every: as for `fedveil.Federation`.
        clip_norm: as for `fedveil.Federation`.
        loss: as for `fedveil.Federation`, but it has to be named: the server does not see the clients' targets. Clients
            must know a function of your own, too.
        whole_shard: clients go through all their records in a round, so that few rounds are needed.
        batch_size: records that a client takes at a time; without `whole_shard` those are its round.
        rounds_per_epoch: for the schedule and for evaluation.
        participation: share of the nodes that are asked in a round.
        limits: bounds on each node, and how updates are combined: `fedveil.Limits`. None takes all finite updates, with
            one removal of the noise for their sum.
        min_answers: good answers that a round needs.
        wait_for: nodes that must be there before the first round; by default `min_answers`.
        timeout: seconds for an exchange; also how long its messages live.
        patience: seconds to wait for nodes in a round before giving up.
        attempts: exchanges of a round before giving up.
        pause: seconds between them.
        secure_aggregation: the server sees sums of updates only; clients need an identity, a roster and a policy
            (docs/secure-aggregation.md). The roster of members, or True for the file that FEDVEIL_ROSTER names. It
            excludes `limits`, which are left out unless they are given.
        identity: the server's signing key: every message is signed, and clients whose policy names its public key
            answer no other server. By default the file that FEDVEIL_IDENTITY names. Secure aggregation needs one.
        seed: of the order of clients' records and of the choice of nodes.
    """

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        example: Inputs,
        defence: str | AnyDefence = "veil",
        optimizer: Optimizer = torch.optim.Adam,
        *,
        schedule: Schedule | None = None,
        schedule_every: str = "epoch",
        clip_norm: float | None = None,
        loss: str | Loss | Function | None = None,
        whole_shard: bool = True,
        batch_size: int = 1024,
        rounds_per_epoch: int = 1,
        participation: float = 1.0,
        limits: Limits | None = Limits(),  # noqa: B008  (it is frozen)
        min_answers: int = 1,
        wait_for: int | None = None,
        timeout: float = 600.0,
        patience: float = 1800.0,
        attempts: int = 5,
        pause: float = 2.0,
        secure_aggregation: bool | Roster = False,
        identity: Identity | None = None,
        seed: int = 0,
    ) -> None:
        if loss is None:
            what = "no loss is named, and the server does not see the clients' targets"
            fix = 'loss="cross_entropy" for classes, loss="squared_error" for numbers'
            raise BadArgument(type(self).__name__, what, fix)
        if secure_aggregation and limits == Limits():
            limits = None
        super().__init__(
            model,
            defence,
            optimizer,
            schedule=schedule,
            schedule_every=schedule_every,
            clip_norm=clip_norm,
            loss=loss,
            limits=limits,
        )
        if self.defence.repeatable:
            what = f"{self.defence.name} draws from a test seed, and this server talks to a network"
            raise BadArgument(type(self).__name__, what, "leave entropy= and seed= out of the defence")
        wholes = {"min_answers": min_answers, "attempts": attempts, "batch_size": batch_size}
        for name, value in {**wholes, "rounds_per_epoch": rounds_per_epoch}.items():
            whole(type(self).__name__, name, value)
        for name, seconds in {"timeout": timeout, "patience": patience}.items():
            positive(type(self).__name__, name, seconds, f"{name}=600, in seconds")
        share(type(self).__name__, "participation", participation)
        self.inner = self.defence.base  # what travels; privacy on top is the server's
        self.record = find_record(self.inner)
        if self.record is None:
            fix = "enter it in the group fedveil.defences of your package's entry points"
            raise BadArgument(type(self).__name__, f"clients cannot find the defence {self.inner.name}", fix)
        self.engine, self.codec = engine, find_codec(self.defence)
        self.whole_shard, self.batch_size, self.seed = whole_shard, batch_size, seed
        self.participation, self.min_answers, self.wait_for = participation, min_answers, wait_for or min_answers
        self.timeout, self.patience, self.attempts, self.pause = timeout, patience, attempts, pause
        self._epoch, self._session, self._started = rounds_per_epoch, Entropy().token(), False
        example = moved(example, self.device)
        self.defence_server = self.defence.server(model, example, self.loss)
        own, roster = server_files()
        self._identity = identity or own
        self.secure: SecureRounds | None = None
        if secure_aggregation:
            known = secure_aggregation if isinstance(secure_aggregation, Roster) else roster
            if known is None or self._identity is None:
                what = "secure aggregation needs the roster of members and this server's signing key"
                fix = f"set {ROSTER} and {IDENTITY}, or pass secure_aggregation=Roster.read(...) and identity=..."
                raise BadArgument(type(self).__name__, what, fix)
            self.secure = SecureRounds(self, example, known)
        if self.defence_server.plan is not None:
            LOG.info("of the model's values, %s", shares_in_words(self.defence_server.plan))

    @property
    def rounds_per_epoch(self) -> int:
        """As it was given: the server does not know how many records clients have."""
        return self._epoch

    def close(self) -> None:
        """Let go of the transport, after the last round; under secure aggregation members forget the run's keys."""
        try:
            if self.secure is not None:
                self.secure.close()
        finally:
            self.engine.close()

    def exchange(self, seen: Seen | None = None) -> Aggregate:
        """Broadcast, collect, aggregate; again with a new secret while too few answers are in order."""
        if self.secure is not None:
            return self.secure.exchange()
        deadline, faults, finite = time.monotonic() + self.patience, list[Fault](), False
        for attempt in range(1, self.attempts + 1):
            guilty = {found.member for found in faults if found.guilty}
            nodes = self._nodes(deadline, guilty)
            began = time.perf_counter()
            own_round = self.defence_server.start_round(self.model)
            try:
                down, heard = self._ask(own_round, nodes, faults)
                finite, answered = finite or bool(heard), time.perf_counter()
                outcome = self._aggregate_replies(own_round, heard, faults, len(guilty - set(nodes)), seen)
            finally:
                own_round.release()  # no secret is left, however the attempt ends
            if outcome is not None and outcome.result is not None:
                counted = [answer for answer in heard if answer.member not in outcome.refused]
                spent = {"seconds_waiting": answered - began, "seconds_recovery": time.perf_counter() - answered}
                figures = _count_traffic(len(nodes), down, counted, attempt) | spent
                result = outcome.recorded([str(found) for found in faults[:KEPT_FAULTS]])
                return dataclasses.replace(result, figures={**result.figures, **figures})
            if attempt < self.attempts:
                time.sleep(self.pause)
        if faults and not finite and all(found.kind == "not finite" for found in faults):
            raise NonFiniteUpdate("all clients", faults[-1].text)
        wanted = f"{self.min_answers} answers in order"
        if self.limits and self.limits.needed() > self.min_answers:
            wanted += f", or the {self.limits.needed()} that {self.limits.aggregator} needs"
        raise self._too_few(f"{self.attempts} exchanges did not bring {wanted}", faults)

    def _aggregate_replies(
        self, own_round: AnyRound, heard: list[_Reply], faults: list[Fault], left_out: int, seen: Seen | None
    ) -> Outcome | None:
        """Aggregate valid replies; return None if there are too few. Refusals are added to the faults."""
        if len(heard) < self.min_answers:
            return None
        updates = {answer.member: answer.update for answer in heard}
        records = {answer.member: answer.records for answer in heard}
        if seen:
            seen(own_round.broadcast, list(updates.values()))
        if self.limits is None:
            sizes = [float(own) for own in records.values()]
            return Outcome(own_round.recover(list(updates.values()), sizes), {}, ())
        outcome = aggregate(
            own_round,
            updates,
            records,
            self.model,
            self.limits,
            past=self.history.records,
            left_out=left_out,
            least=self.min_answers,
        )
        for node, error in outcome.refused.items():
            self._note(refusal(node, error), faults)
        return outcome

    def _note(self, found: Fault, faults: list[Fault]) -> None:
        LOG.warning("round %d: %s", self.round, found)
        faults.append(found)

    def _too_few(self, what: str, faults: list[Fault]) -> TooFewAnswers:
        last = f"; the last fault was {faults[-1]}" if faults else ""
        fix = "look at the clients' logs; a new run resumes from the checkpoint"
        return TooFewAnswers(f"round {self.round}", what + last, fix)

    def _nodes(self, deadline: float, guilty: Set[Member]) -> list[Member]:
        """The nodes to ask, once enough are there: without those that answered wrongly, if the others are enough."""
        least = self.limits.needed() if self.limits else 1
        needed = self.min_answers if self._started else max(self.wait_for, self.min_answers, least)
        while len(nodes := self.engine.members()) < needed:
            if time.monotonic() >= deadline:
                raise self._too_few(f"{len(nodes)} nodes are there after {self.patience:g} s, not {needed}", [])
            time.sleep(min(0.5, self.patience))
        self._started = True
        innocent = [node for node in nodes if node not in guilty]
        nodes = innocent if len(innocent) >= self.min_answers else nodes
        count = max(self.min_answers, round(self.participation * len(nodes)))
        if count >= len(nodes):
            return nodes
        order = torch.randperm(len(nodes), generator=generator("nodes", self.seed, self.round))
        return [nodes[place] for place in sorted(order[:count].tolist())]

    def _ask(self, own_round: AnyRound, nodes: list[Member], faults: list[Fault]) -> tuple[int, list[_Reply]]:
        """Exchange messages once: return the bytes for each node and the valid replies; faults go to the list."""
        ask = self._make_ask(own_round)
        data, heard = write(ask), list[_Reply]()
        own = dict.fromkeys(nodes, b"")
        for node, reply in self._send(data, own, str(self.round), self.timeout):
            found = reply if isinstance(reply, Fault) else self._hear(own_round, ask, node, reply, len(heard))
            if isinstance(found, Fault):
                self._note(found, faults)
            else:
                heard.append(found)
        heard.sort(key=lambda answer: nodes.index(answer.member))  # sums do not depend on who was first
        return len(data), heard

    def _send(
        self, common: bytes, own: Mapping[Member, bytes], label: str, timeout: float, *, tagged: bool = False
    ) -> Iterator[tuple[Member, bytes | Fault]]:
        """One exchange, signed if this server has a key; messages that are `tagged` already need no signature."""
        if self._identity is not None and not tagged:
            made = {extra: sign(self._identity, common, extra) for extra in dict.fromkeys(own.values())}
            own = {member: made[extra] for member, extra in own.items()}
        return self.engine.ask(common, own, label=label, timeout=timeout)

    def _make_ask(self, own_round: AnyRound, secure: Mapping[str, Any] | None = None) -> Ask:
        """Return the message to clients; `secure` is the opening of secure aggregation."""
        values, tensors = self.codec.encode_broadcast(own_round.broadcast)
        assert self.record is not None
        return Ask(
            self._session,
            self.round,
            Entropy().token(),
            self.record.name,
            {name: getattr(self.inner, name) for name in self.inner.remote_settings},
            self.loss.name,
            self.loss.settings(),
            self.whole_shard,
            self.batch_size,
            self.seed,
            dict(secure or {}),
            values,
            tensors,
        )

    def _hear(self, own_round: AnyRound, ask: Ask, node: Member, data: bytes, position: int) -> _Reply | Fault:
        try:
            found = take(data, ask, self.codec, own_round.base, self.model, position)
        except FedveilError as error:
            return refusal(node, error)
        except Exception as error:  # nothing that a node sends may end the run
            return fault(node, "malformed", f"{type(error).__name__}: {error}")
        return _Reply(node, *found, len(data))


def refusal(node: Member, error: FedveilError) -> Fault:
    """Why an answer does not count."""
    if isinstance(error, BadArgument):
        return fault(node, "malformed", f"{error.where}: {error.what}")
    kinds: dict[type[FedveilError], str] = {StaleUpdate: "stale", NonFiniteUpdate: "not finite"}
    return fault(node, kinds.get(type(error), "refused"), error.what)


def _count_traffic(asked: int, down: int, heard: list[_Reply], attempt: int) -> dict[str, float]:
    records, up = sum(answer.records for answer in heard), sum(answer.size for answer in heard)
    figures: dict[str, float] = {"asked": asked, "bytes_down": down, "answers": len(heard), "records": records}
    figures |= {"bytes_up": round(up / len(heard)), "bytes_total": down * asked + up}
    figures["seconds_work"] = max(answer.seconds for answer in heard)
    if attempt > 1:
        figures["attempts"] = attempt
    return figures
