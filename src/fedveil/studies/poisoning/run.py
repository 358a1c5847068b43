"""`fedveil attack poisoning`: accuracy with hostile clients, without limits, with bounds, with each rule."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from fedveil.attacks.poisoning import ATTACKS, Attack, Poisoned, honest
from fedveil.checks import one_of, whole
from fedveil.data import Data
from fedveil.errors import BadArgument, Diverged, TooFewAnswers
from fedveil.federation.aggregators import RULES
from fedveil.federation.limits import Limits
from fedveil.federation.local import Federation
from fedveil.runs.build import build_model, federation_of, load_data
from fedveil.runs.config import Config
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
    hostile: int = option(1, "clients that are hostile; rules withstand as many")
    rounds: int = option(50, "rounds of training")
    seeds: int = option(1, "runs of each kind, from --seed on")
    norm_factor: float = option(10.0, "longest update, in medians of a round")
    max_share: float = option(0.5, "largest share of a client in the mean")

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        for name in ("hostile", "rounds", "seeds"):
            whole("fedveil attack poisoning", f"--{name}", getattr(self, name))

    def names(self) -> list[str]:
        """The attacks, after honest clients."""
        return [HONEST, *_some("--attacks", "attack", self.attacks, ATTACKS)]

    def limits(self) -> dict[str, Limits | None]:
        """By name: none, bounds, and bounds with each rule."""
        rules = [] if self.rules == "none" else _some("--rules", "rule", self.rules, RULES)
        bounds = Limits(hostile=self.hostile, max_share=self.max_share, norm_factor=self.norm_factor)
        found: dict[str, Limits | None] = {UNLIMITED: None, BOUNDED: bounds}
        return found | {rule: replace(bounds, aggregator=rule) for rule in rules}


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
        hostile, every = 0 if self.attack == HONEST else self.options.hostile, self.options.limits()
        runs = {}
        for number, (name, limits) in enumerate(every.items()):
            progress(number / len(every), name)
            make = partial(Poisoned, attack=attack, hostile=hostile, limits=limits)
            runs[name] = ending(federation_of(self.config, data, make=make), data, self.options.rounds, hostile)
        return Endings(runs)


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


class PoisoningStudy(OnDefences[Options, Poisoning]):
    """What hostile clients do to the model; every attack, defence and seed is a job of its own."""

    name = "poisoning"
    summary = "what hostile clients do to the model, with and without limits on them"
    options = Options
    defaults = {"defence": "plain,veil", "data": "digits", "clients": 5, "model": "mlp", "lr": 1e-2}  # noqa: RUF012

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
        options, clients = asked.options, asked.config.data.clients
        data = load_data(asked.config)
        if not data.classes:
            raise BadArgument(data.name, "it has no classes, and what is measured is accuracy", "--data digits")
        if options.hostile >= clients:
            raise BadArgument("--hostile", f"{options.hostile} of {clients} clients", "leave an honest one")
        for name, limits in options.limits().items():
            if limits and limits.needed() > clients:
                what = f"{name} against {options.hostile} hostile clients needs {limits.needed()}, not {clients}"
                raise BadArgument("--rules", what, "more --clients, or leave the rule out")
        return [job for name in asked.defences for own in self.poisons(asked, name).values() for job in own]

    def collect(self, asked: Asked[Options], folder: Path, done: Done) -> Results[Poisoning]:
        """By defence."""
        return {
            name: Poisoning({attack: [done[job] for job in own] for attack, own in self.poisons(asked, name).items()})
            for name in asked.defences
        }

    def present(self, asked: Asked[Options], results: Results[Poisoning]) -> Shown:
        """Accuracy by attack and limits, all figures, intervals, and why runs ended."""
        options = asked.options
        return self.framed(asked, results, *page.presented(results, list(options.limits()), options.hostile))


POISONING = PoisoningStudy()
