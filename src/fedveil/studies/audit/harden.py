"""`fedveil audit --harden`: settings that strengthen the veil against adaptive attackers, and their cost."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedveil.attacks.observation import PUBLISHED
from fedveil.attacks.registry import ATTACKERS
from fedveil.errors import BadArgument
from fedveil.report import Facts, Intervals, Section, Text
from fedveil.runs.config import Config, Value, configure
from fedveil.studies.audit.results import FLOOR, AuditResult
from fedveil.studies.audit.run import Audit, AuditOptions
from fedveil.studies.estimates import Estimate, average, percent, text
from fedveil.studies.jobs import Failed, Job, Result
from fedveil.studies.membership.records import Shadow, TrainShadow
from fedveil.studies.study import JobGraph, Shown, Study
from fedveil.studies.tables import failed_row, mark
from fedveil.studies.verdicts import MAX_COST, MAX_MEMBERSHIP

Values = Mapping[str, Value]
BASES: Mapping[str, Values] = {
    "digits": {"train_size": 500, "clients": 2, "epochs": 150, "groups": 10},
    "cifar10": {"train_size": 1000, "test_size": 2000, "clients": 2, "epochs": 40, "groups": 10},
}
"""Federations by data set; other data use the clients and epochs of digits."""
WHOLE_SHARDS: Mapping[str, Values] = {"digits": {"lr": 0.01}, "cifar10": {"epochs": 150, "lr": 0.001}}
DP_ROUNDS, DP_RATE = 10, 0.01
UNIT_NOISE = {1: 3.7307, 3: 1.3906, 10: 0.4999}
"""Minimum noise multiplier of one round by epsilon, at delta 1e-5; T rounds need sqrt(T) times as much."""
CROSS_ENTROPY: Values = {"loss": "cross_entropy", "groups": 1}
UNDEFENDED = {"squared_error": "no veil at all", "cross_entropy": "no veil at all, cross-entropy"}
OWN_KEYS = (
    *("defence", "loss", "label_smoothing", "weight_decay", "whole_shard", "decoys", "keep_noise", "seed"),
    *("dp_clip", "dp_noise", "dp_delta"),
)
"""Keys that the measures set, and flags may not."""
LOOKS = {"cifar10": AuditOptions(trials=5, broadcasts=1)}  # a broadcast takes 20 CPU seconds
HardeningResults = dict[str, list[AuditResult | Failed]]  # by measure, one per seed


def private(epsilon: int) -> Values:
    """Return settings of client-level differential privacy: a few rounds of whole shards, by plain SGD.

    The number of rounds hardly matters: T rounds move T times as far along the gradient, and their noise sums to
    sqrt(T) sqrt(T) times the norm.
    """
    noise = UNIT_NOISE[epsilon] * math.sqrt(DP_ROUNDS)
    rounds: Values = {"whole_shard": True, "epochs": DP_ROUNDS, "optimizer": "sgd", "momentum": 0.0, "lr": DP_RATE}
    return {**CROSS_ENTROPY, **rounds, "dp_clip": 1.0, "dp_noise": noise, "dp_delta": 1e-5}


def measures(base: Values) -> dict[str, Values]:
    """Return the changes of the federation by the name of the measure."""
    plain: Values = {"defence": "plain", "groups": 1}
    budgets = {f"DP, epsilon {epsilon}": private(epsilon) for epsilon in UNIT_NOISE}
    return {
        f"as it is: m = {base.get('groups', 1)}": {},
        **({"m = 1": {"groups": 1}} if base.get("groups", 1) != 1 else {}),
        "noise kept over rounds": {"keep_noise": True},
        "whole shards": {"whole_shard": True, **WHOLE_SHARDS.get(str(base["data"]), {})},
        "cross-entropy, 2 decoys": {**CROSS_ENTROPY, "decoys": 2},
        "cross-entropy, 7 decoys": {**CROSS_ENTROPY, "decoys": 7},
        "label smoothing 0.1": {**CROSS_ENTROPY, "label_smoothing": 0.1},
        "label smoothing 0.3": {**CROSS_ENTROPY, "label_smoothing": 0.3},
        "weight decay 0.003": {"weight_decay": 0.003},
        "weight decay 0.01": {"weight_decay": 0.01},
        **{f"{name}, with the veil": changes for name, changes in budgets.items()},
        **{f"{name}, no veil": {**changes, **plain} for name, changes in budgets.items()},
        UNDEFENDED["squared_error"]: plain,
        UNDEFENDED["cross_entropy"]: {**CROSS_ENTROPY, **plain},
    }


def base_values(given: Values) -> Values:
    """Return the values of the federation: those given, over defaults that suit its data set."""
    for name in OWN_KEYS:
        if name in given:
            flag = name.replace("_", "-")
            raise BadArgument("fedveil audit --harden", f"it measures several --{flag}", f"leave out --{flag}")
    data = str(given.get("data", "digits"))
    usual = BASES.get(data, {name: BASES["digits"][name] for name in ("clients", "epochs")})
    return {"data": data, "loss": "squared_error", **usual, **given}


def default_options(base: Values) -> AuditOptions:
    """Return the options of the audit of each federation."""
    return LOOKS.get(str(base["data"]), AuditOptions(trials=10, broadcasts=3))


@dataclass(frozen=True)
class Hardening:
    """The federation, the number of seeds per measure, and the options of each audit."""

    base: Values = field(default_factory=lambda: base_values({}))
    seeds: int = 5
    options: AuditOptions = field(default_factory=lambda: AuditOptions(trials=10, broadcasts=3))
    only: tuple[str, ...] = ()  # names of measures; all if empty

    @property
    def measures(self) -> dict[str, Values]:
        """The measures to audit."""
        return {name: own for name, own in measures(self.base).items() if not self.only or name in self.only}


@dataclass(frozen=True)
class MeasureRow:
    """The figures of one measure: means over seeds, each with Student's interval.

    Attributes:
        accuracy: on held-out records.
        cost: loss of accuracy against the same federation without a veil, with the same loss and seed.
        agreement: of each attacker's model with the server's.
        attacker, membership, auc: the attacker that infers membership best, its balanced accuracy and AUC.
        rebuilt, floor: PSNR of a record rebuilt by the best attacker, and of the mean of the attacker's records.
    """

    name: str
    accuracy: Estimate
    cost: Estimate | None
    agreement: dict[str, Estimate]
    attacker: str
    membership: Estimate | None
    auc: Estimate | None
    rebuilt: Estimate | None
    floor: Estimate | None

    @property
    def undefended(self) -> bool:
        """Whether it is a reference."""
        return self.name in UNDEFENDED.values()


def mean_fraction(values: Sequence[float]) -> Estimate:
    """Return the mean of fractions; Student's interval ends at 0 and 1."""
    found = average(values)
    return Estimate(found.value, max(0.0, found.low), min(1.0, found.high))


def largest_mean(values: Mapping[str, Sequence[float]]) -> tuple[str, Estimate | None]:
    """Return the name with the largest mean, and that mean.

    The mean of each seed's maximum would be above chance where every attacker is at chance.
    """
    means = {name: average(own) for name, own in values.items() if own}
    name = max(means, key=lambda one: means[one].value, default="")
    return name, means.get(name)


def measure_row(name: str, audits: Sequence[AuditResult], plain: Sequence[AuditResult]) -> MeasureRow:
    """Return the figures of a measure; `plain` are the audits without a veil, with the same loss and seeds."""
    looks = {label: [one.attackers[label] for one in audits] for label in audits[0].attackers}
    members = {label: [look.membership for look in own if look.membership] for label, own in looks.items()}
    accuracies = {label: [one.best.accuracy.value for one in own] for label, own in members.items()}
    attacker, membership = largest_mean(accuracies)
    built = {label: [one.rebuilt[label].value for one in audits] for label in audits[0].rebuilt}
    floor = built.pop(FLOOR, [])
    cost = [without.test - one.test for one, without in zip(audits, plain, strict=True)] if plain else []
    return MeasureRow(
        name,
        average([one.test for one in audits]),
        average(cost) if cost else None,
        {label: mean_fraction([look.agreement.value for look in own]) for label, own in looks.items()},
        attacker,
        membership,
        average([one.best.auc.value for one in members[attacker]]) if attacker else None,
        largest_mean(built)[1],
        average(floor) if floor else None,
    )


def measure_rows(asked: Hardening, results: HardeningResults) -> Iterator[MeasureRow | tuple[str, str]]:
    """Yield one row per measure, or its name and why it failed."""
    done = {name: [one for one in found if isinstance(one, AuditResult)] for name, found in results.items()}
    complete = {name: own for name, own in done.items() if len(own) == len(results[name])}
    for name, found in results.items():
        if name in complete:
            loss = configure({**asked.base, **asked.measures[name]}).training.loss
            yield measure_row(name, complete[name], complete.get(UNDEFENDED[str(loss)], []))
        else:
            yield name, next(one.failed for one in found if isinstance(one, Failed))


def is_within(found: Estimate, limit: float) -> bool | None:
    """Whether an interval ends at a limit or below; None if it holds the limit."""
    return True if found.high <= limit else False if found.low > limit else None


def verdict(rows: Sequence[MeasureRow]) -> str:
    """Return the label with the measures within both limits, or with those that come nearest."""
    asked = f"membership at most {100 * MAX_MEMBERSHIP:.0f} %, cost at most {100 * MAX_COST:.1f} points"
    bare = [row.membership for row in rows if row.undefended and row.membership]
    found = [(row, row.membership, row.cost) for row in rows if not row.undefended and row.membership and row.cost]
    if not found or not bare:
        return "No verdict: membership or the undefended federation was not measured."
    top = max(bare, key=lambda one: one.value)
    if top.value <= MAX_MEMBERSHIP:
        return f"No verdict: membership without a defence is {percent(top)} %, within the limit ({asked})."
    inside = [(row, {is_within(m, MAX_MEMBERSHIP), is_within(c, MAX_COST)}) for row, m, c in found]
    good, unsure = [row for row, both in inside if both == {True}], [row for row, both in inside if False not in both]
    if unsure:
        label = "GOOD ENOUGH" if good else "TOO FEW SEEDS"
        return f"{label} ({asked}): {'; '.join(map(describe, good or unsure))}; undefended {percent(top)} %."
    cheap = [(m.value, row) for row, m, c in found if c.value <= MAX_COST]
    strong = [(c.value, row) for row, m, c in found if m.value <= MAX_MEMBERSHIP]
    near = [
        f"{what}: {describe(min(rows, key=lambda one: one[0])[1])}"
        for what, rows in (("best at that cost", cheap), ("cheapest with that membership", strong))
        if rows
    ]
    return f"NONE GOOD ENOUGH ({asked}): {'; '.join([*near, f'undefended {percent(top)} %'])}."


def describe(row: MeasureRow) -> str:
    """Return a measure with its two figures."""
    return f"{row.name} (membership {percent(row.membership)} %, cost {percent(row.cost)} points)"


def attacker_names() -> list[str]:
    """Return the attackers of the veil."""
    return [PUBLISHED, *ATTACKERS["veil"].models]


def header() -> list[str]:
    """Return the columns; those of attackers are the veil's."""
    others = ["accuracy, %", "cost, points", "membership, %", "membership AUC", "rebuilt, dB", "guess, dB"]
    return ["measure", "best on members", *others, *(f"agreement {name}, %" for name in attacker_names())]


def cells(row: MeasureRow) -> list[str]:
    """Return a row of the table."""
    agreement = [percent(row.agreement.get(name)) for name in attacker_names()]
    members = [percent(row.membership), text(row.auc, ".3f")]
    others = [percent(row.accuracy), percent(row.cost), *members, text(row.rebuilt), text(row.floor)]
    return [row.name, row.attacker, *others, *agreement]


def charts(rows: Sequence[MeasureRow]) -> list[Section]:
    """Return membership and its cost."""
    members = [mark(row.name, row.membership, scale=100) for row in rows]
    costs = [mark(row.name, row.cost, scale=100) for row in rows]
    return [
        Intervals("Membership by the best attacker", "balanced accuracy, %", members, {"guessing": 50.0}),
        Intervals("Accuracy lost", "points", costs, {"allowed": 100 * MAX_COST}),
    ]


NOTE = (
    "Mean over seeds with Student's 95 % interval. Cost: test accuracy below that of the same federation without a "
    "veil, with the same loss, paired by seed. Agreement with the server's model on held-out records. Membership of "
    "the other client's records: balanced accuracy and AUC of the attacker with the largest mean, by the attack that "
    "did best on records whose membership the attacker knows. PSNR of the victim's record by the best attacker, and of "
    "a guess (the mean of the attacker's records); whole shards and DP: of the nearest of the victim's 64 records. "
    "Noise that is kept over rounds is drawn once per seed."
)
ONE_SEED = "With one seed, figures have no intervals, and the verdict is that of one trial."
READING = (
    "A measure is good enough if both intervals end at their limits or below. If an interval holds its limit, there "
    "are too few seeds to tell. A measure helps if it brings an adaptive attacker nearer to guessing than the first "
    "row does; one that changes only the row as published does not help.",
    f"DP: {DP_ROUNDS} rounds of whole shards, SGD with learning rate {DP_RATE:g}, clipping norm 1, delta 1e-5. It "
    "protects whole clients, so that noise is measured by the contribution of one of them; with two clients, little of "
    "the model is left.",
)


class HardenStudy(Study[Hardening, HardeningResults]):
    """Settings of the veil against adaptive attackers."""

    name = "harden"
    summary = "settings that strengthen the veil against adaptive attackers"

    def audits(self, asked: Hardening, folder: Path) -> dict[tuple[str, int], Job[AuditResult]]:
        """Return an audit for each measure and seed, after the shadows that its attackers use.

        Measures that differ in the veil alone train the same model, and share their shadows.
        """
        jobs: dict[tuple[str, int], Job[AuditResult]] = {}
        known: dict[str, tuple[Path, tuple[Job[Result], ...]]] = {}
        for number, (name, changes) in enumerate(asked.measures.items()):
            for seed in range(asked.seeds):
                config = configure({"defence": "veil", **asked.base, **changes, "seed": seed})
                twin = config.changed(defence="plain", groups=1, decoys=None, keep_noise=False)
                label = f"like-{number}-{seed}"
                if repr(twin) not in known:
                    known[repr(twin)] = folder / label, self.shadows(twin, asked.options.shadows, folder / label)
                where, after = known[repr(twin)]
                work = Audit(config, asked.options, folder / "runs" / f"{number}-{seed}", where)
                jobs[name, seed] = Job(f"{number}-{seed}", work, AuditResult, after=after)
        return jobs

    def shadows(self, config: Config, count: int, folder: Path) -> tuple[Job[Result], ...]:
        """Return shadow federations like this one."""
        works = [TrainShadow(config, number, count, folder, everyone=True) for number in range(count)]
        return tuple(Job(f"{folder.name}-{work.number}", work, Shadow) for work in works)

    def graph(self, asked: Hardening, folder: Path) -> JobGraph[HardeningResults]:
        """Return all audits, each after its shadows; their results by measure."""
        audits = self.audits(asked, folder)
        before = {job.name: job for audit in audits.values() for job in audit.after}
        return JobGraph(
            [*before.values(), *audits.values()],
            lambda done: {name: [done[audits[name, n]] for n in range(asked.seeds)] for name in asked.measures},
        )

    def present(self, asked: Hardening, results: HardeningResults) -> Shown:
        """Return the verdict, the table, two charts, and how to read them."""
        found, columns = list(measure_rows(asked, results)), header()
        rows = [row for row in found if isinstance(row, MeasureRow)]
        table = [
            cells(row) if isinstance(row, MeasureRow) else failed_row(row[0], len(columns), f"failed: {row[1]}")
            for row in found
        ]
        facts = {name: str(value) for name, value in configure(asked.base).flat().items()}
        reading = [*([ONE_SEED] if asked.seeds == 1 else []), *READING]
        sections = [*charts(rows), Text("How to read it", reading), Facts("Configuration", facts)]
        seeds = f"{asked.seeds} seed{'s' if asked.seeds > 1 else ''}"
        lead = f"{len(found)} settings, {seeds} each, against adaptive attackers."
        title = f"Hardening the veil: {asked.base['data']}"
        return Shown(title, verdict(rows), columns, table, NOTE, sections, lead=lead)


HARDEN = HardenStudy()
