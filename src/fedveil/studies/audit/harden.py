"""`fedveil audit --harden`: what makes the veil harder to see through, measured against adaptive attackers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedveil.attacks.observed import PUBLISHED
from fedveil.report import Facts, Intervals, Section, Text
from fedveil.runs.config import Value, configure
from fedveil.studies.audit.results import Audited
from fedveil.studies.audit.run import Audit, Options
from fedveil.studies.estimates import Estimate, average, text
from fedveil.studies.jobs import Done, Failed, Job, Result
from fedveil.studies.study import Shown, Study
from fedveil.studies.tables import failed_row, mark

BASE: Mapping[str, Value] = dict(data="digits", train_size=500, clients=2, epochs=150, groups=10, defence="veil")
MEASURES: Mapping[str, Mapping[str, Value]] = {
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
COLUMNS: Mapping[str, tuple[str, str, str, float]] = {  # attacker, figure, form, scale
    "agreement as received, %": (PUBLISHED, "agreement", ".1f", 100),
    "offset removed, %": ("offset removed", "agreement", ".1f", 100),
    "own labels, %": ("own labels", "agreement", ".1f", 100),
    "membership AUC as received": (PUBLISHED, "membership", ".3f", 1),
    "own labels, AUC": ("own labels", "membership", ".3f", 1),
    "record rebuilt, dB": ("two broadcasts, own records", "rebuilt", ".1f", 1),
    "test accuracy, %": ("", "test", ".1f", 100),
}
NOTE = (
    "Digits, 500 training records, two clients. Mean over seeds with Student's 95 % interval. Agreement with the true "
    "model on held-out records; membership of the other client's records by a loss threshold; PSNR of the victim's "
    "record (whole shards: the nearest of the victim's 64 records), where guessing gives what the last line of the "
    "table says."
)
READING = (
    "A measure helps against an adaptive attacker only if its agreement with own labels, its membership AUC with own "
    "labels or its rebuilt records come nearer to guessing than those of the first line. One that changes only the "
    "model as received does not help.",
)
Hardened = dict[str, list[Audited | Failed]]


@dataclass(frozen=True)
class Hardening:
    """What is asked: seeds per measure, records to rebuild, and the federation."""

    seeds: int = 5
    trials: int = 10
    base: Mapping[str, Value] = field(default_factory=lambda: BASE)


def values_of(found: Sequence[Audited | Failed], column: str) -> list[float]:
    """One column of all seeds that did not fail; a plain model is its own best view."""
    attacker, name, _, _ = COLUMNS[column]
    audits = [one for one in found if isinstance(one, Audited)]
    if name == "test":
        return [one.test for one in audits]
    figures = [one.figure(attacker, name) or one.figure(PUBLISHED, name) for one in audits]
    return [figure.value for figure in figures if figure]


def mean_of(values: Sequence[float]) -> Estimate | None:
    """Their mean with its interval, if there are any."""
    return average(values) if values else None


def rows_of(results: Hardened) -> list[list[str]]:
    """One row per measure, and what guessing reaches."""
    rows = []
    for name, found in results.items():
        if failed := [one.failed for one in found if isinstance(one, Failed)]:
            rows.append(failed_row(name, 1 + len(COLUMNS), f"failed: {failed[0]}"))
            continue
        means = {column: mean_of(values_of(found, column)) for column in COLUMNS}
        rows.append([name, *(text(mean, *COLUMNS[column][2:]) for column, mean in means.items())])
    audits = [one for found in results.values() for one in found if isinstance(one, Audited)]
    floor = mean_of([one.rebuilt["floor"].value for one in audits if "floor" in one.rebuilt])
    return [*rows, ["guessing", "10.0", "10.0", "10.0", "0.500", "0.500", text(floor), ""]]


def charts(results: Hardened) -> list[Section]:
    """Agreement with own labels and rebuilt records of every measure."""
    wanted: list[tuple[str, str, dict[str, float]]] = [
        ("Agreement of the model fitted with own labels with the true one", "own labels, %", {"guessing": 10.0}),
        ("A victim's record, rebuilt: PSNR in dB", "record rebuilt, dB", {}),
    ]
    drawn: list[Section] = []
    for title, column, guess in wanted:
        scale = COLUMNS[column][3]
        values = {name: [scale * value for value in values_of(found, column)] for name, found in results.items()}
        drawn.append(Intervals(title, column, [mark(name, mean_of(own)) for name, own in values.items()], guess))
    return drawn


class HardenStudy(Study[Hardening, Hardened]):
    """Settings of the veil against adaptive attackers."""

    name = "harden"
    summary = "what makes the veil harder to see through, against adaptive attackers"

    def audits(self, asked: Hardening, folder: Path) -> dict[tuple[str, int], Job[Audited]]:
        """An audit for each measure and seed."""
        jobs = {}
        for number, (name, changes) in enumerate(MEASURES.items()):
            for seed in range(asked.seeds):
                config = configure({**asked.base, **changes, "seed": seed})
                work = Audit(config, Options(asked.trials), folder / "runs" / f"{number}-{seed}")
                jobs[name, seed] = Job(f"{number}-{seed}", work, Audited)
        return jobs

    def jobs(self, asked: Hardening, folder: Path) -> list[Job[Result]]:
        """All of them."""
        return list(self.audits(asked, folder).values())

    def collect(self, asked: Hardening, folder: Path, done: Done) -> Hardened:
        """By measure."""
        jobs = self.audits(asked, folder)
        return {name: [done[jobs[name, seed]] for seed in range(asked.seeds)] for name in MEASURES}

    def present(self, asked: Hardening, results: Hardened) -> Shown:
        """The table, two pictures, how to read them."""
        facts = {name: str(value) for name, value in configure(asked.base).flat().items()}
        sections = [*charts(results), Text("How to read it", READING), Facts("Configuration", facts)]
        lead = f"{len(MEASURES)} settings, {asked.seeds} seeds each, against adaptive attackers."
        return Shown("What hardens the veil", lead, ["measure", *COLUMNS], rows_of(results), NOTE, sections)


HARDEN = HardenStudy()
