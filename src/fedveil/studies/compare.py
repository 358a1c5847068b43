"""`fedveil compare`: the same federation under several defences and seeds, in one table and one page."""

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.data import Data
from fedveil.errors import BadArgument, Diverged
from fedveil.federation.evaluate import METRICS
from fedveil.federation.local import History
from fedveil.report import Facts, Page, Section, Table, Text, write
from fedveil.runs.config import CHOICES, Config, asks_privacy, load_data
from fedveil.runs.folder import federation_of, write_text
from fedveil.runs.page import cost_section, curve_sections
from fedveil.studies.demo import Shows

CONTROL = "control"
NOTES = (
    "control is plain training with one unit of noise in the last place of every gradient: what rounding alone does. A "
    "defence that loses nothing stays as near to plain as that.",
    "SPN is our re-implementation; no code of its authors is public. Settings are the defaults of each defence unless "
    "the command says otherwise; they are not tuned to this data.",
)
PRIVATE = (
    "Every run draws its own noise for differential privacy, so that curves part by that noise too, the control's "
    "included. Epsilon is a client's, for all rounds together, and does not bind the server."
)


@dataclass(frozen=True)
class Run:
    """One defence with one seed; `failed` says why there is no result."""

    defence: str
    seed: int
    history: History
    failed: str | None = None

    @property
    def bytes(self) -> float:
        """Down and up, a client and round, on average."""
        both = [r.get("bytes_down", 0) + r.get("bytes_up", 0) for r in self.history.records]
        return statistics.fmean(both) if both else 0.0


def check_defences(
    names: Sequence[str], known: Sequence[str] = (*CHOICES["defence"], CONTROL), flag: str = "--defences"
) -> list[str]:
    """Refuse a name that is not known, or given twice."""
    for number, name in enumerate(names):
        if name not in known:
            raise BadArgument(flag, f"there is no defence {name!r}", f"use some of {', '.join(known)}")
        if name in names[:number]:
            raise BadArgument(flag, f"{name!r} is there twice")
    if not names:
        raise BadArgument(flag, "there is none", f"use some of {', '.join(known)}")
    return list(names)


def run_one(config: Config, data: Data, defence: str, seed: int, show: Callable[[dict[str, Any]], None]) -> Run:
    """Train once."""
    kind = {"defence": "plain", "rounding": seed + 1} if defence == CONTROL else {"defence": defence}
    own = dataclasses.replace(config, seed=seed, **kind)
    federation = federation_of(own, data)
    try:
        federation.fit(own.epochs, test=(data.test.inputs, data.test.targets), on_round=show)
    except Diverged as error:
        return Run(defence, seed, federation.history, f"{error.where}: {error.what}")
    return Run(defence, seed, federation.history)


def apart(run: Run, plain: Run, metric: str) -> float:
    """The largest distance between two curves."""
    pairs = zip(run.history.curve(metric), plain.history.curve(metric), strict=False)
    return max((abs(a - b) for (_, a), (_, b) in pairs), default=0.0)


def rows_of(runs: Sequence[Run], metric: str, active: int) -> list[list[str]]:
    """A row a defence: metric with spread over seeds, distance from plain, seconds, bytes of `active` clients."""
    plain = {run.seed: run for run in runs if run.defence == "plain" and not run.failed}
    rows = []
    for defence in dict.fromkeys(run.defence for run in runs):
        own = [run for run in runs if run.defence == defence]
        failed = [run for run in own if run.failed]
        if failed:
            rows.append([defence, f"failed with seed {failed[0].seed}", "", "", "", ""])
            continue
        ends = [run.history.last[metric] for run in own]
        spread = f"{statistics.fmean(ends):.4f} ± {statistics.stdev(ends) if len(ends) > 1 else 0.0:.4f}"
        beside = [apart(run, plain[run.seed], metric) for run in own if run.seed in plain]
        far = f"{max(beside):.1e}" if beside and defence != "plain" else ""
        seconds = statistics.fmean(run.history.records[-1]["seconds"] for run in own)
        traffic = statistics.fmean(run.bytes for run in own)
        rows.append([defence, spread, far, f"{seconds:.1f}", f"{traffic:,.0f}", f"{active * traffic:,.0f}"])
    return rows


def spent_by(runs: Sequence[Run]) -> str:
    """Epsilon at the end, the most of a defence's runs; none of a run that failed."""
    if any(run.failed for run in runs):
        return ""
    return f"{max(run.history.records[-1].get('epsilon', math.inf) for run in runs):.3g}"


HEADER = ("defence", "test {}", "apart from plain", "seconds", "bytes a client and round", "bytes a round")


def run_comparison(
    config: Config,
    defences: Sequence[str],
    seeds: int,
    folder: Path,
    opens: Callable[[int, str], AbstractContextManager[Shows]],
    command: str,
) -> tuple[list[str], list[list[str]]]:
    """Run all of them and write the page; returns the table's header and rows."""
    names = check_defences(defences)
    if seeds < 1:
        raise BadArgument("--seeds", f"must be at least 1, got {seeds}")
    data = load_data(config)
    runs = []
    for seed in range(config.seed, config.seed + seeds):
        for name in names:
            with opens(config.epochs, f"{name:<8} seed {seed}") as progress:
                runs.append(run_one(config, data, name, seed, progress.show))
    metric = next((m for m in METRICS for run in runs if m in run.history.last), METRICS[0])
    header = [title.format(metric) for title in HEADER]
    rows = rows_of(runs, metric, max(1, round(config.participation * config.clients)))
    if asks_privacy(config):
        header.append("epsilon")
        rows = [[*row, spent_by([run for run in runs if run.defence == row[0]])] for row in rows]
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"defence": run.defence, "seed": run.seed, **r}) for run in runs for r in run.history.records]
    write_text(folder / "metrics.jsonl", "".join(line + "\n" for line in lines))
    write_page(folder / "report.html", config, data, runs, header, rows, command)
    return header, rows


def write_page(
    path: Path,
    config: Config,
    data: Data,
    runs: Sequence[Run],
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    command: str,
) -> None:
    """The table, curves of the first seed, cost, configuration."""
    first: Mapping[str, History] = {
        run.defence: run.history for run in runs if run.seed == config.seed and run.history.records
    }
    seeds = len({run.seed for run in runs})
    note = f"Mean and standard deviation over {seeds} seed{'s' if seeds > 1 else ''}; bytes without names and shapes."
    failures = [f"{run.defence}, seed {run.seed}: {run.failed}" for run in runs if run.failed]
    sections: list[Section] = [
        Table("Result", header, rows, note),
        *([Text("Failed", failures)] if failures else []),
        Text("How to read it", [*NOTES, *([PRIVATE] if asks_privacy(config) else [])]),
        *curve_sections(first),
        cost_section(first),
        Facts("Configuration", {key: str(value) for key, value in dataclasses.asdict(config).items()}),
    ]
    lead = (
        f"{len(first)} ways to train {config.model} on {data.name} with {config.clients} clients. Curves: first seed."
    )
    write(Page(f"{data.name}, {config.model}: defences compared", lead, sections, command), path)
