"""Attacks as studies: one or several defences of the same federation, each attacked in a job of its own."""

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from fedveil.data import one_tensor
from fedveil.defences.registry import BUILT_IN
from fedveil.report import Facts, Section, Text
from fedveil.runs.build import load_data
from fedveil.runs.config import Config, Value
from fedveil.studies.federations import TrainedRun, TrainRun
from fedveil.studies.jobs import Done, Failed, Job, Result, Work
from fedveil.studies.study import Shown, Study

O = TypeVar("O")  # noqa: E741
R = TypeVar("R", bound=Result)
V = TypeVar("V")
Results = dict[str, R | Failed]


@dataclass(frozen=True)
class Asked(Generic[O]):
    """What an attack is asked.

    Attributes:
        config: of the federation.
        defences: names; the federation is attacked under each of them.
        options: the attack's own, a frozen dataclass.
        run: folder of a trained run to attack, in place of training; then `defences` is its own.
        label: goes before the names of jobs, where several attacks share a folder.
        notes: sentences on the run, which come before the verdict.
    """

    config: Config
    defences: tuple[str, ...]
    options: O
    run: Path | None = None
    label: str = ""
    notes: tuple[str, ...] = ()

    def under(self, defence: str) -> Config:
        """The configuration with one of the defences; settings of a defence of one's own are not the others'."""
        built_in = {record.name for record in BUILT_IN}
        if defence in built_in and not built_in.issuperset(self.defences):
            return self.config.changed(defence=defence, settings=())
        return self.config.changed(defence=defence)


class OnDefences(Study[Asked[O], Results[R]], Generic[O, R]):
    """An attack on a federation under several defences.

    Attributes:
        options: a frozen dataclass with a default and a description for each of the attack's own flags.
        defaults: values of the configuration that differ from `Config`'s: the scale that two cores manage.
    """

    options: type[O]
    defaults: Mapping[str, Value] = {}

    def framed(
        self,
        asked: Asked[O],
        results: Mapping[str, R | Failed],
        header: Sequence[str],
        rows: Sequence[Sequence[str]],
        note: str,
        sections: Sequence[Section],
        first: Sequence[Section] = (),
        verdict: str = "",
    ) -> Shown:
        """What every attack shows besides: the question, what failed, the configuration.

        An attack without a verdict has the question in its place.
        """
        config = asked.config
        failed = [f"{name}: {found.failed}" for name, found in results.items() if isinstance(found, Failed)]
        values = {name: value for name, value in config.flat().items() if name != "defence"}
        values |= plain_values(asked.options)
        facts = Facts("Configuration", {name: str(value) for name, value in values.items()})
        where = f"{config.data.name}, {config.model.name}, {config.data.clients} clients"
        lead = f"{self.summary[0].upper()}{self.summary[1:]}: {where}."
        every = [*([Text("Failed", failed)] if failed else []), *sections, facts]
        what = "Audit of" if self.name == "audit" else f"Attack: {self.name} on"
        names = [config.data.name, config.model.name, *(asked.defences if len(asked.defences) == 1 else ())]
        title = f"{what} {', '.join(names)}"
        said = " ".join([*asked.notes, verdict or lead])
        return Shown(title, said, header, rows, note, every, first, lead=lead if verdict else "")


class AttackStudy(OnDefences[O, R]):
    """One job per defence: subclass it for an attack of your own.

    Attributes:
        result: what the attack on one defence returns.
        trains: whether the federation is trained first.
        needs_shared: whether an attack fails with the jobs of `shared`, or goes on without them.
    """

    result: type[R]
    trains = True
    needs_shared = True

    @abstractmethod
    def attack(self, asked: Asked[O], defence: str, folder: Path) -> Work[R]:
        """The attack on one defence; `run_of` says where the trained federation is."""

    def shared(self, asked: Asked[O], folder: Path) -> list[Job[Result]]:
        """Jobs that the attacks on all defences need. Refuses what cannot be attacked."""
        return []

    def run_of(self, asked: Asked[O], defence: str, folder: Path) -> Path:
        """The folder of the trained federation."""
        return asked.run or folder / defence.replace(":", ".") / "run"

    def attacks(self, asked: Asked[O], folder: Path) -> dict[str, Job[R]]:
        """The job of each defence."""
        shared, found = tuple(self.shared(asked, folder)), dict[str, Job[R]]()
        for name in asked.defences:
            label = name.replace(":", ".")
            needs, after = (shared, ()) if self.needs_shared else ((), shared)
            if self.trains and not asked.run:
                work = TrainRun(asked.under(name), self.run_of(asked, name, folder))
                needs = (Job(f"{asked.label}train-{label}", work, TrainedRun), *needs)
            attack = self.attack(asked, name, folder)
            found[name] = Job(f"{asked.label}{self.name}-{label}", attack, self.result, needs, after, asked.run)
        return found

    def jobs(self, asked: Asked[O], folder: Path) -> list[Job[Result]]:
        """Every job after those that it needs; records of several tensors are refused before anything is trained."""
        if ":" in asked.config.data.name:
            one_tensor("attack", load_data(asked.config).train.inputs)
        attacks = self.attacks(asked, folder)
        needed = {need.name: need for job in attacks.values() for need in (*job.needs, *job.after)}
        return [*needed.values(), *attacks.values()]

    def collect(self, asked: Asked[O], folder: Path, done: Done) -> Results[R]:
        """By defence."""
        return {name: done[job] for name, job in self.attacks(asked, folder).items()}


def plain_values(options: O) -> dict[str, Value]:
    """The fields of an options dataclass by name."""
    assert dataclasses.is_dataclass(options)
    return {one.name: getattr(options, one.name) for one in dataclasses.fields(options)}


def option(default: V, description: str) -> V:
    """A field of an attack's options: its default and its help."""
    found: V = field(default=default, metadata={"help": description})
    return found
