"""The settings of rounds, and rounds without secure aggregation."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from fedveil.checks import check_count, check_fraction, check_positive
from fedveil.defences.interface import AnyRound
from fedveil.errors import NonFiniteUpdate
from fedveil.federation.history import History
from fedveil.federation.limits import Limits, aggregate
from fedveil.federation.protocol import AnyReply, Engine, Fault, FaultLog, Member, describe_refusal
from fedveil.scheme.result import Aggregate

Observer = Callable[[Any, Sequence[Any]], object]  # type: ignore[explicit-any]
"""Called with the broadcast of a round and the clients' updates (one update if clients are fused)."""
FUSED_PASS = "the pass shared by all clients"


@dataclass(frozen=True)
class RoundPolicy:
    """The settings of a round: the number of clients to ask, timeouts, and the number of attempts.

    Attributes:
        participation: fraction of the clients that are asked in a round.
        min_answers: the minimum number of valid replies in a round.
        wait_for: the minimum number of clients before the first round; by default, `min_answers`.
        timeout: timeout of an exchange of messages in seconds.
        patience: seconds to wait for clients in a round before giving up.
        attempts: maximum number of attempts at a round before giving up.
        pause: seconds between attempts.
    """

    participation: float = 1.0
    min_answers: int = 1
    wait_for: int | None = None
    timeout: float = 600.0
    patience: float = 1800.0
    attempts: int = 5
    pause: float = 2.0

    def check(self, where: str) -> None:
        """Refuse values that are out of range."""
        check_fraction(where, "participation", self.participation)
        for name in ("min_answers", "attempts", "wait_for"):
            if (value := getattr(self, name)) is not None:
                check_count(where, name, value)
        for name in ("timeout", "patience"):
            check_positive(where, name, getattr(self, name), f"set {name}=600, in seconds")


class RoundKind(Protocol):
    """The interface of rounds with and without secure aggregation.

    Attributes:
        min_clients: the minimum number of clients.
        answer_time: time at which the last reply of an attempt arrived.
    """

    min_clients: int
    answer_time: float

    def select(self, round_number: int, members: list[Member]) -> list[Member]:
        """Return the clients that may be asked in this attempt; by default, all of them."""
        return members

    def collect(
        self,
        round_number: int,
        defence_round: AnyRound,
        members: Sequence[Member],
        faults: FaultLog,
        observer: Observer | None,
    ) -> Aggregate | None:
        """Ask clients once and aggregate their replies; return None if there are too few replies."""

    def close(self) -> None:
        """End the run; by default, do nothing."""
        return


class ClearRound(RoundKind):
    """Rounds in which the server sees each update.

    Args:
        engine: sends messages to the clients.
        model: the server's model.
        history: the history of the run.
        limits: bounds on each client.
        min_answers: the minimum number of valid replies.
    """

    def __init__(
        self, engine: Engine, model: nn.Module, history: History, limits: Limits | None, min_answers: int
    ) -> None:
        self.engine, self._model, self._history, self._limits = engine, model, history, limits
        self.min_answers, self.answer_time = min_answers, 0.0
        self.min_clients = limits.min_clients() if limits else 1

    def collect(
        self,
        round_number: int,
        defence_round: AnyRound,
        members: Sequence[Member],
        faults: FaultLog,
        observer: Observer | None,
    ) -> Aggregate | None:
        """Ask clients once and aggregate their replies; return None if there are too few replies."""
        num_left_out = len(faults.wrong_members.difference(members)) if faults.faults else 0
        replies: list[AnyReply] = []
        for answer in self.engine.ask(round_number, defence_round, members):
            if isinstance(answer, Fault):
                faults.add(answer)
            else:
                replies.append(answer)
        self.answer_time = time.perf_counter()
        if sum([len(reply.members) for reply in replies]) < self.min_answers:
            return None
        if len(replies) < len(members) or self.engine.traffic:
            replies.sort(key=lambda reply: members.index(reply.members[0]))  # sums must not depend on arrival order
        if observer:
            observer(defence_round.broadcast, [reply.update for reply in replies])
        limits, past_records = self._limits, self._history.records
        if limits is not None:
            result, refusals = aggregate(
                defence_round, replies, self._model, limits, past_records, num_left_out, self.min_answers
            )
            for member, error in refusals.items():
                faults.add(describe_refusal(member, error))
            replies = [reply for reply in replies if reply.members[0] not in refusals]
        else:
            result = _recover(defence_round, replies)
        if result is None or self.engine.traffic is None:
            return result
        counts = {"answers": len(replies), "records": sum(reply.records for reply in replies)}
        return dataclasses.replace(result, figures={**result.figures, **counts})


def _recover(defence_round: AnyRound, replies: Sequence[AnyReply]) -> Aggregate:
    """Recover the weighted mean; in errors, replace the position of a client with the client's name."""
    try:
        return defence_round.recover([reply.update for reply in replies], [float(reply.records) for reply in replies])
    except NonFiniteUpdate as error:
        client_names = {f"client {position}": f"client {reply.members[0]}" for position, reply in enumerate(replies)}
        client = FUSED_PASS if len(replies[0].members) > 1 else client_names.get(error.where, error.where)
        raise NonFiniteUpdate(client, f"{error.what}, although the records are finite") from error
