"""The structure of a study: jobs, results as frozen dataclasses, and a pure function that presents them."""

import base64
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Generic, TypeVar

import torch
from pydantic import BaseModel, JsonValue, TypeAdapter
from pydantic_core import to_jsonable_python
from torch import Tensor

from fedveil.attacks.scores import Estimate
from fedveil.files import lock_folder, write_atomically
from fedveil.plain_json import to_json
from fedveil.report import NOTHING, Interval, Page, Picture, Section, Table
from fedveil.studies.basis import Digests
from fedveil.studies.jobs import JobProgress, JobResults, Result, StudyJob, run_jobs, show_nothing


@dataclass(frozen=True)
class Presentation:
    """The results of a study, ready for the page and the terminal.

    Attributes:
        title: title of the page.
        verdict: the result in one sentence.
        header, rows, note: header, rows and note of the main table.
        sections: sections of the page after the table; the terminal prints only the paragraphs of `Text` sections.
        top_sections: sections before the table.
        summary_rows: rows (question, the paper's answer, our answer) for a summary of several studies.
        description: description of the question, printed below the verdict.
        plain_verdict: the verdict in plain words, which replaces `verdict` at the top of the page.
        glossary: explanations of the terms on the page.
    """

    title: str
    verdict: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str
    sections: Sequence[Section]
    top_sections: Sequence[Section] = ()
    summary_rows: Sequence[tuple[str, str, str]] = ()
    description: str = ""
    plain_verdict: str = ""
    glossary: Mapping[str, str] = field(default_factory=dict)

    def page(self, command: str) -> Page:
        """Return the page, with the command that repeats the study."""
        table = [Table("Result", self.header, self.rows, self.note)] if self.rows else []
        sections, verdict = [*self.top_sections, *table, *self.sections], self.plain_verdict or self.verdict
        return Page(self.title, verdict, sections, command, self.description, glossary=self.glossary)


class PageTexts(BaseModel):
    """The prose of a study's page, from texts.toml.

    Attributes:
        note: note below the main table.
        reading: paragraphs that explain how to read the page.
        notes: other notes, by name.
    """

    note: str = ""
    reading: list[str] = []
    notes: dict[str, str] = {}


def read_toml(name: str) -> dict[str, JsonValue]:
    """Read a TOML file that comes with the studies."""
    return tomllib.loads(files("fedveil.studies").joinpath(name).read_text(encoding="utf-8"))


@cache
def read_texts() -> dict[str, PageTexts]:
    """Return the prose of each study's page, by study."""
    return TypeAdapter(dict[str, PageTexts]).validate_python(read_toml("texts.toml"))


def format_estimate(estimate: Estimate | None, format_spec: str = ".1f", scale: float = 1.0) -> str:
    """Format a value with its interval; an interval of length 0 is omitted.

    >>> format_estimate(Estimate(0.612, 0.59, 0.634), ".2f"), format_estimate(Estimate(2.0, 2.0, 2.0))
    ('0.61 [0.59, 0.63]', '2.0')
    """
    if estimate is None:
        return NOTHING
    value, low, high = (f"{scale * number:{format_spec}}" for number in (estimate.value, estimate.low, estimate.high))
    return value if estimate.low == estimate.high else f"{value} [{low}, {high}]"


def format_percent(estimate: Estimate | None) -> str:
    """Format a fraction and its interval in per cent, for example "61.2 [59.0, 63.4]"."""
    return format_estimate(estimate, scale=100)


def format_figures(figures: Mapping[str, Estimate | None], formats: Mapping[str, tuple[str, float]]) -> list[str]:
    """Format the estimates in a row; `formats` contains the format and factor of each column."""
    return [format_estimate(figures.get(column), spec, scale) for column, (spec, scale) in formats.items()]


def mark(name: str, estimate: Estimate | None, group: str = "", scale: float = 1.0) -> Interval:
    """Return an estimate as a mark in a chart; None is marked as failed."""
    if estimate is None:
        return Interval(name, None, group=group, missing="failed")
    return Interval(name, scale * estimate.value, scale * estimate.low, scale * estimate.high, group)


def failed_row(name: str, columns: int, text: str = "failed") -> list[str]:
    """Return a table row for a defence that has no results."""
    return [name, text, *[""] * (columns - 2)]


def display_name(defence: str) -> str:
    """Return the name of a defence for use in a sentence; package.module:Class becomes the class name."""
    return "no defence" if defence == "plain" else defence.rpartition(":")[2]


def capitalise(sentence: str) -> str:
    """Return a sentence with its first letter capitalised."""
    return sentence[:1].upper() + sentence[1:]


def encode_image(image: Tensor) -> str:
    """Encode pixels in [0, 1] as base64, row by row, with one byte per channel."""
    pixels = (image.detach() * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().cpu().numpy()
    return base64.b64encode(pixels.tobytes()).decode()


def decode_picture(shape: Sequence[int], code: str, caption: str = "") -> Picture:
    """Decode an image from `encode_image`; `shape` is (channels, rows, columns)."""
    channels, height, width = shape
    return Picture(width, height, channels, base64.b64decode(code), caption)


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

    def summarise(self, results: R, presentation: Presentation) -> Mapping[str, JsonValue]:
        """Return values to add to results.json; none by default."""
        return {}


def run_graph(
    graph: JobGraph[R],
    folder: Path,
    *,
    workers: int | None = None,
    show: JobProgress = show_nothing,
    digests: Digests | None = None,
) -> R:
    """Run the jobs that have no valid result in the folder, and combine all results."""
    with lock_folder(folder):
        return graph.collect(run_jobs(graph.jobs, folder / "jobs", workers=workers, show=show, digests=digests))


def gather(
    study: Study[S, R], request: S, folder: Path, *, workers: int | None = None, show: JobProgress = show_nothing
) -> R:
    """Run the jobs of a study that have no valid result in the folder, and return the results of the study."""
    return run_graph(study.graph(request, folder), folder, workers=workers, show=show)


def publish(study: Study[S, R], request: S, results: R, folder: Path, command: str) -> Presentation:
    """Write results.json and report.html, and return the `Presentation` to print."""
    from fedveil.report import write  # imported here because jobs do not need it

    presentation = study.present(request, results)
    content = {"schema": SCHEMA, "command": command, "results": to_jsonable_python(results)}
    content |= study.summarise(results, presentation)
    with lock_folder(folder):
        write_atomically(folder / "results.json", to_json(content, indent=1) + "\n")
        write(presentation.page(command), folder / "report.html")
    return presentation
