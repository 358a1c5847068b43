"""How a run ended, as summary.json and `fedveil train` have it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedveil.data import Data
from fedveil.defences.interface import AnyServer
from fedveil.federation.checkpoint import BEST, MODEL
from fedveil.federation.evaluate import METRICS
from fedveil.federation.server import Server
from fedveil.plain_json import read_json
from fedveil.runs.config import SCHEMA, check_schema

Figure = int | float | str | None


@dataclass(frozen=True)
class Budget:
    """The differential privacy that a run has spent; an infinite epsilon is None."""

    epsilon: float | None
    epsilon_replace: float | None
    delta: float


@dataclass(frozen=True)
class RunSummary:
    """How a run ended.

    Attributes:
        folder: of the run.
        rounds: number of rounds.
        metrics: test metrics of the last model, and `rmse` in the units of a standardised target.
        best: primary metric of the best model; None without an evaluation.
        coverage: fractions of the model's values by how a veil perturbs them; empty for other defences.
        budget: differential privacy; None without it.
        largest_error: largest relative error of a recovered gradient.
        seconds: duration of all rounds.
        repeat: the command that repeats the run.
        stopped: why it stopped early, or None.
    """

    folder: Path
    rounds: int
    metrics: Mapping[str, float]
    best: float | None
    coverage: Mapping[str, float]
    budget: Budget | None
    largest_error: float
    seconds: float
    repeat: str
    stopped: str | None = None

    def to_dict(self) -> dict[str, Figure]:
        """Return plain values by name, for a file."""
        has_best, budget = self.best is not None, self.budget
        return {
            "schema": SCHEMA,
            "folder": str(self.folder),
            "rounds": self.rounds,
            **self.metrics,
            "best": self.best,
            "model": str(self.folder / MODEL),
            **({"best_model": str(self.folder / BEST)} if has_best else {}),
            **self.coverage,
            **(vars(budget) if budget else {}),
            "largest_error": self.largest_error,
            "seconds": self.seconds,
            "repeat": self.repeat,
            **({"stopped": self.stopped} if self.stopped else {}),
        }


def read_rounds(folder: Path) -> int | None:
    """Return the number of rounds in a folder's summary; None if it is missing or damaged."""
    path = folder / "summary.json"
    try:
        rounds = check_schema(read_json(path), str(path)).get("rounds")
    except ValueError:  # a BadArgument is a ValueError
        return None
    return rounds if isinstance(rounds, int) else None


def summarise(server: Server, folder: Path, repeat: str, data: Data, patience: int | None = None) -> RunSummary:
    """Return the summary of a server that has finished."""
    history = server.history
    metrics = {name: history.last[name] for name in METRICS if name in history.last}
    if data.target_scale is not None and "mse" in metrics:
        metrics["rmse"] = math.sqrt(metrics["mse"]) * data.target_scale[1]
    return RunSummary(
        folder,
        server.round,
        metrics,
        server.best[0] if server.best else None,
        coverage(server.defence_server),
        budget(server.defence_server),
        max((record["error"] for record in history.records), default=0.0),
        history.records[-1]["seconds"] if history.records else 0.0,
        repeat,
        f"early, after {patience} evaluations without improvement" if server.stalled(patience) else None,
    )


def coverage(server: AnyServer) -> dict[str, float]:
    """Return the fractions of a model's values by how they are perturbed, and of those that known values reveal."""
    plan = server.plan
    return {} if plan is None else {**plan.shares, "revealed": plan.known.share}


def budget(server: AnyServer) -> Budget | None:
    """Return the privacy budget that a run has spent."""
    own = server.accountant
    if own is None:
        return None
    one, other = (value if math.isfinite(value) else None for value in (own.epsilon(), own.epsilon(replace=True)))
    return Budget(one, other, own.delta)
