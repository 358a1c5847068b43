"""An attack and a defence as other packages have them: a guess, and settings with flags."""

from dataclasses import dataclass, field
from typing import ClassVar

from fedveil.defences import Plain
from fedveil.studies.attack import AttackStudy, option
from fedveil.studies.jobs import Result
from fedveil.studies.study import Presentation


@dataclass(frozen=True)
class Options:
    """A guess."""

    guesses: int = option(2, "how often it guesses")


@dataclass(frozen=True)
class Guess(Result):
    defence: str
    guesses: int
    clients: int


@dataclass(frozen=True)
class GuessOnce:
    defence: str
    guesses: int
    clients: int

    def __call__(self, progress, done):
        return Guess(self.defence, self.guesses, self.clients)


class GuessStudy(AttackStudy):
    name, summary = "guess", "what a guess gives"
    options, result, trains = Options, Guess, False
    defaults: ClassVar = {"data": "cifar10", "train_size": 100, "clients": 3}

    def attack(self, asked, defence, folder):
        return GuessOnce(defence, asked.options.guesses, asked.config.data.clients)

    def present(self, asked, results):
        rows = [[name, str(found.guesses), str(found.clients)] for name, found in results.items()]
        return Presentation("Guess", "Guessed.", ["defence", "guesses", "clients"], rows, "A note.", [])


GUESS = GuessStudy()


@dataclass(frozen=True)
class OwnSettings:
    strength: float = field(default=0.5, metadata={"help": "how strong it is"})
    pace: str = field(default="fast", metadata={"help": "how it works"})


class Own(Plain):
    Settings = OwnSettings

    def __init__(self, strength=0.5, pace="fast"):
        super().__init__()
        self.strength, self.pace = strength, pace
