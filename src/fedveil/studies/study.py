"""The pipeline of every study: jobs, results as frozen dataclasses, and a pure function that presents them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from pydantic_core import to_jsonable_python

from fedveil.files import write_whole
from fedveil.locks import locked
from fedveil.plain_json import to_json
from fedveil.report import Page, Section, Table, write
from fedveil.studies.digests import Digests
from fedveil.studies.jobs import Done, Job, Result, Show, run_jobs

S = TypeVar("S")
R = TypeVar("R")


@dataclass(frozen=True)
class Shown:
    """Results as a reader sees them.

    Attributes:
        title: title of the page.
        verdict: the result in one sentence; for an exhibit of the paper a clause, or "".
        header, rows, note: the table, for the terminal and the page.
        sections: sections of the page after the table; the terminal prints the paragraphs of `Text`.
        first: sections before the table.
        headline: rows (question, the paper's answer, ours) for a summary of several studies.
        lead: description of the question, below the verdict.
    """

    title: str
    verdict: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str
    sections: Sequence[Section]
    first: Sequence[Section] = ()
    headline: Sequence[tuple[str, str, str]] = ()
    lead: str = ""

    def page(self, command: str) -> Page:
        """Return the page, with the command that repeats the study."""
        table = [Table("Result", self.header, self.rows, self.note)] if self.rows else []
        return Page(self.title, self.verdict, [*self.first, *table, *self.sections], command, self.lead)


@dataclass(frozen=True)
class JobGraph(Generic[R]):
    """Jobs, each after those that it needs, and a function that combines their results.

    A job that failed is a `Failed` among the results.
    """

    jobs: Sequence[Job[Result]]
    collect: Callable[[Done], R]


class Study(ABC, Generic[S, R]):
    """A question, how to compute its answer, and how to present it.

    S is the type of the question, a frozen dataclass; R that of the answer, a frozen dataclass or a dict of them.

    Attributes:
        name: name on the command line.
        summary: one line of help.
    """

    name: str
    summary: str

    @abstractmethod
    def graph(self, asked: S, folder: Path) -> JobGraph[R]:
        """Return the jobs; `folder` is for files that are too large for a result."""

    @abstractmethod
    def present(self, asked: S, results: R) -> Shown:
        """Present the results; computes nothing and reads nothing."""


def run_graph(
    graph: JobGraph[R],
    folder: Path,
    *,
    workers: int | None = None,
    show: Show = lambda name, fraction, what: None,
    digests: Digests | None = None,
) -> R:
    """Run the jobs whose results are not in the folder yet, and return all results as one."""
    with locked(folder):
        return graph.collect(run_jobs(graph.jobs, folder / "jobs", workers=workers, show=show, digests=digests))


def gather(
    study: Study[S, R],
    asked: S,
    folder: Path,
    *,
    workers: int | None = None,
    show: Show = lambda name, fraction, what: None,
) -> R:
    """Run the jobs of a study whose results are not in the folder yet, and return its results."""
    with locked(folder):
        return run_graph(study.graph(asked, folder), folder, workers=workers, show=show)


def publish(study: Study[S, R], asked: S, results: R, folder: Path, command: str) -> Shown:
    """Write results.json and report.html, and return what the terminal prints."""
    plain = {"command": command, "results": to_jsonable_python(results)}
    with locked(folder):
        write_whole(folder / "results.json", to_json(plain, indent=1) + "\n")
        shown = study.present(asked, results)
        write(shown.page(command), folder / "report.html")
    return shown
