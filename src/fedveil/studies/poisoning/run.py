"""`fedveil attack poisoning`: accuracy with hostile clients, without limits, with bounds and with each rule."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from fedveil.attacks.poisoning import ATTACKS, HostileStrategy, PoisonedFederation, honest_update
from fedveil.checks import one_of, whole
from fedveil.data import Data
from fedveil.errors import BadArgument, Diverged, TooFewAnswers
from fedveil.federation.aggregators import RULES
from fedveil.federation.limits import MEAN
from fedveil.federation.local import Federation
from fedveil.progress import Progress
from fedveil.runs.build import build_federation, build_limits, build_model, load_data
from fedveil.runs.config import Config, LimitSettings, Value
from fedveil.studies.attack import AttackRequest, PartStudy, Results, option
from fedveil.studies.jobs import Done, Failed, Job
from fedveil.studies.poisoning import page
from fedveil.studies.poisoning.page import BOUNDED, HONEST, UNLIMITED
from fedveil.studies.poisoning.results import Ending, Endings, Poisoning
from fedveil.studies.study import Shown

NOBODY = HostileStrategy("no client is hostile", honest_update)


@dataclass(frozen=True)
class PoisoningOptions:
    """Flags of the attack."""

    attacks: str = option("all", f"all, or a comma-separated list of {', '.join(ATTACKS)}")
    rules: str = option("all", f"all, none, or a comma-separated list of {', '.join(RULES)}")
    rounds: int = option(50, "rounds of training")
    seeds: int = option(1, "number of seeds, starting at --seed")

    def __post_init__(self) -> None:
        """Refuse counts below 1."""
        for name in ("rounds", "seeds"):
            whole("fedveil attack poisoning", f"--{name}", getattr(self, name))

    def names(self) -> list[str]:
        """Return the names of the attacks, after honest clients."""
        return [HONEST, *_parse_names("--attacks", "attack", self.attacks, ATTACKS)]

    def configs(self, config: Config) -> dict[str, Config]:
        """Return the federation by the name of its limits: none, bounds, and bounds with each rule."""
        rules = [] if self.rules == "none" else _parse_names("--rules", "rule", self.rules, RULES)
        nothing: dict[str, Value] = dict.fromkeys(LimitSettings.model_fields)
        found = {UNLIMITED: config.changed(**nothing), BOUNDED: config.changed(aggregator=MEAN)}
        return found | {rule: config.changed(aggregator=rule) for rule in rules}


def _parse_names(flag: str, kind: str, words: str, known: Iterable[str]) -> list[str]:
    """Return all known names, or those in a comma-separated list."""
    every = list(known)
    return every if words == "all" else [one_of(flag, kind, word, every) for word in dict.fromkeys(words.split(","))]


@dataclass(frozen=True)
class Poison:
    """One attack on one federation, under each limit."""

    config: Config
    options: PoisoningOptions
    attack: str

    def __call__(self, progress: Progress, done: Done) -> Endings:
        """Train under each limit."""
        data = load_data(self.config)
        strategy = NOBODY if self.attack == HONEST else ATTACKS[self.attack]
        if strategy.buffers and not list(build_model(self.config, data).buffers()):
            return Endings(inapplicable="the model has no buffers")
        hostile = 0 if self.attack == HONEST else count_hostile(self.config)
        make = partial(PoisonedFederation, strategy=strategy, hostile=hostile)
        every, runs = self.options.configs(self.config), {}
        for number, (name, config) in enumerate(every.items()):
            progress(number / len(every), name)
            runs[name] = ending(build_federation(config, data, make=make), data, self.options.rounds, hostile)
        return Endings(runs)


def count_hostile(config: Config) -> int:
    """Return the number of hostile clients, which is also what a rule is given."""
    return 1 if config.limits.hostile is None else config.limits.hostile


def ending(federation: Federation, data: Data, rounds: int, hostile: int) -> Ending:
    """Train for a number of rounds; a run that ends early is a result, too."""
    ended = ""
    try:
        federation.fit(rounds=rounds, test=(data.test.inputs, data.test.targets), evaluate_every=rounds)
    except (Diverged, TooFewAnswers) as error:
        ended = f"{error.where}: {error.what}"
    faults = [fault for record in federation.history.records for fault in record.get("faults", [])]
    clients = len(federation.shards.sizes)
    names = tuple(f"client {client}:" for client in range(clients - hostile, clients))
    refused = sum(fault.startswith(names) for fault in faults) if names else 0
    accuracy = None if ended else federation.history.last["accuracy"]
    return Ending(accuracy, ended, len(federation.history.records), refused, len(faults) - refused)


class PoisoningStudy(PartStudy[PoisoningOptions, Endings, Poisoning]):
    """Damage by hostile clients; one job for every attack, defence and seed."""

    name = "poisoning"
    summary = "what hostile clients do to the model, with and without limits on them"
    options = PoisoningOptions
    defaults = dict(  # noqa: RUF012
        defence="plain,veil", data="digits", clients=5, model="mlp", lr=1e-2, hostile=1
    )

    def check(self, asked: AttackRequest[PoisoningOptions]) -> None:
        """Refuse what cannot be trained."""
        if asked.run:
            raise BadArgument("--run", "hostile clients take part in training", "use flags or a file instead of a run")
        config, data = asked.config, load_data(asked.config)
        hostile, clients = count_hostile(config), config.data.clients
        if not data.classes:
            raise BadArgument(data.name, "it has no classes, and the attack measures accuracy", "use --data digits")
        if not 0 < hostile < clients:
            fix = "choose at least one, and leave one honest"
            raise BadArgument("--hostile", f"{hostile} of {clients} clients", fix)
        if config.limits.aggregator is not None:
            fix = f"use --rules {config.limits.aggregator}"
            raise BadArgument("--aggregator", "the attack compares all rules with the mean", fix)
        for name, own in asked.options.configs(config).items():
            limits = build_limits(own.limits)
            if limits and limits.needed() > clients:
                what = f"{name} against {hostile} hostile clients needs {limits.needed()}, not {clients}"
                raise BadArgument("--rules", what, "use more --clients, or leave the rule out")

    def seeds(self, asked: AttackRequest[PoisoningOptions]) -> range:
        """Return the seeds of the runs."""
        first = asked.config.training.seed
        return range(first, first + asked.options.seeds)

    def parts(self, asked: AttackRequest[PoisoningOptions], defence: str) -> dict[str, Job[Endings]]:
        """Return one job per attack and seed."""
        config, options, found = asked.config_for(defence), asked.options, dict[str, Job[Endings]]()
        for attack in options.names():
            for seed in self.seeds(asked):
                work = Poison(config.changed(seed=seed), options, attack)
                found[f"{attack}-{seed}"] = Job(asked.job_name(defence, attack, str(seed)), work, Endings)
        return found

    def join(self, asked: AttackRequest[PoisoningOptions], parts: dict[str, Endings | Failed]) -> Poisoning:
        """Return the results by attack."""
        seeds = self.seeds(asked)
        return Poisoning({name: [parts[f"{name}-{seed}"] for seed in seeds] for name in asked.options.names()})

    def show(self, asked: AttackRequest[PoisoningOptions], results: Results[Poisoning]) -> Shown:
        """Return accuracy by attack and limit, with its sections."""
        return page.show(results, list(asked.options.configs(asked.config)), count_hostile(asked.config))


POISONING = PoisoningStudy()
