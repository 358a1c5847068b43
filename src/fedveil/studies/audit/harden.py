"""`fedveil audit --harden`: what makes the veil harder to see through, against adaptive attackers, and at what cost."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedveil.attacks.observed import PUBLISHED
from fedveil.defences.registry import find
from fedveil.errors import BadArgument
from fedveil.report import Facts, Intervals, Section, Text
from fedveil.runs.config import Config, Value, configure
from fedveil.studies.audit.results import Audited
from fedveil.studies.audit.run import Audit, Options
from fedveil.studies.estimates import Estimate, average, percent, text
from fedveil.studies.jobs import Done, Failed, Job, Result
from fedveil.studies.membership.records import Shadow, TrainShadow
from fedveil.studies.study import Shown, Study
from fedveil.studies.tables import failed_row, mark

Values = Mapping[str, Value]
BASES: Mapping[str, Values] = {
    "digits": {"train_size": 500, "clients": 2, "epochs": 150, "groups": 10},
    "cifar10": {"train_size": 1000, "test_size": 2000, "clients": 2, "epochs": 40, "groups": 10},
}
"""Federations by data set; other data get the first one's clients, epochs and groups."""
WHOLE_SHARDS: Mapping[str, Values] = {"digits": {"lr": 0.01}, "cifar10": {"epochs": 150, "lr": 0.001}}
DP_ROUNDS, DP_RATE = 10, 0.01
UNIT_NOISE = {1: 3.7307, 3: 1.3906, 10: 0.4999}
"""The least noise, by the epsilon that one round of it may spend at delta 1e-5; T rounds need sqrt(T) times as much."""
CROSS_ENTROPY: Values = {"loss": "cross_entropy", "groups": 1}
UNDEFENDED = {"squared_error": "no veil at all", "cross_entropy": "no veil at all, cross-entropy"}
MOST_MEMBERSHIP, MOST_COST = 0.52, 0.005
OWN_KEYS = (
    *("defence", "loss", "label_smoothing", "weight_decay", "whole_shard", "decoys", "keep_noise", "seed"),
    *("dp_clip", "dp_noise", "dp_delta"),
)
"""What the measures set themselves."""
LOOKS = {"cifar10": Options(trials=5, broadcasts=1)}  # a broadcast takes 20 CPU seconds
Hardened = dict[str, list[Audited | Failed]]


def private(epsilon: int) -> Values:
    """Differential privacy of clients, at that epsilon: a few rounds of whole shards, by plain SGD.

    The number of rounds hardly matters: T of them go T times as far along the gradient, with noise sqrt(T) sqrt(T)
    times as long.
    """
    noise = UNIT_NOISE[epsilon] * math.sqrt(DP_ROUNDS)
    rounds: Values = {"whole_shard": True, "epochs": DP_ROUNDS, "optimizer": "sgd", "momentum": 0.0, "lr": DP_RATE}
    return {**CROSS_ENTROPY, **rounds, "dp_clip": 1.0, "dp_noise": noise, "dp_delta": 1e-5}


def measures(base: Values) -> dict[str, Values]:
    """What is changed in the federation, by name."""
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


def base_of(given: Values) -> Values:
    """The federation: what is given, over what suits its data set."""
    for name in OWN_KEYS:
        if name in given:
            flag = name.replace("_", "-")
            raise BadArgument("fedveil audit --harden", f"it measures several --{flag}", f"leave out --{flag}")
    data = str(given.get("data", "digits"))
    usual = BASES.get(data, {name: BASES["digits"][name] for name in ("clients", "epochs")})
    return {"data": data, "loss": "squared_error", **usual, **given}


def looks_of(base: Values) -> Options:
    """How an audit looks at each federation, unless it is said."""
    return LOOKS.get(str(base["data"]), Options(trials=10, broadcasts=3))


@dataclass(frozen=True)
class Hardening:
    """What is asked: the federation, seeds per measure, and how an audit looks at each."""

    base: Values = field(default_factory=lambda: base_of({}))
    seeds: int = 5
    options: Options = field(default_factory=lambda: Options(trials=10, broadcasts=3))
    only: tuple[str, ...] = ()  # measures; by default all

    @property
    def measures(self) -> dict[str, Values]:
        """Those that are asked for."""
        return {name: own for name, own in measures(self.base).items() if not self.only or name in self.only}


@dataclass(frozen=True)
class Row:
    """The figures of one measure: means over seeds, each with Student's interval.

    Attributes:
        accuracy: on held-out records.
        cost: how much lower it is than without a veil, with the same loss and seed.
        agreement: of each attacker's model with the server's.
        attacker, membership, auc: the attacker that infers membership best, its balanced accuracy and AUC.
        rebuilt, floor: PSNR of a record rebuilt by the best attacker, and by the mean of the attacker's own records.
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


def mean_share(values: Sequence[float]) -> Estimate:
    """The mean of shares; Student's interval ends at 0 and 1."""
    found = average(values)
    return Estimate(found.value, max(0.0, found.low), min(1.0, found.high))


def best_of(values: Mapping[str, Sequence[float]]) -> tuple[str, Estimate | None]:
    """The name with the largest mean, and that mean.

    The largest of each seed would be above chance where every attacker is at chance.
    """
    means = {name: average(own) for name, own in values.items() if own}
    name = max(means, key=lambda one: means[one].value, default="")
    return name, means.get(name)


def row_of(name: str, audits: Sequence[Audited], plain: Sequence[Audited]) -> Row:
    """The figures of a measure; `plain` are the audits without a veil, of the same loss, in the order of seeds."""
    looks = {label: [one.attackers[label] for one in audits] for label in audits[0].attackers}
    members = {label: [look.membership for look in own if look.membership] for label, own in looks.items()}
    attacker, membership = best_of({label: [one.best.accuracy.value for one in own] for label, own in members.items()})
    built = {label: [one.rebuilt[label].value for one in audits] for label in audits[0].rebuilt}
    floor = built.pop("floor", [])
    cost = [without.test - one.test for one, without in zip(audits, plain, strict=True)] if plain else []
    return Row(
        name,
        average([one.test for one in audits]),
        average(cost) if cost else None,
        {label: mean_share([look.agreement.value for look in own]) for label, own in looks.items()},
        attacker,
        membership,
        average([one.best.auc.value for one in members[attacker]]) if attacker else None,
        best_of(built)[1],
        average(floor) if floor else None,
    )


def rows_of(asked: Hardening, results: Hardened) -> Iterator[Row | tuple[str, str]]:
    """One row per measure, or its name and why it failed."""
    whole = {
        name: own
        for name, found in results.items()
        if len(own := [o for o in found if isinstance(o, Audited)]) == len(found)
    }
    for name, found in results.items():
        if name in whole:
            loss = configure({**asked.base, **asked.measures[name]}).training.loss
            yield row_of(name, whole[name], whole.get(UNDEFENDED[str(loss)], []))
        else:
            yield name, next(one.failed for one in found if isinstance(one, Failed))


def holds(row: Row) -> bool | None:
    """Whether a measure is good enough and cheap enough, by the ends of its intervals; None if they leave it open."""
    assert row.membership
    assert row.cost
    if row.membership.high <= MOST_MEMBERSHIP and row.cost.high <= MOST_COST:
        return True
    return False if row.membership.low > MOST_MEMBERSHIP or row.cost.low > MOST_COST else None


def verdict(rows: Sequence[Row]) -> str:
    """Whether any measure holds the best membership attacker to 52 % at a cost of at most 0.5 points of accuracy."""
    held = f"holds the best membership attacker to {100 * MOST_MEMBERSHIP:.0f} %"
    price = f"at a cost of at most {100 * MOST_COST:.1f} points of accuracy"
    tried = [row for row in rows if not row.undefended and row.membership and row.cost]
    bare = [row.membership for row in rows if row.undefended and row.membership]
    if not tried or not bare:
        return "There is no verdict: membership or the undefended federation was not measured."
    most = max(bare, key=lambda one: one.value)
    if most.value <= MOST_MEMBERSHIP:
        return f"There is no verdict: without a defence membership is found at {percent(most)} %, no more than asked."
    good, unsure = ([row for row in tried if holds(row) is wanted] for wanted in (True, None))
    if good:
        return f"{'; '.join(map(_said, good))}: {held} {price}."
    if unsure:
        return f"There are too few seeds to tell which setting {held} {price}: perhaps {'; '.join(map(_said, unsure))}."
    cheap = [row for row in tried if _cost(row) <= MOST_COST]
    near = f" The best at that cost is {_said(min(cheap, key=_membership))}." if cheap else ""
    dear = [row for row in tried if _membership(row) <= MOST_MEMBERSHIP]
    paid = f" The cheapest that {held} is {_said(min(dear, key=_cost))}." if dear else f" None {held} at any cost."
    return f"No setting {held} {price}.{near}{paid}"


def one_line(rows: Sequence[Row]) -> str:
    """The verdict in one sentence: whether a measure is good enough, and which comes nearest."""
    asked = (
        f"the best membership attacker to {100 * MOST_MEMBERSHIP:.0f} % for {100 * MOST_COST:.1f} points of accuracy"
    )
    tried = [row for row in rows if not row.undefended and row.membership and row.cost]
    bare = [row.membership.value for row in rows if row.undefended and row.membership]
    if not tried or not bare or max(bare) <= MOST_MEMBERSHIP:
        return verdict(rows)
    good, unsure = ([row for row in tried if holds(row) is wanted] for wanted in (True, None))
    cheap = good or unsure or [row for row in tried if _cost(row) <= MOST_COST]
    if not cheap:
        return f"No setting holds {asked}: none costs so little."
    best = min(cheap, key=_membership)
    found = f"{100 * _membership(best):.1f} %, {100 * max(bare):.1f} % without a defence"
    if good:
        return f"At least one setting holds {asked}: {best.name} ({found})."
    if unsure:
        return f"Too few seeds to tell if {best.name} holds {asked} ({found})."
    return f"No setting holds {asked}; {best.name} comes nearest ({found})."


def _membership(row: Row) -> float:
    assert row.membership
    return row.membership.value


def _cost(row: Row) -> float:
    assert row.cost
    return row.cost.value


def _said(row: Row) -> str:
    return f"{row.name} (membership {percent(row.membership)} %, cost {percent(row.cost)} points)"


def header_of() -> list[str]:
    """The columns; those of attackers are the veil's."""
    agreement = [f"agreement {name}, %" for name in labels()]
    others = ["accuracy, %", "cost, points", "membership, %", "membership AUC", "rebuilt, dB", "guess, dB"]
    return ["measure", "best on members", *others, *agreement]


def labels() -> list[str]:
    """Attackers of the veil."""
    return [PUBLISHED, *find("veil").attackers]


def cells_of(row: Row) -> list[str]:
    """A row of the table."""
    agreement = [percent(row.agreement.get(name)) for name in labels()]
    members = [percent(row.membership), text(row.auc, ".3f")]
    others = [percent(row.accuracy), percent(row.cost), *members, text(row.rebuilt), text(row.floor)]
    return [row.name, row.attacker, *others, *agreement]


def charts(rows: Sequence[Row]) -> list[Section]:
    """Membership beside what it costs."""
    members = [mark(row.name, row.membership, scale=100) for row in rows]
    costs = [mark(row.name, row.cost, scale=100) for row in rows]
    return [
        Intervals("Membership by the best attacker", "balanced accuracy, %", members, {"guessing": 50.0}),
        Intervals("Accuracy lost", "points", costs, {"allowed": 100 * MOST_COST}),
    ]


NOTE = (
    "Mean over seeds with Student's 95 % interval. Cost: test accuracy below that of the same federation without a "
    "veil, with the same loss, paired by seed. Agreement with the server's model on held-out records. Membership of "
    "the other client's records: balanced accuracy and AUC of the attacker with the largest mean, by the attack that "
    "did best on records whose membership the attacker knows. PSNR of the victim's record by the best attacker, and of "
    "a guess (the mean of the attacker's own records); whole shards and DP: of the nearest of the victim's 64 records. "
    "Noise that is kept over rounds is one draw per seed."
)
ONE_SEED = "There is one seed, so that figures have no intervals, and the verdict is that of one trial."
READING = (
    "A measure is good enough if the interval of membership ends at 52 % or below, and that of its cost at 0.5 points "
    "or below. If an interval holds its limit, there are too few seeds to tell.",
    "A measure helps if it brings an adaptive attacker nearer to guessing than the first line does. One that changes "
    "only the model as published does not help.",
    f"DP: {DP_ROUNDS} rounds of whole shards, SGD with learning rate {DP_RATE:g}, clip 1, delta 1e-5. It protects "
    "whole clients, so that noise is measured by what one of them contributes; with two clients that leaves little.",
)


def shadows_of(config: Config, count: int, folder: Path, label: str) -> tuple[Job[Result], ...]:
    """Federations like this one that the attacker trains itself."""
    return tuple(
        Job(f"{label}-{number}", TrainShadow(config, number, count, folder, everyone=True), Shadow)
        for number in range(count)
    )


class HardenStudy(Study[Hardening, Hardened]):
    """Settings of the veil against adaptive attackers."""

    name = "harden"
    summary = "what makes the veil harder to see through, against adaptive attackers"

    def audits(self, asked: Hardening, folder: Path) -> dict[tuple[str, int], Job[Audited]]:
        """An audit for each measure and seed, after the shadows that its attackers use.

        Measures that train the same model but for the veil share their shadows, as the attacks on a veil do.
        """
        jobs: dict[tuple[str, int], Job[Audited]] = {}
        shadows: dict[str, tuple[Path, tuple[Job[Result], ...]]] = {}
        for number, (name, changes) in enumerate(asked.measures.items()):
            for seed in range(asked.seeds):
                config = configure({"defence": "veil", **asked.base, **changes, "seed": seed})
                twin = config.changed(defence="plain", groups=1, decoys=None, keep_noise=False)
                label = f"like-{number}-{seed}"
                where, after = shadows.setdefault(
                    repr(twin), (folder / label, shadows_of(twin, asked.options.shadows, folder / label, label))
                )
                work = Audit(config, asked.options, folder / "runs" / f"{number}-{seed}", where)
                jobs[name, seed] = Job(f"{number}-{seed}", work, Audited, after=after)
        return jobs

    def jobs(self, asked: Hardening, folder: Path) -> list[Job[Result]]:
        """All of them, each after its shadows."""
        audits = self.audits(asked, folder).values()
        shadows = {job.name: job for audit in audits for job in audit.after}
        return [*shadows.values(), *audits]

    def collect(self, asked: Hardening, folder: Path, done: Done) -> Hardened:
        """By measure."""
        jobs = self.audits(asked, folder)
        return {name: [done[jobs[name, seed]] for seed in range(asked.seeds)] for name in asked.measures}

    def present(self, asked: Hardening, results: Hardened) -> Shown:
        """The verdict, the table, two pictures, how to read them."""
        found, header = list(rows_of(asked, results)), header_of()
        rows = [row for row in found if isinstance(row, Row)]
        table = [
            cells_of(row) if isinstance(row, Row) else failed_row(row[0], len(header), f"failed: {row[1]}")
            for row in found
        ]
        facts = {name: str(value) for name, value in configure(asked.base).flat().items()}
        sections = [*charts(rows), Text("How to read it", READING), Facts("Configuration", facts)]
        seeds = f"{asked.seeds} seed{'s' if asked.seeds > 1 else ''}"
        lead = f"{len(found)} settings, {seeds} each, against adaptive attackers."
        first = [Text("Verdict", [verdict(rows), *([ONE_SEED] if asked.seeds == 1 else [])])]
        title = f"What hardens the veil: {asked.base['data']}"
        return Shown(title, one_line(rows), header, table, NOTE, sections, first, lead=lead)


HARDEN = HardenStudy()
