"""The plan of `Server.fit`: how long to train, and when to evaluate and to write a checkpoint."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from fedveil.errors import BadArgument
from fedveil.federation import checkpoint
from fedveil.federation.history import Record
from fedveil.records.sources import Source

Callback = Callable[[Record], object]


@dataclass
class Plan:
    """The arguments of a `fit`, checked."""

    last: int  # round
    every: int  # rounds between evaluations, or without test data between checkpoints
    test: Source | None
    patience: int | None
    calls: Sequence[Callback]
    folder: Path | None
    checkpoint_every: int  # rounds; 0 for none but the others
    durable: bool  # every round must be on disk
    saved: float = field(default_factory=time.monotonic)

    def evaluates(self, number: int) -> bool:
        """Whether the model is evaluated after a round."""
        return self.test is not None and self.reaches(number)

    def reaches(self, number: int) -> bool:
        """Whether a round ends an interval, or the run."""
        return number % self.every == 0 or number >= self.last

    def saves(self, number: int) -> bool:
        """Whether a checkpoint is due after a round."""
        asked = self.checkpoint_every and number % self.checkpoint_every == 0
        return bool(self.durable or asked or self.reaches(number)) or self.is_late()

    def is_late(self) -> bool:
        """Whether the last checkpoint is too long ago."""
        return time.monotonic() - self.saved >= checkpoint.INTERVAL_SECONDS

    def note_save(self) -> None:
        """Count the time to the next checkpoint from now."""
        self.saved = time.monotonic()


def list_callbacks(given: Callback | Sequence[Callback] | None) -> Sequence[Callback]:
    """The callbacks as a list; whatever cannot be called is refused."""
    one = given is None or isinstance(given, str) or not isinstance(given, Sequence)
    calls: list[Any] = [] if given is None else [given] if one else list(cast("Sequence[Callback]", given))
    for call in calls:
        if not callable(call):
            raise BadArgument("fit", f"on_round is {call!r}", "a function of a round's record, or a list of them")
    return calls
