"""Attacks as studies: one or several defences of the same federation, each attacked in separate jobs."""

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from fedveil.data import one_tensor
from fedveil.defences.registry import BUILT_IN
from fedveil.report import Facts, Section, Text
from fedveil.runs.build import load_data
from fedveil.runs.config import Config, Value
from fedveil.studies.federations import TrainedRun, TrainRun
from fedveil.studies.jobs import Failed, Job, Result, Work
from fedveil.studies.study import JobGraph, Shown, Study

O = TypeVar("O")  # noqa: E741
P = TypeVar("P", bound=Result)
R = TypeVar("R", bound=Result)
V = TypeVar("V")
Results = dict[str, R | Failed]


@dataclass(frozen=True)
class AttackRequest(Generic[O]):
    """A federation to attack, and how.

    Attributes:
        config: of the federation.
        defences: names; the federation is attacked under each of them.
        options: the attack's flags, a frozen dataclass.
        run: folder of a trained run to attack in place of training; `defences` then names its defence.
        label: prefix of job names, where several attacks share a folder.
        notes: sentences on the run, printed before the verdict.
    """

    config: Config
    defences: tuple[str, ...]
    options: O
    run: Path | None = None
    label: str = ""
    notes: tuple[str, ...] = ()

    def config_for(self, defence: str) -> Config:
        """Return the configuration with one of the defences; built-in ones get no settings of a user's defence."""
        built_in = {record.name for record in BUILT_IN}
        if defence in built_in and not built_in.issuperset(self.defences):
            return self.config.changed(defence=defence, settings=())
        return self.config.changed(defence=defence)

    def job_name(self, *parts: str) -> str:
        """Return the name of a job, fit for a file."""
        return f"{self.label}{'-'.join(parts)}".replace(":", ".").replace(", ", "-").replace(" ", "-")


class MultiDefenceStudy(Study[AttackRequest[O], Results[R]], Generic[O, R]):
    """An attack on a federation under several defences.

    Attributes:
        options: a frozen dataclass with a default and a description for each of the attack's flags.
        defaults: values of the configuration that differ from those of `Config`, at a scale that two cores manage.
    """

    options: type[O]
    defaults: Mapping[str, Value] = {}

    def show(self, asked: AttackRequest[O], results: Results[R]) -> Shown:
        """Return the attack's table and sections; `present` adds the title and what all attacks share."""
        raise NotImplementedError

    def present(self, asked: AttackRequest[O], results: Results[R]) -> Shown:
        """Add title, question, failures and configuration; without a verdict, the question takes its place."""
        config, shown = asked.config, self.show(asked, results)
        failed = [f"{name}: {found.failed}" for name, found in results.items() if isinstance(found, Failed)]
        values = {name: value for name, value in config.flat().items() if name != "defence"}
        values |= plain_values(asked.options)
        where = f"{config.data.name}, {config.model.name}, {config.data.clients} clients"
        lead = f"{self.summary[0].upper()}{self.summary[1:]}: {where}."
        sections: list[Section] = [
            *([Text("Failed", failed)] if failed else []),
            *shown.sections,
            Facts("Configuration", {name: str(value) for name, value in values.items()}),
        ]
        names = [config.data.name, config.model.name, *(asked.defences if len(asked.defences) == 1 else ())]
        return dataclasses.replace(
            shown,
            title=f"{'Audit of' if self.name == 'audit' else f'Attack: {self.name} on'} {', '.join(names)}",
            verdict=" ".join([*asked.notes, shown.verdict or lead]),
            sections=sections,
            lead=lead if shown.verdict else "",
        )


class PartStudy(MultiDefenceStudy[O, R], Generic[O, P, R]):
    """An attack of independent parts: one job for each part under each defence."""

    @abstractmethod
    def check(self, asked: AttackRequest[O]) -> None:
        """Refuse what cannot be attacked, before any job runs."""

    @abstractmethod
    def parts(self, asked: AttackRequest[O], defence: str) -> dict[str, Job[P]]:
        """Return the jobs of one defence by the name of the part."""

    @abstractmethod
    def join(self, asked: AttackRequest[O], parts: dict[str, P | Failed]) -> R:
        """Return the results of all parts under one defence as one."""

    def graph(self, asked: AttackRequest[O], folder: Path) -> JobGraph[Results[R]]:
        """Return all parts under all defences; their results by defence."""
        self.check(asked)
        every = {name: self.parts(asked, name) for name in asked.defences}
        return JobGraph(
            [job for parts in every.values() for job in parts.values()],
            lambda done: {
                name: self.join(asked, {part: done[job] for part, job in parts.items()})
                for name, parts in every.items()
            },
        )


class AttackStudy(MultiDefenceStudy[O, R]):
    """An attack on a trained federation, one job per defence; subclass it for a new attack.

    Attributes:
        result: what the attack on one defence returns.
        trains: whether the federation is trained first.
        needs_shared: whether an attack fails with the jobs of `shared`, or runs without them.
    """

    result: type[R]
    trains = True
    needs_shared = True

    @abstractmethod
    def attack(self, asked: AttackRequest[O], defence: str, folder: Path) -> Work[R]:
        """Return the attack on one defence; `run_folder` is where the trained federation is."""

    def shared(self, asked: AttackRequest[O], folder: Path) -> list[Job[Result]]:
        """Return the jobs that the attacks on all defences need; refuse what cannot be attacked."""
        return []

    def run_folder(self, asked: AttackRequest[O], defence: str, folder: Path) -> Path:
        """Return the folder of the trained federation."""
        return asked.run or folder / defence.replace(":", ".") / "run"

    def attacks(self, asked: AttackRequest[O], folder: Path) -> dict[str, Job[R]]:
        """Return the job of each defence."""
        shared, found = tuple(self.shared(asked, folder)), dict[str, Job[R]]()
        for name in asked.defences:
            needs, after = (shared, ()) if self.needs_shared else ((), shared)
            if self.trains and not asked.run:
                work = TrainRun(asked.config_for(name), self.run_folder(asked, name, folder))
                needs = (Job(asked.job_name("train", name), work, TrainedRun), *needs)
            attack = self.attack(asked, name, folder)
            found[name] = Job(asked.job_name(self.name, name), attack, self.result, needs, after, asked.run)
        return found

    def graph(self, asked: AttackRequest[O], folder: Path) -> JobGraph[Results[R]]:
        """Return every job after those that it needs; refuse records of several tensors before any training."""
        if ":" in asked.config.data.name:
            one_tensor("attack", load_data(asked.config).train.inputs)
        attacks = self.attacks(asked, folder)
        needed = {need.name: need for job in attacks.values() for need in (*job.needs, *job.after)}
        jobs: list[Job[Result]] = [*needed.values(), *attacks.values()]
        return JobGraph(jobs, lambda done: {name: done[job] for name, job in attacks.items()})


def plain_values(options: O) -> dict[str, Value]:
    """Return the fields of an options dataclass by name."""
    assert dataclasses.is_dataclass(options)
    return {one.name: getattr(options, one.name) for one in dataclasses.fields(options)}


def option(default: V, description: str) -> V:
    """Declare a field of an attack's options with its default and its help."""
    found: V = field(default=default, metadata={"help": description})
    return found
