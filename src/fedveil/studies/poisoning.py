"""`fedveil attack poisoning`: measure accuracy with hostile clients, with and without limits."""

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
COMMAND = "fedveil attack poisoning"
HONEST, UNLIMITED, BOUNDED = "honest", "no limits", "bounds"
NO_ATTACK = HostileStrategy("no client is hostile", honest_update)
REFUSED = "refused by bounds (hostile, honest)"


@dataclass(frozen=True)
class RunOutcome:
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
class LimitOutcomes(Result):
    """The outcomes of one attack under each limit.

    Attributes:
        runs: outcome by limit.
        inapplicable: reason why the attack does not apply; "" if it does.
    """

    runs: dict[str, RunOutcome] = field(default_factory=dict)
    inapplicable: str = ""


@dataclass(frozen=True)
class Poisoning(Result):
    """The results of all attacks under one defence, with one result per seed."""

    attacks: dict[str, list[LimitOutcomes | Failure]]

    def outcomes(self, attack: str, limits: str) -> list[RunOutcome]:
        """Return the outcomes of an attack under one limit, for all seeds that did not fail."""
        outcomes = [result.runs for result in self.attacks.get(attack, []) if isinstance(result, LimitOutcomes)]
        return [runs[limits] for runs in outcomes if limits in runs]

    def missing_reason(self, attack: str) -> str:
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
            check_count(COMMAND, f"--{name}", getattr(self, name))

    def attack_names(self) -> list[str]:
        """Return "honest" and the names of the attacks."""
        return [HONEST, *_parse_names("--attacks", "attack", self.attacks, ATTACKS)]

    def configs(self, config: Config) -> dict[str, Config]:
        """Return the configuration for each limit: no limits, bounds, and bounds with each aggregation rule."""
        rules = [] if self.rules == "none" else _parse_names("--rules", "rule", self.rules, RULES)
        no_limits: dict[str, Value] = dict.fromkeys(LimitSettings.model_fields)
        result = {UNLIMITED: config.changed(**no_limits), BOUNDED: config.changed(aggregator=MEAN)}
        return result | {rule: config.changed(aggregator=rule) for rule in rules}


def _parse_names(flag: str, kind: str, names: str, choices: Mapping[str, object]) -> list[str]:
    """Return the names in a comma-separated list, or all known names for "all"."""
    requested_names = choices if names == "all" else names.split(",")
    return [check_choice(flag, kind, name, choices) for name in dict.fromkeys(requested_names)]


@dataclass(frozen=True)
class Poison:
    """A task that runs one attack on one federation under each limit."""

    config: Config
    options: PoisoningOptions
    attack: str

    def __call__(self, progress: Progress, results: JobResults) -> LimitOutcomes:
        """Train the federation under each limit."""
        data = load_data(self.config)
        strategy = NO_ATTACK if self.attack == HONEST else ATTACKS[self.attack]
        if strategy.buffers and not list(build_model(self.config, data).buffers()):
            return LimitOutcomes(inapplicable="the model has no buffers")
        num_hostile = 0 if self.attack == HONEST else count_hostile(self.config)
        configs, outcomes = self.options.configs(self.config), {}
        for index, (name, config) in enumerate(configs.items()):
            progress(index / len(configs), name)
            federation = build_federation(config, data)
            federation.use_engine(HostileEngine(federation.clients, strategy, num_hostile, federation.limits))
            outcomes[name] = train_rounds(federation, data, self.options.rounds, num_hostile)
        return LimitOutcomes(outcomes)


def count_hostile(config: Config) -> int:
    """Return the number of hostile clients, which is also passed to the aggregation rules."""
    return 1 if config.limits.hostile is None else config.limits.hostile


def train_rounds(federation: Federation, data: Data, rounds: int, num_hostile: int) -> RunOutcome:
    """Train for the given number of rounds; if the run ends early, return the reason in the outcome."""
    ended = ""
    try:
        federation.fit(rounds=rounds, test=(data.test.inputs, data.test.targets), evaluate_every=rounds, verbose=False)
    except (Diverged, TooFewAnswers) as error:
        ended = f"{error.where}: {error.what}"
    faults = [fault for record in federation.history.records for fault in map(str, record.notes.get("faults", []))]
    clients = len(federation.shards.sizes)
    names = tuple(f"client {client}:" for client in range(clients - num_hostile, clients))
    refused = sum(fault.startswith(names) for fault in faults) if names else 0
    accuracy = None if ended else federation.history.metrics["accuracy"]
    return RunOutcome(accuracy, ended, len(federation.history.records), refused, len(faults) - refused)


class PoisoningStudy(AttackStudy[PoisoningOptions, Poisoning]):
    """A study of the damage done by hostile clients, with one job per attack, defence and seed."""

    name = "poisoning"
    summary = "measure what hostile clients do to the model, with and without limits"
    options = PoisoningOptions
    defaults = read_federations()["attack"]["poisoning"]

    def check(self, request: AttackRequest[PoisoningOptions]) -> None:
        """Refuse a federation that cannot be attacked."""
        if request.run:
            message = "cannot attack a trained run, since hostile clients take part in training"
            raise BadArgument("--run", message, "use flags or a configuration file instead of --run")
        config, data = request.config, load_data(request.config)
        num_hostile, clients = count_hostile(config), config.data.clients
        if not data.classes:
            raise BadArgument(data.name, "it has no classes, but the attack measures accuracy", "use --data digits")
        if not 0 < num_hostile < clients:
            fix = "use at least one hostile client, and at least one honest client"
            raise BadArgument("--hostile", f"{num_hostile} of {clients} clients would be hostile", fix)
        if config.limits.aggregator is not None:
            fix = f"use --rules {config.limits.aggregator}"
            raise BadArgument("--aggregator", "the attack compares all rules with the mean", fix)
        for name, limited_config in request.options.configs(config).items():
            limits = build_limits(limited_config.limits)
            if limits and limits.min_clients() > clients:
                required = limits.min_clients()
                message = f"{name} needs {required} clients to resist {num_hostile} hostile clients, got {clients}"
                raise BadArgument("--rules", message, "increase --clients, or leave the rule out")

    def graph(self, request: AttackRequest[PoisoningOptions], folder: Path) -> JobGraph[Results[Poisoning]]:
        """Return one job per defence, attack and seed."""
        self.check(request)
        options, first_seed = request.options, request.config.training.seed
        seeds = range(first_seed, first_seed + options.seeds)
        jobs: dict[str, dict[str, StudyJob[LimitOutcomes]]] = {defence: {} for defence in request.defences}
        for defence, defence_jobs in jobs.items():
            for attack in options.attack_names():
                for seed in seeds:
                    task = Poison(request.config_for(defence).changed(seed=seed), options, attack)
                    name = request.job_name(defence, attack, str(seed))
                    defence_jobs[f"{attack}-{seed}"] = StudyJob(name, task, LimitOutcomes)
        return join_parts(
            jobs,
            lambda results: Poisoning(
                {name: [results[f"{name}-{seed}"] for seed in seeds] for name in options.attack_names()}
            ),
        )

    def show(self, request: AttackRequest[PoisoningOptions], results: Mapping[str, Poisoning]) -> Presentation:
        """Return the table of accuracies, and the other sections."""
        return show(results, list(request.options.configs(request.config)), count_hostile(request.config))


class LimitFigures(NamedTuple):
    """The outcomes for one defence, one attack and one limit, over all seeds."""

    defence: str
    attack: str
    limits: str
    outcomes: list[RunOutcome]

    @property
    def accuracy(self) -> Estimate | None:
        """The mean accuracy over the runs that did not end early."""
        result = [outcome.accuracy for outcome in self.outcomes if outcome.accuracy is not None]
        return average(result) if result else None

    @property
    def early_ends(self) -> list[str]:
        """The reasons why runs ended early."""
        return [outcome.ended for outcome in self.outcomes if outcome.ended]

    def cell(self) -> str:
        """Format the accuracy in % and the number of runs that ended early, if any."""
        if not self.outcomes:
            return NOTHING
        if self.accuracy is None:
            return "ended"
        value = f"{100 * self.accuracy.value:.1f}"
        return f"{value} ({len(self.early_ends)} of {len(self.outcomes)} ended)" if self.early_ends else value


def limit_figures(defence: str, result: Poisoning, attack: str, limits: Sequence[str]) -> list[LimitFigures]:
    """Return the outcomes of one attack under each limit; the list is empty if the attack has no results."""
    if result.missing_reason(attack):
        return []
    return [LimitFigures(defence, attack, name, result.outcomes(attack, name)) for name in limits]


def main_rows(results: Mapping[str, Poisoning], limits: Sequence[str], num_hostile: int) -> Iterator[list[str]]:
    """Yield one row per defence and attack."""
    for defence, result in results.items():
        for attack in result.attacks:
            if reason := result.missing_reason(attack):
                yield [defence, attack, reason, *[""] * len(limits)]
                continue
            limit_cells, bounded_outcomes = (
                limit_figures(defence, result, attack, limits),
                result.outcomes(attack, BOUNDED),
            )
            num_sent = 0 if attack == HONEST else num_hostile * sum(outcome.rounds for outcome in bounded_outcomes)
            refused_honest = sum(outcome.refused_honest for outcome in bounded_outcomes)
            refused = f"{sum(outcome.refused for outcome in bounded_outcomes)}/{num_sent}, {refused_honest}"
            yield [defence, attack, *(cell.cell() for cell in limit_cells), refused]


def verdict(figures: Sequence[LimitFigures]) -> str:
    """Return a sentence with the lowest accuracy for each limit, over all attacks and defences."""
    honest_accuracies = [
        figure.accuracy.value
        for figure in figures
        if (figure.attack, figure.limits) == (HONEST, UNLIMITED) and figure.accuracy
    ]
    lowest_accuracies: dict[str, float] = {}  # accuracy by limit; -1 if a run ended early
    for figure in figures:
        if figure.attack != HONEST and figure.outcomes:
            value = figure.accuracy.value if figure.accuracy and not figure.early_ends else -1.0
            lowest_accuracies[figure.limits] = min(value, lowest_accuracies.get(figure.limits, 1.0))
    if not honest_accuracies or not lowest_accuracies:
        return "No verdict: no run with hostile clients can be compared with a run of honest clients."
    parts = [
        f"{name} {f'{100 * value:.1f} %' if value >= 0 else 'no model'}" for name, value in lowest_accuracies.items()
    ]
    honest = f"with honest clients {100 * min(honest_accuracies):.1f} %"
    return f"Accuracy under the worst attack: {', '.join(parts)}; {honest}."


def show(results: Mapping[str, Poisoning], limits: Sequence[str], num_hostile: int) -> Presentation:
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
        Table(
            "The attacks",
            ["attack", "update sent by hostile clients"],
            [[name, ATTACKS[name].summary] for name in attacks],
        ),
    ]
    for name in results:
        marks = [
            mark(figure.limits, figure.accuracy, figure.attack, 100) for figure in figures if figure.defence == name
        ]
        sections.append(Intervals(f"Accuracy: {name}", "accuracy, %", marks, {}))
    end_reasons = [f"{', '.join(figure[:3])}: {figure.early_ends[0][:200]}" for figure in figures if figure.early_ends]
    sections += [Text("Runs that ended early", end_reasons)] if end_reasons else []
    header, rows = ["defence", "attack", *limits, REFUSED], list(main_rows(results, limits, num_hostile))
    return Presentation("", verdict(figures), header, rows, TEXTS.note, sections)


POISONING = PoisoningStudy()
