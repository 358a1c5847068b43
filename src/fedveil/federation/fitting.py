"""The plan of `Server.fit`: how long to train, and when to evaluate and write checkpoints."""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fedveil.errors import BadArgument
from fedveil.federation import checkpoint
from fedveil.federation.history import RoundRecord
from fedveil.records.sources import Source

if TYPE_CHECKING:
    from fedveil.federation.results import RunDetails, Setting
    from fedveil.federation.server import Server

Callback = Callable[[RoundRecord], object]


class Tracker(ABC):
    """A callback of `fit` that is also called before the first round and after the last."""

    @abstractmethod
    def start(self, settings: "Mapping[str, Setting]", evaluates: bool) -> None:
        """Begin a run.

        Args:
            settings: the settings of the run, as in config.json.
            evaluates: whether the model is evaluated on test data.
        """

    @abstractmethod
    def __call__(self, record: RoundRecord) -> None:
        """Note the record of a round."""

    @abstractmethod
    def finish(self, folder: Path | None, failed: bool) -> None:
        """End the run.

        Args:
            folder: the run's folder, with its report page and models; None if `fit` was called without a folder.
            failed: whether `fit` raises an exception.
        """


@dataclass
class FitPlan:
    """The checked arguments of `fit`."""

    last: int  # number of the last round
    every: int  # rounds between evaluations or, without test data, between checkpoints
    test: Source | None
    patience: int | None
    callbacks: list[Callback]
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


@contextlib.contextmanager
def follow(server: "Server", plan: FitPlan, details: "RunDetails | None") -> Iterator[None]:
    """Write the files of a run to its folder, if it has one, and tell trackers when it begins and ends."""
    server.planned = plan.last
    trackers = [call for call in plan.callbacks if isinstance(call, Tracker)]
    if plan.folder is None and not trackers:
        yield
        return
    from fedveil.federation.results import RunDetails
    from fedveil.federation.run_folder import RunFolder, list_settings

    details, started = details or RunDetails(), list[Tracker]()
    failed = True
    try:
        for tracker in trackers:
            started.append(tracker)
            tracker.start({**list_settings(server), **details.settings}, plan.test is not None)
        with contextlib.nullcontext() if plan.folder is None else RunFolder(server, plan, plan.folder, details) as run:
            if run is not None:
                plan.callbacks.insert(0, run.append)
            yield
        failed = False
    finally:
        for tracker in started:
            tracker.finish(plan.folder, failed)
