"""The structure of a study: jobs, results as frozen dataclasses, and a pure function that presents them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import JsonValue
from pydantic_core import to_jsonable_python

from fedveil.files import write_atomically
from fedveil.locks import lock_folder
from fedveil.plain_json import to_json
from fedveil.studies.basis import Digests
from fedveil.studies.jobs import JobResults, Result, Show, StudyJob, run_jobs, show_nothing
from fedveil.studies.presentation import Presentation

SCHEMA = 1  # version of results.json
S = TypeVar("S")
R = TypeVar("R")


@dataclass(frozen=True)
class JobGraph(Generic[R]):
    """Jobs, each listed after its dependencies, and a function that combines their results.

    The result of a failed job is a `Failure`.
    """

    jobs: Sequence[StudyJob[Result]]
    collect: Callable[[JobResults], R]


class Study(ABC, Generic[S, R]):
    """Base class for studies, which define the jobs that answer a question and present the results.

    S is the type of the request, a frozen dataclass. R is the type of the results, a frozen dataclass or a dict of
    frozen dataclasses.
    """

    @abstractmethod
    def graph(self, request: S, folder: Path) -> JobGraph[R]:
        """Return the jobs of the study; `folder` is for files that are too large to be part of a result."""

    @abstractmethod
    def present(self, request: S, results: R) -> Presentation:
        """Present the results, without training a model or reading a file."""

    def summarise(self, results: R, shown: Presentation) -> Mapping[str, JsonValue]:
        """Return values for results.json besides the results; by default none."""
        return {}


def run_graph(
    graph: JobGraph[R],
    folder: Path,
    *,
    workers: int | None = None,
    show: Show = show_nothing,
    digests: Digests | None = None,
) -> R:
    """Run the jobs that have no valid result in the folder, and combine all results."""
    with lock_folder(folder):
        return graph.collect(run_jobs(graph.jobs, folder / "jobs", workers=workers, show=show, digests=digests))


def gather(study: Study[S, R], request: S, folder: Path, *, workers: int | None = None, show: Show = show_nothing) -> R:
    """Run the jobs of a study that have no valid result in the folder, and return the results of the study."""
    return run_graph(study.graph(request, folder), folder, workers=workers, show=show)


def publish(study: Study[S, R], request: S, results: R, folder: Path, command: str) -> Presentation:
    """Write results.json and report.html, and return the `Presentation` to print."""
    from fedveil.report import write  # imported here because jobs do not need it

    presented = study.present(request, results)
    plain = {"schema": SCHEMA, "command": command, "results": to_jsonable_python(results)}
    plain |= study.summarise(results, presented)
    with lock_folder(folder):
        write_atomically(folder / "results.json", to_json(plain, indent=1) + "\n")
        write(presented.page(command), folder / "report.html")
    return presented
