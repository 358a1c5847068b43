"""Print progress to stderr and tables to stdout."""

import contextlib
import json
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from tqdm import tqdm

if TYPE_CHECKING:
    from fedveil.federation.history import RoundRecord
    from fedveil.studies.study import Presentation

Show = Callable[[str, float, str], None]


EVERY = 5.0  # seconds between progress lines in a log


@contextlib.contextmanager
def print_progress(urgent: str | None = None) -> Iterator[Show]:
    """Print progress to stderr: a progress bar on a terminal, otherwise log lines.

    Args:
        urgent: prefix of messages that are always printed.
    """
    if not sys.stderr.isatty():
        yield log_progress(urgent)
        return
    form, done, running = "{percentage:3.0f}% |{bar}| [{elapsed}<{remaining}]{postfix}", {}, {}
    with tqdm(total=0, bar_format=form, file=sys.stderr) as bar:

        def show(name: str, share: float, what: str) -> None:
            if urgent and what.startswith(urgent):
                bar.write(f"{name}: {what}", file=sys.stderr)
            done[name], running[name] = share, f"{name}: {what}"
            if share >= 1:
                del running[name]
            bar.total = len(done)
            bar.set_postfix_str("; ".join(running.values()), refresh=False)
            bar.update(sum(done.values()) - bar.n)

        yield show


def log_progress(urgent: str | None = None) -> Show:
    """Return a function that prints a line every few seconds, and for every finished task and urgent message."""
    last = time.monotonic()

    def show(name: str, share: float, what: str) -> None:
        nonlocal last
        if share >= 1 or (urgent and what.startswith(urgent)) or time.monotonic() - last >= EVERY:
            last = time.monotonic()
            print(f"{100 * min(share, 1):3.0f}% {name}: {what}", file=sys.stderr, flush=True)

    return show


@contextlib.contextmanager
def hide_progress() -> Iterator[Show]:
    """Yield a function that shows nothing."""
    yield lambda name, share, what: None


def round_callback(show: Show, epochs: int, monitor: str | None = None) -> "Callable[[RoundRecord], None]":
    """Return a function that shows the epoch and the latest metrics after each round."""
    from fedveil.federation.history import select_main_metrics

    result: dict[str, str] = {}

    def show_record(record: "RoundRecord") -> None:
        main_metrics = select_main_metrics(record.metrics, *([monitor] if monitor else []))
        result.update({name: f", {name} {value:.4f}" for name, value in main_metrics.items()})
        show("epoch", record.epoch / epochs, f"{record.epoch:.1f}/{epochs}{''.join(result.values())}")

    return show_record


def print_table(lines: Sequence[Sequence[str]], texts: int) -> None:
    """Print lines of cells in columns: first some columns of text, then numbers."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = zip(line, widths, "<" * texts + ">" * len(line), strict=False)
        print("  ".join(f"{cell:{side}{width}}" for cell, width, side in cells).rstrip())


def print_result(presentation: "Presentation", *last: str, as_json: bool = False) -> None:
    """Print the table, paragraphs, note and last lines; as JSON, print only the table."""
    from fedveil.report import Answers, Text

    if as_json:
        print(json.dumps([dict(zip(presentation.header, row, strict=True)) for row in presentation.rows]))
        return
    print_table([presentation.header, *presentation.rows] if presentation.rows else [], 2)
    for section in (*presentation.top_sections, *presentation.sections):
        if isinstance(section, Answers):
            for question, paragraphs in section.answers.items():
                print(
                    f"\n{question}",
                    *(textwrap.indent(textwrap.fill(paragraph, 106), "  ") for paragraph in paragraphs),
                    sep="\n",
                )
        if isinstance(section, Text):
            print(f"\n{section.title}")
            for paragraph in section.paragraphs:
                print(textwrap.fill(paragraph, 110, initial_indent="  ", subsequent_indent="    "))
    print(f"\n{textwrap.fill(presentation.note, 110)}", *last, sep="\n")
