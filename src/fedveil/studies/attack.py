"""Studies of attacks: each study attacks one federation under one or several defences, in separate jobs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import TypeAdapter

from fedveil.checks import check_choice
from fedveil.data import one_tensor
from fedveil.defences.registry import INCLUDED
from fedveil.errors import BadArgument
from fedveil.report import Facts, Text
from fedveil.runs.build import load_data
from fedveil.runs.settings import Config, Value
from fedveil.studies.federations import TrainedRun, TrainRun
from fedveil.studies.jobs import Failure, JobTask, Result, StudyJob, successes
from fedveil.studies.study import JobGraph, Presentation, Study, capitalise, failed_row, read_toml

O = TypeVar("O")  # noqa: E741
P = TypeVar("P", bound=Result)
R = TypeVar("R", bound=Result)
V = TypeVar("V")
Results = dict[str, R | Failure]  # results by defence


@dataclass(frozen=True)
class AttackRequest(Generic[O]):
    """The federation to attack, and the options of the attack.

    Attributes:
        config: configuration of the federation.
        defences: names of the defences under which the federation is attacked.
        options: values of the attack's flags, as a frozen dataclass.
        run: folder of a trained run to attack, whose defence is the only one in `defences`; None to train a new run.
        label: prefix of job names, for attacks that share a folder.
        notes: sentences about the run, printed before the verdict.
    """

    config: Config
    defences: tuple[str, ...]
    options: O
    run: Path | None = None
    label: str = ""
    notes: tuple[str, ...] = ()

    def config_for(self, defence: str) -> Config:
        """Return the configuration for a defence; built-in defences do not receive settings for a user's defence."""
        if defence in INCLUDED and not set(INCLUDED).issuperset(self.defences):
            return self.config.changed(defence=defence, settings=())
        return self.config.changed(defence=defence)

    def job_name(self, *parts: str) -> str:
        """Return the name of a job, which is also its file name."""
        return f"{self.label}{'-'.join(parts)}".replace(":", ".").replace(", ", "-").replace(" ", "-")


class AttackStudy(Study[AttackRequest[O], Results[R]], Generic[O, R]):
    """Base class for attacks on a federation under several defences.

    A subclass with one job per defence defines `attack` and `result`. A subclass with several jobs per defence
    overrides `graph`, usually with `join_parts`.

    Attributes:
        name: name on the command line.
        summary: one-line help text.
        options: a frozen dataclass with a default and a description for each of the attack's flags.
        defaults: configuration values that override the defaults of `Config`, at a scale that two cores can handle.
        result: type of the attack's result.
        trains: whether the federation is trained before the attack.
        requires_shared_jobs: whether the attack fails if any job of `shared_jobs` fails; otherwise it runs without the
            result of that job.
    """

    name: str
    summary: str
    options: type[O]
    defaults: Mapping[str, Value] = {}
    result: type[R]
    trains = True
    requires_shared_jobs = True

    def attack(self, request: AttackRequest[O], defence: str, folder: Path) -> JobTask[R]:
        """Return the task that attacks one defence; the trained federation is in `run_folder`."""
        raise NotImplementedError

    def show(self, request: AttackRequest[O], results: Mapping[str, R]) -> Presentation:
        """Present the results of the defences that did not fail; `present` adds the title, failures and settings."""
        raise NotImplementedError

    def shared_jobs(self, request: AttackRequest[O], folder: Path) -> list[StudyJob[Result]]:
        """Return the jobs that the attacks on all defences share; refuse a federation that cannot be attacked."""
        return []

    def run_folder(self, request: AttackRequest[O], defence: str, folder: Path) -> Path:
        """Return the folder of the trained federation."""
        return request.run or folder / defence.replace(":", ".") / "run"

    def attacks(self, request: AttackRequest[O], folder: Path) -> dict[str, StudyJob[R]]:
        """Return the attack job for each defence."""
        shared_jobs, jobs = tuple(self.shared_jobs(request, folder)), dict[str, StudyJob[R]]()
        for name in request.defences:
            dependencies, predecessors = (shared_jobs, ()) if self.requires_shared_jobs else ((), shared_jobs)
            if self.trains and not request.run:
                task = TrainRun(request.config_for(name), self.run_folder(request, name, folder))
                dependencies = (StudyJob(request.job_name("train", name), task, TrainedRun), *dependencies)
            attack, label = self.attack(request, name, folder), request.job_name(self.name, name)
            jobs[name] = StudyJob(label, attack, self.result, dependencies, predecessors, request.run)
        return jobs

    def graph(self, request: AttackRequest[O], folder: Path) -> JobGraph[Results[R]]:
        """Return the jobs, each listed after its dependencies; refuse records that consist of several tensors."""
        if ":" in request.config.data.name:
            one_tensor("attack", load_data(request.config).train.inputs)
        attacks = self.attacks(request, folder)
        earlier_jobs = {
            dependency.name: dependency
            for job in attacks.values()
            for dependency in (*job.dependencies, *job.predecessors)
        }
        jobs: list[StudyJob[Result]] = [*earlier_jobs.values(), *attacks.values()]
        return JobGraph(jobs, lambda results: {name: results[job] for name, job in attacks.items()})

    def present(self, request: AttackRequest[O], results: Results[R]) -> Presentation:
        """Add the title, the summary, any failures and the configuration to the presentation that `show` returns."""
        config = request.config
        values = {name: value for name, value in config.flat().items() if name != "defence"}
        values |= plain_values(request.options)
        description = (
            f"{capitalise(self.summary)}: {config.data.name}, {config.model.name}, {config.data.clients} clients."
        )
        facts = Facts("Configuration", {name: str(value) for name, value in values.items() if value not in (None, ())})
        names = [config.data.name, config.model.name, *(request.defences if len(request.defences) == 1 else ())]
        presentation = complete_presentation(
            self.show(request, successes(results)), results, request.notes, facts, description
        )
        title = f"{'Audit of' if self.name == 'audit' else f'Attack: {self.name} on'} {', '.join(names)}"
        return dataclasses.replace(presentation, title=title)


def complete_presentation(
    presentation: Presentation, results: Mapping[str, Result], notes: Sequence[str], facts: Facts, description: str = ""
) -> Presentation:
    """Add failures, notes and the configuration to a presentation; use the description if there is no verdict."""
    failures = {name: result.failed for name, result in results.items() if isinstance(result, Failure)}
    failure_sections = [Text("Failed", [f"{name}: {reason}" for name, reason in failures.items()])] if failures else []
    return dataclasses.replace(
        presentation,
        verdict=" ".join([*notes, presentation.verdict or description]),
        plain_verdict=" ".join([*notes, presentation.plain_verdict]) if presentation.plain_verdict else "",
        rows=[*presentation.rows, *(failed_row(name, len(presentation.header)) for name in failures)],
        sections=[*presentation.sections, facts],
        top_sections=[*failure_sections, *presentation.top_sections],
        description=description if presentation.verdict else "",
    )


@cache
def read_federations() -> dict[str, dict[str, dict[str, Value]]]:
    """Return the federations defined in federations.toml, by purpose and name."""
    return TypeAdapter(dict[str, dict[str, dict[str, Value]]]).validate_python(read_toml("federations.toml"))


def check_defences(names: Sequence[str], choices: Sequence[str], flag: str) -> None:
    """Refuse unknown or repeated names; names of the form package.module:Class are not looked up."""
    for index, name in enumerate(names):
        if ":" not in name:
            check_choice(flag, "defence", name, choices)
        if name in names[:index]:
            raise BadArgument(flag, f"{name!r} is given twice", "remove one of them")
    if not names:
        raise BadArgument(flag, "no defence is given", f"use one or more of {', '.join(choices)}")


def join_parts(
    parts: Mapping[str, Mapping[str, StudyJob[P]]], join: Callable[[dict[str, P | Failure]], R]
) -> JobGraph[Results[R]]:
    """Return the jobs for all parts and defences; `join` combines the results of all parts under one defence."""
    return JobGraph(
        [job for jobs in parts.values() for job in jobs.values()],
        lambda results: {
            name: join({part: results[job] for part, job in jobs.items()}) for name, jobs in parts.items()
        },
    )


def plain_values(options: O) -> dict[str, Value]:
    """Return the fields of an options dataclass by name."""
    assert dataclasses.is_dataclass(options)
    return {item.name: getattr(options, item.name) for item in dataclasses.fields(options)}


def option(default: V, description: str) -> V:
    """Declare a field of an attack's options with its default value and help text."""
    result: V = field(default=default, metadata={"help": description})
    return result
