"""`fedveil audit --harden`: evaluate settings that harden the veil against adaptive attackers, and their cost."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedveil.attacks.observation import PUBLISHED
from fedveil.attacks.registry import ATTACKERS
from fedveil.attacks.scores import Estimate, average
from fedveil.errors import BadArgument
from fedveil.report import Facts, Intervals, Section, Text, count
from fedveil.runs.settings import Value, configure
from fedveil.studies.attack import read_federations
from fedveil.studies.audit.results import FLOOR, AuditResult
from fedveil.studies.audit.run import Audit, AuditOptions
from fedveil.studies.jobs import Failure, Result, StudyJob
from fedveil.studies.membership.attacks import Shadow, TrainShadow
from fedveil.studies.study import (
    JobGraph,
    Presentation,
    Study,
    failed_row,
    format_figures,
    format_percent,
    mark,
    read_texts,
)
from fedveil.studies.verdicts import MAX_COST, MAX_MEMBERSHIP

TEXTS = read_texts()["harden"]
Values = Mapping[str, Value]
FEDERATIONS = read_federations()
DP_ROUNDS, DP_RATE = 10, 0.01
UNIT_NOISE = {1: 3.7307, 3: 1.3906, 10: 0.4999}
"""Minimum noise multiplier for one round, by epsilon, at delta 1e-5; T rounds need sqrt(T) times this value."""
RECORD_NOISE = {8: 3.7713, 3: 8.6010, 1: 22.936}
"""Minimum noise multiplier for the rounds of `private_records`, by epsilon per record, at delta 1e-5."""
CROSS_ENTROPY: Values = {"loss": "cross_entropy", "groups": 1}
UNDEFENDED = {"squared_error": "no veil", "cross_entropy": "no veil, cross-entropy"}
MEASURE_KEYS = (
    *("defence", "loss", "label_smoothing", "weight_decay", "whole_shard", "decoys", "keep_noise", "seed"),
    *("clip", "noise", "delta", "unit", "epsilon", "rate"),
)
"""Configuration keys that only the measures may set."""
HardeningResults = dict[str, list[AuditResult | Failure]]  # one result per seed, by measure

COST, MEMBERSHIP = "cost, points", "membership, %"
FORMATS = {
    "accuracy, %": (".1f", 100),
    COST: (".1f", 100),
    MEMBERSHIP: (".1f", 100),
    "membership AUC": (".3f", 1),
    "rebuilt, dB": (".1f", 1),
    "guess, dB": (".1f", 1),
    **{f"agreement {name}, %": (".1f", 100) for name in (PUBLISHED, *ATTACKERS["veil"].models)},
}
"""The format and factor of each numeric column."""
HEADER = ("measure", "best attacker", *FORMATS)


def private_clients(epsilon: int) -> Values:
    """Return settings for client-level differential privacy: a few rounds on whole shards, with plain SGD.

    The number of rounds hardly matters. In T rounds, the model moves T times as far along the gradient. The noise of
    each round is sqrt(T) times as large, and its sum over T rounds is larger by another factor of sqrt(T).
    """
    noise = UNIT_NOISE[epsilon] * math.sqrt(DP_ROUNDS)
    rounds: Values = {"whole_shard": True, "epochs": DP_ROUNDS, "optimizer": "sgd", "momentum": 0.0, "lr": DP_RATE}
    return {**CROSS_ENTROPY, **rounds, "unit": "client", "clip": 1.0, "noise": noise, "delta": 1e-5}


def private_records(epsilon: int) -> Values:
    """Return settings for record-level differential privacy: 150 rounds, each with half of the records.

    The settings contain the noise multiplier instead of a budget, because attackers observe a few more rounds.
    """
    rounds: Values = {"epochs": 75, "rate": 0.5, "lr": 0.02, "clip": 0.5, "multiplicative": 1.0}
    return {**CROSS_ENTROPY, **rounds, "unit": "record", "noise": RECORD_NOISE[epsilon], "delta": 1e-5}


def measures(base: Values) -> dict[str, Values]:
    """Return the changes to the configuration for each measure, by name."""
    no_veil: Values = {"defence": "plain", "groups": 1}
    budgets = {f"DP, epsilon {epsilon}": private_clients(epsilon) for epsilon in UNIT_NOISE}
    budgets |= {f"DP per record, epsilon {epsilon}": private_records(epsilon) for epsilon in RECORD_NOISE}
    return {
        f"unchanged: m = {base.get('groups', 1)}": {},
        **({"m = 1": {"groups": 1}} if base.get("groups", 1) != 1 else {}),
        "noise kept across rounds": {"keep_noise": True},
        "whole shards": {"whole_shard": True, **FEDERATIONS["whole_shards"].get(str(base["data"]), {})},
        **FEDERATIONS["measures"],
        **{f"{name}, with the veil": changes for name, changes in budgets.items()},
        **{f"{name}, no veil": {**changes, **no_veil} for name, changes in budgets.items()},
        UNDEFENDED["squared_error"]: no_veil,
        UNDEFENDED["cross_entropy"]: {**CROSS_ENTROPY, **no_veil},
    }


def base_values(values: Values) -> Values:
    """Return the configuration values of the federation; the given values override the defaults for its data set."""
    for name in MEASURE_KEYS:
        if name in values:
            flag = name.replace("_", "-")
            raise BadArgument("fedveil audit --harden", f"the measures set --{flag}", f"leave out --{flag}")
    data = str(values.get("data", "digits"))
    bases = FEDERATIONS["harden"]
    defaults = bases.get(data, {name: bases["digits"][name] for name in ("clients", "epochs")})
    return {"data": data, "loss": "squared_error", **defaults, **values}


def default_options(base: Values) -> AuditOptions:
    """Return the options of each audit; there are fewer trials on cifar10, where a broadcast takes 20 CPU seconds."""
    return AuditOptions(trials=5, broadcasts=1) if base["data"] == "cifar10" else AuditOptions(trials=10, broadcasts=3)


@dataclass(frozen=True)
class Hardening:
    """The federation to harden, the number of seeds per measure, and the options of each audit."""

    base: Values = field(default_factory=lambda: base_values({}))
    seeds: int = 5
    options: AuditOptions = field(default_factory=lambda: AuditOptions(trials=10, broadcasts=3))
    names: tuple[str, ...] = ()  # measures to audit; all if empty

    @property
    def measures(self) -> dict[str, Values]:
        """The measures to audit, by name."""
        return {name: measure for name, measure in measures(self.base).items() if not self.names or name in self.names}


@dataclass(frozen=True)
class MeasureRow:
    """The results of one measure: the attacker that infers membership best, and the mean over seeds per column."""

    name: str
    attacker: str
    figures: Mapping[str, Estimate | None]

    def __str__(self) -> str:
        """Return the measure with its membership accuracy and its cost."""
        membership, cost = format_percent(self.figures[MEMBERSHIP]), format_percent(self.figures[COST])
        return f"{self.name} (membership {membership} %, cost {cost} points)"


def largest_mean(values: Mapping[str, Sequence[float]]) -> tuple[str, Estimate | None]:
    """Return the name whose values have the largest mean, and this mean.

    The function does not take the maximum for each seed first: the mean of the maxima would be above chance even if
    every attacker were at chance.
    """
    means = {name: average(numbers) for name, numbers in values.items() if numbers}
    name = max(means, key=lambda label: means[label].value, default="")
    return name, means.get(name)


def measure_row(name: str, audits: Sequence[AuditResult], references: Sequence[AuditResult]) -> MeasureRow:
    """Return the row of a measure; `references` contains the audits without a veil, with the same loss and seeds."""
    attackers = {label: [audit.attackers[label] for audit in audits] for label in audits[0].attackers}
    membership_scores = {
        label: [view.membership for view in views if view.membership] for label, views in attackers.items()
    }
    accuracies = {label: [score.best.accuracy.value for score in scores] for label, scores in membership_scores.items()}
    attacker, membership = largest_mean(accuracies)
    rebuilt = {label: [audit.rebuilt[label].value for audit in audits] for label in audits[0].rebuilt}
    guesses = rebuilt.pop(FLOOR, [])
    cost = (
        [undefended.test - audit.test for audit, undefended in zip(audits, references, strict=True)]
        if references
        else []
    )
    figures = {
        "accuracy, %": average([audit.test for audit in audits]),
        COST: average(cost) if cost else None,
        MEMBERSHIP: membership,
        "membership AUC": average([score.best.auc.value for score in membership_scores[attacker]])
        if attacker
        else None,
        "rebuilt, dB": largest_mean(rebuilt)[1],
        "guess, dB": average(guesses) if guesses else None,
    }
    for label, views in attackers.items():
        figures[f"agreement {label}, %"] = average([view.agreement.value for view in views], minimum=0.0, maximum=1.0)
    return MeasureRow(name, attacker, figures)


def measure_rows(request: Hardening, results: HardeningResults) -> Iterator[MeasureRow]:
    """Yield one row for each measure that did not fail for any seed."""
    audits_by_measure = {
        name: [result for result in seeds if isinstance(result, AuditResult)] for name, seeds in results.items()
    }
    complete = {name: audits for name, audits in audits_by_measure.items() if len(audits) == len(results[name])}
    for name, audits in complete.items():
        loss = configure({**request.base, **request.measures[name]}).training.loss
        yield measure_row(name, audits, complete.get(UNDEFENDED[str(loss)], []))


def verdict(rows: Sequence[MeasureRow]) -> str:
    """Return the label and the measures within both limits or, if there are none, the best at an acceptable cost."""
    limits = f"membership at most {100 * MAX_MEMBERSHIP:.0f} %, cost at most {100 * MAX_COST:.1f} points"
    figures = [(row, row.figures[MEMBERSHIP], row.figures[COST]) for row in rows]
    undefended = [membership for row, membership, _ in figures if row.name in UNDEFENDED.values() and membership]
    candidates = [
        (row, membership, cost)
        for row, membership, cost in figures
        if row.name not in UNDEFENDED.values() and membership and cost
    ]
    if not candidates or not undefended:
        return "No verdict: membership or the undefended federation was not measured."
    reference = max(undefended, key=lambda estimate: estimate.value)
    if reference.value <= MAX_MEMBERSHIP:
        return (
            f"No verdict: without a defence, membership is {format_percent(reference)} %, within the limit ({limits})."
        )
    passing_rows = [
        row for row, membership, cost in candidates if membership.high <= MAX_MEMBERSHIP and cost.high <= MAX_COST
    ]
    undecided_rows = [
        row for row, membership, cost in candidates if membership.low <= MAX_MEMBERSHIP and cost.low <= MAX_COST
    ]
    if undecided_rows:
        label = "GOOD ENOUGH" if passing_rows else "TOO FEW SEEDS"
        names = "; ".join(map(str, passing_rows or undecided_rows))
        return f"{label} ({limits}): {names}. Without a defence, membership is {format_percent(reference)} %."
    affordable_rows = [(membership.value, str(row)) for row, membership, cost in candidates if cost.value <= MAX_COST]
    best_text = f"best at that cost: {min(affordable_rows)[1]}; " if affordable_rows else ""
    return f"NONE GOOD ENOUGH ({limits}): {best_text}without a defence, membership is {format_percent(reference)} %."


class HardenStudy(Study[Hardening, HardeningResults]):
    """Audits of settings that harden the veil against adaptive attackers."""

    def audits(self, request: Hardening, folder: Path) -> dict[tuple[str, int], StudyJob[AuditResult]]:
        """Return an audit job for each measure and seed; each runs after the jobs that train its shadows.

        Measures that differ only in the veil train the same model, so they share shadows.
        """
        jobs: dict[tuple[str, int], StudyJob[AuditResult]] = {}
        shadow_jobs: dict[str, tuple[Path, tuple[StudyJob[Result], ...]]] = {}
        for index, (name, changes) in enumerate(request.measures.items()):
            for seed in range(request.seeds):
                config = configure({"defence": "veil", **request.base, **changes, "seed": seed})
                undefended = config.changed(defence="plain", groups=1, decoys=None, keep_noise=False)
                label = f"like-{index}-{seed}"
                if repr(undefended) not in shadow_jobs:
                    count = request.options.shadows
                    tasks = [TrainShadow(undefended, n, count, folder / label, everyone=True) for n in range(count)]
                    shadows = tuple(StudyJob(f"{label}-{task.number}", task, Shadow) for task in tasks)
                    shadow_jobs[repr(undefended)] = folder / label, shadows
                shadow_folder, earlier_jobs = shadow_jobs[repr(undefended)]
                task = Audit(config, request.options, folder / "runs" / f"{index}-{seed}", shadow_folder)
                jobs[name, seed] = StudyJob(f"{index}-{seed}", task, AuditResult, predecessors=earlier_jobs)
        return jobs

    def graph(self, request: Hardening, folder: Path) -> JobGraph[HardeningResults]:
        """Return the jobs for all shadows and audits; the results are grouped by measure."""
        audits = self.audits(request, folder)
        shadow_jobs = {job.name: job for audit in audits.values() for job in audit.predecessors}
        return JobGraph(
            [*shadow_jobs.values(), *audits.values()],
            lambda results: {
                name: [results[audits[name, seed]] for seed in range(request.seeds)] for name in request.measures
            },
        )

    def present(self, request: Hardening, results: HardeningResults) -> Presentation:
        """Return the verdict, the table, two charts, and an explanation of how to read them."""
        rows = list(measure_rows(request, results))
        measured_names = [row.name for row in rows]
        table = [[row.name, row.attacker, *format_figures(row.figures, FORMATS)] for row in rows]
        for name, result in results.items():
            if name not in measured_names:
                reason = next(failure.failed for failure in result if isinstance(failure, Failure))
                table.append(failed_row(name, len(HEADER), f"failed: {reason}"))
        members, costs = ([mark(row.name, row.figures[key], scale=100) for row in rows] for key in (MEMBERSHIP, COST))
        reading = [paragraph.format(rounds=DP_ROUNDS, rate=DP_RATE) for paragraph in TEXTS.reading]
        facts = {name: str(value) for name, value in configure(request.base).flat().items()}
        sections: list[Section] = [
            Intervals("Membership by the best attacker", "balanced accuracy, %", members, {"guessing": 50.0}),
            Intervals("Accuracy lost", "points", costs, {"allowed": 100 * MAX_COST}),
            Text("How to read it", [*([TEXTS.notes["one_seed"]] if request.seeds == 1 else []), *reading]),
            Facts("Configuration", facts),
        ]
        title = f"Hardening the veil: {request.base['data']}"
        description = f"{len(results)} settings, {count(request.seeds, 'seed')} each, against adaptive attackers."
        return Presentation(title, verdict(rows), HEADER, table, TEXTS.note, sections, description=description)


HARDEN = HardenStudy()
