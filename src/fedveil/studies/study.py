"""The one pipeline of every study: jobs, results as documented dataclasses, and a pure function that presents them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
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
    """Results as a reader gets them.

    Attributes:
        title: of the page.
        verdict: the result in one plain sentence, computed from it; of an exhibit of the paper a clause, or "".
        header, rows, note: the table, for the terminal and the page.
        sections: of the page, after the table; paragraphs of `Text` go to the terminal too.
        first: sections before the table.
        headline: (question, the paper's answer, ours) for a summary of several studies.
        lead: more words on what was asked, below the verdict.
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
        """The page, with the command that makes it again."""
        table = [Table("Result", self.header, self.rows, self.note)] if self.rows else []
        return Page(self.title, self.verdict, [*self.first, *table, *self.sections], command, self.lead)


class Study(ABC, Generic[S, R]):
    """A question, how to compute its answer, and how to show it.

    S is what is asked, a frozen dataclass; R what comes out, a frozen dataclass or a dict of them.

    Attributes:
        name: on the command line.
        summary: one line of help.
    """

    name: str
    summary: str

    @abstractmethod
    def jobs(self, asked: S, folder: Path) -> list[Job[Result]]:
        """The parts, each after those that it needs; `folder` is for files that are too large for a result."""

    @abstractmethod
    def collect(self, asked: S, folder: Path, done: Done) -> R:
        """The results of the parts as one. A part that failed is a `Failed` in it."""

    @abstractmethod
    def present(self, asked: S, results: R) -> Shown:
        """What a reader gets; computes nothing and reads nothing."""


def gather(
    study: Study[S, R],
    asked: S,
    folder: Path,
    *,
    workers: int | None = None,
    show: Show = lambda name, share, what: None,
    digests: Digests | None = None,
) -> R:
    """Do what is not done yet, and return the results; `digests` are those that the command has computed already."""
    with locked(folder):
        done = run_jobs(study.jobs(asked, folder), folder / "jobs", workers=workers, show=show, digests=digests)
        return study.collect(asked, folder, done)


def publish(study: Study[S, R], asked: S, results: R, folder: Path, command: str) -> Shown:
    """Write results.json and report.html; returns what the terminal shows."""
    plain = {"command": command, "results": to_jsonable_python(results)}
    with locked(folder):
        write_whole(folder / "results.json", to_json(plain, indent=1) + "\n")
        shown = study.present(asked, results)
        write(shown.page(command), folder / "report.html")
    return shown
