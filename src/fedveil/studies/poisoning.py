"""`fedveil attack poisoning`: measure accuracy with hostile clients, without limits, with bounds and with each rule."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from fedveil.attacks.poisoning import ATTACKS, HostileEngine, HostileStrategy, honest_update
from fedveil.attacks.scores import Estimate, average
from fedveil.checks import check_choice, check_count
from fedveil.data import Data
from fedveil.errors import BadArgument, Diverged, TooFewAnswers
from fedveil.federation.aggregators import RULES
from fedveil.federation.limits import MEAN
from fedveil.federation.local import Federation
from fedveil.progress import Progress
from fedveil.report import NOTHING, Intervals, Section, Table, Text
from fedveil.runs.build import build_federation, build_limits, build_model, load_data
from fedveil.runs.config import Config, LimitSettings, Value
from fedveil.studies.attack import AttackRequest, AttackStudy, Results, join_parts, option, read_federations
from fedveil.studies.jobs import Failure, JobResults, Result, StudyJob
from fedveil.studies.presentation import Presentation, mark, read_texts
from fedveil.studies.study import JobGraph

TEXTS = read_texts()["poisoning"]
WHERE = "fedveil attack poisoning"
HONEST, UNLIMITED, BOUNDED = "honest", "no limits", "bounds"
NOBODY = HostileStrategy("no client is hostile", honest_update)
REFUSED = "refused by bounds: hostile, honest"


@dataclass(frozen=True)
class Ending:
    """How one run ended.

    Attributes:
        accuracy: accuracy on test records after the last round; None if the run ended earlier.
        ended: why it ended before its last round; "" if it did not.
        rounds: number of completed rounds.
        refused: number of refused updates from hostile clients.
        wronged: number of refused updates from honest clients.
    """

    accuracy: float | None
    ended: str
    rounds: int
    refused: int
    wronged: int


@dataclass(frozen=True)
class Endings(Result):
    """One attack under each limit.

    Attributes:
        runs: endings by the name of the limit.
        inapplicable: why there are no runs; "" if there are.
    """

    runs: dict[str, Ending] = field(default_factory=dict)
    inapplicable: str = ""


@dataclass(frozen=True)
class Poisoning(Result):
    """All attacks under one defence, each with one result per seed."""

    attacks: dict[str, list[Endings | Failure]]

    def endings(self, attack: str, limits: str) -> list[Ending]:
        """Return the endings for all seeds whose runs did not fail."""
        done = [one.runs for one in self.attacks.get(attack, []) if isinstance(one, Endings)]
        return [runs[limits] for runs in done if limits in runs]

    def missing(self, attack: str) -> str:
        """Return why an attack has no results; "" if it has some."""
        for one in self.attacks[attack]:
            if isinstance(one, Failure):
                return f"failed: {one.failed}"
            if one.inapplicable:
                return f"does not apply: {one.inapplicable}"
        return ""


@dataclass(frozen=True)
class PoisoningOptions:
    """Flags of the attack."""

    attacks: str = option("all", f"all, or a comma-separated list of {', '.join(ATTACKS)}")
    rules: str = option("all", f"all, none, or a comma-separated list of {', '.join(RULES)}")
    rounds: int = option(50, "number of training rounds")
    seeds: int = option(1, "number of seeds, starting at --seed")

    def __post_init__(self) -> None:
        """Refuse counts below 1."""
        for name in ("rounds", "seeds"):
            check_count(WHERE, f"--{name}", getattr(self, name))

    def names(self) -> list[str]:
        """Return the names of the attacks, after honest clients."""
        return [HONEST, *_parse_names("--attacks", "attack", self.attacks, ATTACKS)]

    def configs(self, config: Config) -> dict[str, Config]:
        """Return the federation by the name of its limits: none, bounds, and bounds with each rule."""
        rules = [] if self.rules == "none" else _parse_names("--rules", "rule", self.rules, RULES)
        nothing: dict[str, Value] = dict.fromkeys(LimitSettings.model_fields)
        found = {UNLIMITED: config.changed(**nothing), BOUNDED: config.changed(aggregator=MEAN)}
        return found | {rule: config.changed(aggregator=rule) for rule in rules}


def _parse_names(flag: str, kind: str, words: str, known: Mapping[str, object]) -> list[str]:
    """Return all known names, or those in a comma-separated list."""
    chosen = known if words == "all" else words.split(",")
    return [check_choice(flag, kind, word, known) for word in dict.fromkeys(chosen)]


@dataclass(frozen=True)
class Poison:
    """Run one attack on one federation, under each limit."""

    config: Config
    options: PoisoningOptions
    attack: str

    def __call__(self, progress: Progress, done: JobResults) -> Endings:
        """Train under each limit."""
        data = load_data(self.config)
        strategy = NOBODY if self.attack == HONEST else ATTACKS[self.attack]
        if strategy.buffers and not list(build_model(self.config, data).buffers()):
            return Endings(inapplicable="the model has no buffers")
        hostile = 0 if self.attack == HONEST else count_hostile(self.config)
        every, runs = self.options.configs(self.config), {}
        for number, (name, config) in enumerate(every.items()):
            progress(number / len(every), name)
            federation = build_federation(config, data)
            federation.use_engine(HostileEngine(federation.clients, strategy, hostile, federation.limits))
            runs[name] = train_rounds(federation, data, self.options.rounds, hostile)
        return Endings(runs)


def count_hostile(config: Config) -> int:
    """Return the number of hostile clients, which the rules are also given."""
    return 1 if config.limits.hostile is None else config.limits.hostile


def train_rounds(federation: Federation, data: Data, rounds: int, hostile: int) -> Ending:
    """Train for a number of rounds; a run that ends early is also a result."""
    ended = ""
    try:
        federation.fit(rounds=rounds, test=(data.test.inputs, data.test.targets), evaluate_every=rounds)
    except (Diverged, TooFewAnswers) as error:
        ended = f"{error.where}: {error.what}"
    faults = [fault for record in federation.history.records for fault in map(str, record.notes.get("faults", []))]
    clients = len(federation.shards.sizes)
    names = tuple(f"client {client}:" for client in range(clients - hostile, clients))
    refused = sum(fault.startswith(names) for fault in faults) if names else 0
    accuracy = None if ended else federation.history.metrics["accuracy"]
    return Ending(accuracy, ended, len(federation.history.records), refused, len(faults) - refused)


class PoisoningStudy(AttackStudy[PoisoningOptions, Poisoning]):
    """Damage done by hostile clients; one job for every attack, defence and seed."""

    name = "poisoning"
    summary = "measure what hostile clients do to the model, with and without limits"
    options = PoisoningOptions
    defaults = read_federations()["attack"]["poisoning"]

    def check(self, request: AttackRequest[PoisoningOptions]) -> None:
        """Refuse a federation that cannot be attacked."""
        if request.run:
            raise BadArgument("--run", "hostile clients take part in training", "use flags or a file instead of a run")
        config, data = request.config, load_data(request.config)
        hostile, clients = count_hostile(config), config.data.clients
        if not data.classes:
            raise BadArgument(data.name, "it has no classes, but the attack measures accuracy", "use --data digits")
        if not 0 < hostile < clients:
            fix = "choose at least one, and leave one honest"
            raise BadArgument("--hostile", f"{hostile} of {clients} clients would be hostile", fix)
        if config.limits.aggregator is not None:
            fix = f"use --rules {config.limits.aggregator}"
            raise BadArgument("--aggregator", "the attack compares all rules with the mean", fix)
        for name, own in request.options.configs(config).items():
            limits = build_limits(own.limits)
            if limits and limits.needed() > clients:
                what = f"{name} against {hostile} hostile clients needs {limits.needed()}, not {clients}"
                raise BadArgument("--rules", what, "use more --clients, or leave the rule out")

    def graph(self, request: AttackRequest[PoisoningOptions], folder: Path) -> JobGraph[Results[Poisoning]]:
        """Return one job per defence, attack and seed."""
        self.check(request)
        options, first = request.options, request.config.training.seed
        seeds = range(first, first + options.seeds)
        jobs: dict[str, dict[str, StudyJob[Endings]]] = {defence: {} for defence in request.defences}
        for defence, own in jobs.items():
            for attack in options.names():
                for seed in seeds:
                    work = Poison(request.config_for(defence).changed(seed=seed), options, attack)
                    own[f"{attack}-{seed}"] = StudyJob(request.job_name(defence, attack, str(seed)), work, Endings)
        return join_parts(
            jobs,
            lambda found: Poisoning({name: [found[f"{name}-{seed}"] for seed in seeds] for name in options.names()}),
        )

    def show(self, request: AttackRequest[PoisoningOptions], results: Mapping[str, Poisoning]) -> Presentation:
        """Return the accuracy by attack and limit, and the sections."""
        return show(results, list(request.options.configs(request.config)), count_hostile(request.config))


class LimitFigures(NamedTuple):
    """The runs with all seeds for one defence, one attack and one limit."""

    defence: str
    attack: str
    limits: str
    endings: list[Ending]

    @property
    def accuracy(self) -> Estimate | None:
        """The mean over seeds whose run did not end early."""
        found = [one.accuracy for one in self.endings if one.accuracy is not None]
        return average(found) if found else None

    @property
    def ended(self) -> list[str]:
        """Why runs ended early."""
        return [one.ended for one in self.endings if one.ended]

    def cell(self) -> str:
        """Format the accuracy in %, with the number of runs that ended early if any did."""
        if not self.endings:
            return NOTHING
        if self.accuracy is None:
            return "ended"
        value = f"{100 * self.accuracy.value:.1f}"
        return f"{value} ({len(self.ended)} of {len(self.endings)} ended)" if self.ended else value


def limit_figures(defence: str, result: Poisoning, attack: str, limits: Sequence[str]) -> list[LimitFigures]:
    """Return one attack under each limit; empty for an attack without results."""
    if result.missing(attack):
        return []
    return [LimitFigures(defence, attack, name, result.endings(attack, name)) for name in limits]


def main_rows(results: Mapping[str, Poisoning], limits: Sequence[str], hostile: int) -> Iterator[list[str]]:
    """Yield one row per defence and attack."""
    for defence, result in results.items():
        for attack in result.attacks:
            if why := result.missing(attack):
                yield [defence, attack, why, *[""] * len(limits)]
                continue
            own, bounded = limit_figures(defence, result, attack, limits), result.endings(attack, BOUNDED)
            sent = 0 if attack == HONEST else hostile * sum(one.rounds for one in bounded)
            refused = f"{sum(one.refused for one in bounded)}/{sent}, {sum(one.wronged for one in bounded)}"
            yield [defence, attack, *(one.cell() for one in own), refused]


def verdict(every: Sequence[LimitFigures]) -> str:
    """Return the accuracy that remains under the worst attack for each limit, for the defence that suffers most."""
    honest = [one.accuracy.value for one in every if (one.attack, one.limits) == (HONEST, UNLIMITED) and one.accuracy]
    left: dict[str, float] = {}  # -1 where a run ended early
    for one in every:
        if one.attack != HONEST and one.endings:
            value = one.accuracy.value if one.accuracy and not one.ended else -1.0
            left[one.limits] = min(value, left.get(one.limits, 1.0))
    if not honest or not left:
        return "No verdict: no run with hostile clients can be compared with an honest one."
    parts = [f"{name} {f'{100 * value:.1f} %' if value >= 0 else 'no model'}" for name, value in left.items()]
    return f"Accuracy under the worst attack: {', '.join(parts)}; with honest clients {100 * min(honest):.1f} %."


def show(results: Mapping[str, Poisoning], limits: Sequence[str], hostile: int) -> Presentation:
    """Return the table and the sections: the attacks, intervals, and why runs ended early."""
    every = [
        one
        for name, own in results.items()
        for attack in own.attacks
        for one in limit_figures(name, own, attack, limits)
    ]
    attacks = dict.fromkeys(attack for one in results.values() for attack in one.attacks if attack != HONEST)
    sections: list[Section] = [
        Text("How to read it", TEXTS.reading),
        Table("The attacks", ["attack", "hostile clients send"], [[name, ATTACKS[name].summary] for name in attacks]),
    ]
    for name in results:
        marks = [mark(one.limits, one.accuracy, one.attack, 100) for one in every if one.defence == name]
        sections.append(Intervals(f"Accuracy: {name}", "accuracy, %", marks, {}))
    ended = [f"{', '.join(one[:3])}: {one.ended[0][:200]}" for one in every if one.ended]
    sections += [Text("Runs that ended early", ended)] if ended else []
    header, rows = ["defence", "attack", *limits, REFUSED], list(main_rows(results, limits, hostile))
    return Presentation("", verdict(every), header, rows, TEXTS.note, sections)


POISONING = PoisoningStudy()
