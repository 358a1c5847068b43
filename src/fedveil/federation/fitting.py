"""The plan of `Server.fit`: how long to train, and when to evaluate and write checkpoints."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedveil.errors import BadArgument
from fedveil.federation import checkpoint
from fedveil.federation.history import RoundRecord
from fedveil.records.sources import Source

Callback = Callable[[RoundRecord], object]


@dataclass
class FitPlan:
    """The checked arguments of `fit`."""

    last: int  # number of the last round
    every: int  # rounds between evaluations or, without test data, between checkpoints
    test: Source | None
    patience: int | None
    callbacks: Sequence[Callback]
    folder: Path | None
    checkpoint_every: int  # rounds; 0 for no additional checkpoints
    durable: bool  # whether every round must be saved to disk
    saved: float = field(default_factory=time.monotonic)  # time of the last checkpoint

    def ends_interval(self, number: int) -> bool:
        """Return whether a round is the last of an interval or of the run."""
        return number % self.every == 0 or number >= self.last

    def saves(self, number: int) -> bool:
        """Return whether a checkpoint is due after a round."""
        requested = self.checkpoint_every > 0 and number % self.checkpoint_every == 0
        late = time.monotonic() - self.saved >= checkpoint.INTERVAL_SECONDS
        return self.durable or requested or late or self.ends_interval(number)


def list_callbacks(on_round: Callback | Sequence[Callback] | None) -> list[Callback]:
    """Return the callbacks as a list; refuse objects that are not callable."""
    calls = list(on_round) if isinstance(on_round, Sequence) and not isinstance(on_round, str) else [on_round]
    for call in calls:
        if call is not None and not callable(call):
            fix = "pass a function that takes a round's record, or a list of functions"
            raise BadArgument("fit", f"on_round is {call!r}", fix)
    return [call for call in calls if callable(call)]
