"""`fedveil attack poisoning`: measure the accuracy when clients are hostile, with and without limits."""

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
from fedveil.runs.settings import Config, LimitSettings, Value
from fedveil.studies.attack import AttackRequest, AttackStudy, Results, join_parts, option, read_federations
from fedveil.studies.jobs import Failure, JobResults, Result, StudyJob
from fedveil.studies.study import JobGraph, Presentation, mark, read_texts

TEXTS = read_texts()["poisoning"]
WHERE = "fedveil attack poisoning"
HONEST, UNLIMITED, BOUNDED = "honest", "no limits", "bounds"
NOBODY = HostileStrategy("no client is hostile", honest_update)
REFUSED = "refused by bounds: hostile, honest"


@dataclass(frozen=True)
class Ending:
    """The outcome of one run.

    Attributes:
        accuracy: accuracy on test records after the last round; None if the run ended early.
        ended: reason why the run ended early; "" if it did not.
        rounds: number of completed rounds.
        refused: number of refused updates from hostile clients.
        refused_honest: number of refused updates from honest clients.
    """

    accuracy: float | None
    ended: str
    rounds: int
    refused: int
    refused_honest: int


@dataclass(frozen=True)
class Endings(Result):
    """The outcomes of one attack under each limit.

    Attributes:
        runs: outcome by limit.
        inapplicable: reason why the attack does not apply; "" if it does.
    """

    runs: dict[str, Ending] = field(default_factory=dict)
    inapplicable: str = ""


@dataclass(frozen=True)
class Poisoning(Result):
    """The results of all attacks under one defence, with one result per seed."""

    attacks: dict[str, list[Endings | Failure]]

    def endings(self, attack: str, limits: str) -> list[Ending]:
        """Return the outcomes of an attack under one limit, for all seeds that did not fail."""
        done = [result.runs for result in self.attacks.get(attack, []) if isinstance(result, Endings)]
        return [runs[limits] for runs in done if limits in runs]

    def missing(self, attack: str) -> str:
        """Return the reason why an attack has no results, or "" if it has results."""
        for result in self.attacks[attack]:
            if isinstance(result, Failure):
                return f"failed: {result.failed}"
            if result.inapplicable:
                return f"does not apply: {result.inapplicable}"
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
        """Return "honest" and the names of the attacks."""
        return [HONEST, *_parse_names("--attacks", "attack", self.attacks, ATTACKS)]

    def configs(self, config: Config) -> dict[str, Config]:
        """Return the configuration for each limit: no limits, bounds, and bounds with each aggregation rule."""
        rules = [] if self.rules == "none" else _parse_names("--rules", "rule", self.rules, RULES)
        no_limits: dict[str, Value] = dict.fromkeys(LimitSettings.model_fields)
        result = {UNLIMITED: config.changed(**no_limits), BOUNDED: config.changed(aggregator=MEAN)}
        return result | {rule: config.changed(aggregator=rule) for rule in rules}


def _parse_names(flag: str, kind: str, names: str, known: Mapping[str, object]) -> list[str]:
    """Return the names in a comma-separated list, or all known names for "all"."""
    chosen = known if names == "all" else names.split(",")
    return [check_choice(flag, kind, name, known) for name in dict.fromkeys(chosen)]


@dataclass(frozen=True)
class Poison:
    """Job work that runs one attack on one federation under each limit."""

    config: Config
    options: PoisoningOptions
    attack: str

    def __call__(self, progress: Progress, done: JobResults) -> Endings:
        """Train the federation under each limit."""
        data = load_data(self.config)
        strategy = NOBODY if self.attack == HONEST else ATTACKS[self.attack]
        if strategy.buffers and not list(build_model(self.config, data).buffers()):
            return Endings(inapplicable="the model has no buffers")
        hostile = 0 if self.attack == HONEST else count_hostile(self.config)
        configs, runs = self.options.configs(self.config), {}
        for number, (name, config) in enumerate(configs.items()):
            progress(number / len(configs), name)
            federation = build_federation(config, data)
            federation.use_engine(HostileEngine(federation.clients, strategy, hostile, federation.limits))
            runs[name] = train_rounds(federation, data, self.options.rounds, hostile)
        return Endings(runs)


def count_hostile(config: Config) -> int:
    """Return the number of hostile clients, which the aggregation rules also know."""
    return 1 if config.limits.hostile is None else config.limits.hostile


def train_rounds(federation: Federation, data: Data, rounds: int, hostile: int) -> Ending:
    """Train for the given number of rounds; if the run ends early, return the reason in the outcome."""
    ended = ""
    try:
        federation.fit(rounds=rounds, test=(data.test.inputs, data.test.targets), evaluate_every=rounds, verbose=False)
    except (Diverged, TooFewAnswers) as error:
        ended = f"{error.where}: {error.what}"
    faults = [fault for record in federation.history.records for fault in map(str, record.notes.get("faults", []))]
    clients = len(federation.shards.sizes)
    names = tuple(f"client {client}:" for client in range(clients - hostile, clients))
    refused = sum(fault.startswith(names) for fault in faults) if names else 0
    accuracy = None if ended else federation.history.metrics["accuracy"]
    return Ending(accuracy, ended, len(federation.history.records), refused, len(faults) - refused)


class PoisoningStudy(AttackStudy[PoisoningOptions, Poisoning]):
    """The damage done by hostile clients, with one job per attack, defence and seed."""

    name = "poisoning"
    summary = "measure what hostile clients do to the model, with and without limits"
    options = PoisoningOptions
    defaults = read_federations()["attack"]["poisoning"]

    def check(self, request: AttackRequest[PoisoningOptions]) -> None:
        """Refuse a federation that cannot be attacked."""
        if request.run:
            what = "cannot attack a trained run, since hostile clients take part in training"
            raise BadArgument("--run", what, "use flags or a file instead of a run")
        config, data = request.config, load_data(request.config)
        hostile, clients = count_hostile(config), config.data.clients
        if not data.classes:
            raise BadArgument(data.name, "it has no classes, but the attack measures accuracy", "use --data digits")
        if not 0 < hostile < clients:
            fix = "use at least one hostile client, and at least one honest client"
            raise BadArgument("--hostile", f"{hostile} of {clients} clients would be hostile", fix)
        if config.limits.aggregator is not None:
            fix = f"use --rules {config.limits.aggregator}"
            raise BadArgument("--aggregator", "the attack compares all rules with the mean", fix)
        for name, limited in request.options.configs(config).items():
            limits = build_limits(limited.limits)
            if limits and limits.min_clients() > clients:
                what = f"{name} needs {limits.min_clients()} clients to resist {hostile} hostile ones, got {clients}"
                raise BadArgument("--rules", what, "use more --clients, or leave the rule out")

    def graph(self, request: AttackRequest[PoisoningOptions], folder: Path) -> JobGraph[Results[Poisoning]]:
        """Return one job per defence, attack and seed."""
        self.check(request)
        options, first = request.options, request.config.training.seed
        seeds = range(first, first + options.seeds)
        jobs: dict[str, dict[str, StudyJob[Endings]]] = {defence: {} for defence in request.defences}
        for defence, job in jobs.items():
            for attack in options.names():
                for seed in seeds:
                    work = Poison(request.config_for(defence).changed(seed=seed), options, attack)
                    job[f"{attack}-{seed}"] = StudyJob(request.job_name(defence, attack, str(seed)), work, Endings)
        return join_parts(
            jobs,
            lambda results: Poisoning(
                {name: [results[f"{name}-{seed}"] for seed in seeds] for name in options.names()}
            ),
        )

    def show(self, request: AttackRequest[PoisoningOptions], results: Mapping[str, Poisoning]) -> Presentation:
        """Return the accuracy for each attack and limit, and the sections."""
        return show(results, list(request.options.configs(request.config)), count_hostile(request.config))


class LimitFigures(NamedTuple):
    """The outcomes for one defence, one attack and one limit, over all seeds."""

    defence: str
    attack: str
    limits: str
    endings: list[Ending]

    @property
    def accuracy(self) -> Estimate | None:
        """The mean accuracy over the runs that did not end early."""
        result = [ending.accuracy for ending in self.endings if ending.accuracy is not None]
        return average(result) if result else None

    @property
    def ended(self) -> list[str]:
        """The reasons why runs ended early."""
        return [ending.ended for ending in self.endings if ending.ended]

    def cell(self) -> str:
        """Format the accuracy in % and the number of runs that ended early, if any."""
        if not self.endings:
            return NOTHING
        if self.accuracy is None:
            return "ended"
        value = f"{100 * self.accuracy.value:.1f}"
        return f"{value} ({len(self.ended)} of {len(self.endings)} ended)" if self.ended else value


def limit_figures(defence: str, result: Poisoning, attack: str, limits: Sequence[str]) -> list[LimitFigures]:
    """Return the outcomes of one attack under each limit; the list is empty if the attack has no results."""
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
            limit_cells, bounded = limit_figures(defence, result, attack, limits), result.endings(attack, BOUNDED)
            sent = 0 if attack == HONEST else hostile * sum(ending.rounds for ending in bounded)
            honest = sum(ending.refused_honest for ending in bounded)
            refused = f"{sum(ending.refused for ending in bounded)}/{sent}, {honest}"
            yield [defence, attack, *(cell.cell() for cell in limit_cells), refused]


def verdict(figures: Sequence[LimitFigures]) -> str:
    """Return a sentence with the lowest accuracy for each limit, over all attacks and defences."""
    honest = [
        figure.accuracy.value
        for figure in figures
        if (figure.attack, figure.limits) == (HONEST, UNLIMITED) and figure.accuracy
    ]
    lowest: dict[str, float] = {}  # accuracy by limit; -1 if a run ended early
    for figure in figures:
        if figure.attack != HONEST and figure.endings:
            value = figure.accuracy.value if figure.accuracy and not figure.ended else -1.0
            lowest[figure.limits] = min(value, lowest.get(figure.limits, 1.0))
    if not honest or not lowest:
        return "No verdict: no run with hostile clients can be compared with an honest one."
    parts = [f"{name} {f'{100 * value:.1f} %' if value >= 0 else 'no model'}" for name, value in lowest.items()]
    return f"Accuracy under the worst attack: {', '.join(parts)}; with honest clients {100 * min(honest):.1f} %."


def show(results: Mapping[str, Poisoning], limits: Sequence[str], hostile: int) -> Presentation:
    """Return the table, descriptions of the attacks, intervals, and the reasons why runs ended early."""
    figures = [
        figure
        for name, result in results.items()
        for attack in result.attacks
        for figure in limit_figures(name, result, attack, limits)
    ]
    attacks = dict.fromkeys(attack for result in results.values() for attack in result.attacks if attack != HONEST)
    sections: list[Section] = [
        Text("How to read it", TEXTS.reading),
        Table("The attacks", ["attack", "hostile clients send"], [[name, ATTACKS[name].summary] for name in attacks]),
    ]
    for name in results:
        marks = [
            mark(figure.limits, figure.accuracy, figure.attack, 100) for figure in figures if figure.defence == name
        ]
        sections.append(Intervals(f"Accuracy: {name}", "accuracy, %", marks, {}))
    ended = [f"{', '.join(figure[:3])}: {figure.ended[0][:200]}" for figure in figures if figure.ended]
    sections += [Text("Runs that ended early", ended)] if ended else []
    header, rows = ["defence", "attack", *limits, REFUSED], list(main_rows(results, limits, hostile))
    return Presentation("", verdict(figures), header, rows, TEXTS.note, sections)


POISONING = PoisoningStudy()
