"""`fedveil attack poisoning`: accuracy with hostile clients, without limits, with bounds, with each rule."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedveil.attacks.poisoning import ATTACKS, Attack, Poisoned, honest
from fedveil.checks import one_of, whole
from fedveil.data import Data
from fedveil.errors import BadArgument, Diverged, TooFewAnswers
from fedveil.federation.aggregators import RULES
from fedveil.federation.limits import MEAN
from fedveil.federation.local import Federation
from fedveil.runs.build import build_federation, build_limits, build_model, load_data
from fedveil.runs.config import Config, LimitSettings, Value
from fedveil.studies.attack import Asked, OnDefences, Results, option
from fedveil.studies.jobs import Done, Job, Progress, Result
from fedveil.studies.poisoning import page
from fedveil.studies.poisoning.page import BOUNDED, HONEST, UNLIMITED
from fedveil.studies.poisoning.results import Ending, Endings, Poisoning
from fedveil.studies.study import Shown

NOBODY = Attack("no client is hostile", honest)


@dataclass(frozen=True)
class Options:
    """The attack's own flags."""

    attacks: str = option("all", f"all, or some with commas between them: {', '.join(ATTACKS)}")
    rules: str = option("all", f"all, none, or some with commas between them: {', '.join(RULES)}")
    rounds: int = option(50, "rounds of training")
    seeds: int = option(1, "runs of each kind, from --seed on")

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        for name in ("rounds", "seeds"):
            whole("fedveil attack poisoning", f"--{name}", getattr(self, name))

    def names(self) -> list[str]:
        """The attacks, after honest clients."""
        return [HONEST, *_some("--attacks", "attack", self.attacks, ATTACKS)]

    def limited(self, config: Config) -> dict[str, Config]:
        """The federation by the name of its limits: none, bounds, and bounds with each rule."""
        rules = [] if self.rules == "none" else _some("--rules", "rule", self.rules, RULES)
        nothing: dict[str, Value] = dict.fromkeys(LimitSettings.model_fields)
        found = {UNLIMITED: config.changed(**nothing), BOUNDED: config.changed(aggregator=MEAN)}
        return found | {rule: config.changed(aggregator=rule) for rule in rules}


def _some(flag: str, kind: str, words: str, known: Iterable[str]) -> list[str]:
    """All that are known, or those that are named."""
    every = list(known)
    return every if words == "all" else [one_of(flag, kind, word, every) for word in dict.fromkeys(words.split(","))]


@dataclass(frozen=True)
class Poison:
    """One attack on one federation, with each of the limits."""

    config: Config
    options: Options
    attack: str

    def __call__(self, progress: Progress, done: Done) -> Endings:
        """Train with each of the limits."""
        data = load_data(self.config)
        attack = NOBODY if self.attack == HONEST else ATTACKS[self.attack]
        if attack.buffers and not list(build_model(self.config, data).buffers()):
            return Endings(inapplicable="the model has no buffers")
        hostile = 0 if self.attack == HONEST else hostile_in(self.config)
        make, every, runs = partial(Poisoned, attack=attack, hostile=hostile), self.options.limited(self.config), {}
        for number, (name, config) in enumerate(every.items()):
            progress(number / len(every), name)
            runs[name] = ending(build_federation(config, data, make=make), data, self.options.rounds, hostile)
        return Endings(runs)


def hostile_in(config: Config) -> int:
    """How many clients are hostile: as many as a rule is told of."""
    return 1 if config.limits.hostile is None else config.limits.hostile


def ending(federation: Federation, data: Data, rounds: int, hostile: int) -> Ending:
    """Train for so many rounds; a run that does not get there is a result, too."""
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


def check(config: Config, options: Options, data: Data) -> None:
    """Refuse what cannot be measured."""
    hostile, clients = hostile_in(config), config.data.clients
    if not data.classes:
        raise BadArgument(data.name, "it has no classes, and what is measured is accuracy", "--data digits")
    if not 0 < hostile < clients:
        raise BadArgument("--hostile", f"{hostile} of {clients} clients", "at least one, and leave an honest one")
    if config.limits.aggregator is not None:
        fix = f"--rules {config.limits.aggregator}"
        raise BadArgument("--aggregator", "rules are compared with the mean and with one another", fix)
    for name, limited in options.limited(config).items():
        limits = build_limits(limited.limits)
        if limits and limits.needed() > clients:
            what = f"{name} against {hostile} hostile clients needs {limits.needed()}, not {clients}"
            raise BadArgument("--rules", what, "more --clients, or leave the rule out")


class PoisoningStudy(OnDefences[Options, Poisoning]):
    """What hostile clients do to the model; every attack, defence and seed is a job of its own."""

    name = "poisoning"
    summary = "what hostile clients do to the model, with and without limits on them"
    options = Options
    defaults = {  # noqa: RUF012
        "defence": "plain,veil",
        "data": "digits",
        "clients": 5,
        "model": "mlp",
        "lr": 1e-2,
        "hostile": 1,
    }

    def poisons(self, asked: Asked[Options], defence: str) -> dict[str, list[Job[Endings]]]:
        """The jobs of one defence, by attack, one for each seed."""
        config, options = asked.under(defence), asked.options
        first, found = config.training.seed, dict[str, list[Job[Endings]]]()
        for attack in options.names():
            found[attack] = []
            for seed in range(first, first + options.seeds):
                label = f"{asked.label}{defence.replace(':', '.')}-{attack}-{seed}"
                found[attack].append(Job(label, Poison(config.changed(seed=seed), options, attack), Endings))
        return found

    def jobs(self, asked: Asked[Options], folder: Path) -> list[Job[Result]]:
        """All attacks on all defences. Refuses what cannot be trained before anything is."""
        if asked.run:
            raise BadArgument("--run", "hostile clients take part in training", "flags or a file in place of a run")
        check(asked.config, asked.options, load_data(asked.config))
        return [job for name in asked.defences for own in self.poisons(asked, name).values() for job in own]

    def collect(self, asked: Asked[Options], folder: Path, done: Done) -> Results[Poisoning]:
        """By defence."""
        return {
            name: Poisoning({attack: [done[job] for job in own] for attack, own in self.poisons(asked, name).items()})
            for name in asked.defences
        }

    def present(self, asked: Asked[Options], results: Results[Poisoning]) -> Shown:
        """Accuracy by attack and limits, all figures, intervals, and why runs ended."""
        limits = list(asked.options.limited(asked.config))
        shown = page.presented(results, limits, hostile_in(asked.config))
        return self.framed(asked, results, *shown, verdict=page.verdict(results, limits))


POISONING = PoisoningStudy()
