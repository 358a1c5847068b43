"""`fedveil audit --harden`: what makes the veil harder to see through, measured against attackers that think."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedveil.report import Facts, Interval, Intervals, Page, Section, Table, Text, write
from fedveil.runs.config import Config
from fedveil.runs.folder import write_text
from fedveil.studies.agreement import mean_interval
from fedveil.studies.attack import Show, Shown
from fedveil.studies.audit.run import Settings, audit
from fedveil.studies.jobs import Cell, Result, run_cells

BASE: Mapping[str, Any] = {
    "data": "digits",
    "train_size": 500,
    "clients": 2,
    "epochs": 150,
    "groups": 10,
    "defence": "veil",
}
MEASURES: Mapping[str, Mapping[str, Any]] = {
    "as it is: m = 10": {},
    "m = 5": {"groups": 5},
    "m = 1": {"groups": 1},
    "no permutation": {"permute": False},
    "no factors": {"multiplicative": 1.0},
    "factors up to 100": {"multiplicative": 100.0},
    "additive noise x 100": {"additive": 100.0},
    "cross-entropy, m = 1": {"loss": "cross_entropy", "groups": 1},
    "whole shards, 150 rounds": {"whole_shard": True, "lr": 0.01},
    "no veil at all": {"defence": "plain", "groups": 1},
}
COLUMNS: Mapping[str, tuple[str, str, str]] = {
    "agreement as sent": ("as published", "agreement", "{:.1%}"),
    "centred": ("centred", "agreement", "{:.1%}"),
    "calibrated": ("calibrated", "agreement", "{:.1%}"),
    "membership AUC as sent": ("as published", "membership", "{:.3f}"),
    "calibrated, AUC": ("calibrated", "membership", "{:.3f}"),
    "record rebuilt, dB": ("aligned", "rebuilt", "{:.1f}"),
    "test accuracy": ("", "test", "{:.1%}"),
}
NOTE = (
    "Digits, 500 training records, two clients. Mean over seeds with Student's 95 % interval. Agreement with the true "
    "model on held-out records; membership of the other client's records by a loss threshold; PSNR of the victim's "
    "record (whole shards: the nearest of the victim's 64 records), where guessing gives what the last line of the "
    "table says."
)


def figure(found: Result, attacker: str, name: str) -> float | None:
    """One number of an audit; a plain model is its own best view."""
    if name == "test":
        return float(found["test"])
    if name == "rebuilt":
        built = found["rebuilt"]
        value = built.get(attacker, built.get("as published"))
        return float(value["value"]) if value else None
    figures = found["attackers"].get(attacker, found["attackers"]["as published"])
    return float(figures["membership"]["auc"]["value"] if name == "membership" else figures["agreement"]["value"])


def cells_of(seeds: int, trials: int, folder: Path, base: Mapping[str, Any]) -> dict[tuple[str, int], Cell]:
    """An audit for each measure and seed."""
    cells = {}
    for number, (name, changes) in enumerate(MEASURES.items()):
        for seed in range(seeds):
            config = Config(**{**base, **changes, "seed": seed})
            run = folder / "runs" / f"{number}-{seed}"
            arguments = {"config": config, "settings": Settings(trials), "folder": folder, "run": run}
            cells[name, seed] = Cell(f"{number}-{seed}", audit, arguments)
    return cells


def rows_of(results: Mapping[str, Sequence[Result]]) -> list[list[str]]:
    """A row a measure."""
    rows = []
    for name, found in results.items():
        failed = next((f["failed"] for f in found if "failed" in f), None)
        if failed:
            rows.append([name, f"failed: {failed}", *[""] * (len(COLUMNS) - 1)])
            continue
        cells = []
        for attacker, what, form in COLUMNS.values():
            values = [value for f in found if (value := figure(f, attacker, what)) is not None]
            cells.append(_text(values, form))
        rows.append([name, *cells])
    floors = [
        f["rebuilt"]["floor"]["value"] for found in results.values() for f in found if "floor" in f.get("rebuilt", {})
    ]
    chance = {"agreement as sent": "10.0%", "centred": "10.0%", "calibrated": "10.0%"}
    chance |= {
        "membership AUC as sent": "0.500",
        "calibrated, AUC": "0.500",
        "record rebuilt, dB": _text(floors, "{:.1f}"),
    }
    rows.append(["guessing", *(chance.get(column, "") for column in COLUMNS)])
    return rows


def _text(values: list[float], form: str) -> str:
    """Mean and interval."""
    if not values:
        return ""
    found = mean_interval(values)
    low, high = (form.format(found[end]) for end in ("low", "high"))
    return f"{form.format(found['value'])} [{low}, {high}]"


def harden(
    folder: Path,
    *,
    seeds: int = 5,
    trials: int = 10,
    workers: int | None = None,
    show: Show = lambda name, share, what: None,
    command: str = "",
    base: Mapping[str, Any] = BASE,
) -> Shown:
    """Run all measures with all seeds, and write hardening.json and report.html."""
    cells = cells_of(seeds, trials, folder, base)
    done = run_cells(list(cells.values()), folder / "results", workers=workers, show=show)
    results = {name: [done[cells[name, seed].name] for seed in range(seeds)] for name in MEASURES}
    header, rows = ["measure", *COLUMNS], rows_of(results)
    write_text(folder / "hardening.json", json.dumps({"command": command, "results": results}, indent=1) + "\n")
    sections: list[Section] = [Table("Result", header, rows, NOTE), *pictures(results)]
    sections.append(Text("How to read it", READING))
    sections.append(Facts("Configuration", {key: str(v) for key, v in dataclasses.asdict(Config(**base)).items()}))
    lead = f"{len(MEASURES)} settings, {seeds} seeds each, against a participant that thinks."
    write(Page("What hardens the veil", lead, sections, command), folder / "report.html")
    return Shown(header, rows, NOTE, sections)


READING = (
    "A measure helps against a participant that thinks only if its calibrated agreement, its calibrated membership AUC "
    "or its rebuilt records come nearer to guessing than those of the first line. One that changes only the view as "
    "sent does not help.",
)


def pictures(results: Mapping[str, Sequence[Result]]) -> list[Section]:
    """Calibrated agreement and rebuilt records of every measure."""
    drawn: list[Section] = []
    for title, column, guess in (
        ("Agreement of the calibrated model with the true one", "calibrated", 0.1),
        ("A victim's record, rebuilt: PSNR in dB", "record rebuilt, dB", None),
    ):
        attacker, what, _ = COLUMNS[column]
        rows = []
        for name, found in results.items():
            values = [v for f in found if "failed" not in f and (v := figure(f, attacker, what)) is not None]
            if values:
                interval = mean_interval(values)
                rows.append(Interval(name, interval["value"], interval["low"], interval["high"]))
            else:
                rows.append(Interval(name, None, missing="failed"))
        drawn.append(Intervals(title, column, rows, {"guessing": guess} if guess else {}))
    return drawn
