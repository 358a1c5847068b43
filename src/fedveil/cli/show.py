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

ShowProgress = Callable[[str, float, str], None]


LOG_INTERVAL = 5.0  # seconds between progress lines in a log


@contextlib.contextmanager
def print_progress(urgent_prefix: str | None = None) -> Iterator[ShowProgress]:
    """Print progress to stderr: a progress bar on a terminal, otherwise log lines.

    Args:
        urgent_prefix: prefix of messages that are printed immediately.
    """
    if not sys.stderr.isatty():
        yield log_progress(urgent_prefix)
        return
    bar_format, fractions, messages = "{percentage:3.0f}% |{bar}| [{elapsed}<{remaining}]{postfix}", {}, {}
    with tqdm(total=0, bar_format=bar_format, file=sys.stderr) as bar:

        def show(name: str, fraction: float, text: str) -> None:
            if urgent_prefix and text.startswith(urgent_prefix):
                bar.write(f"{name}: {text}", file=sys.stderr)
            fractions[name], messages[name] = fraction, f"{name}: {text}"
            if fraction >= 1:
                del messages[name]
            bar.total = len(fractions)
            bar.set_postfix_str("; ".join(messages.values()), refresh=False)
            bar.update(sum(fractions.values()) - bar.n)

        yield show


def log_progress(urgent_prefix: str | None = None) -> ShowProgress:
    """Return a function that prints a line every few seconds, for each finished task and for urgent messages."""
    last_time = time.monotonic()

    def show(name: str, fraction: float, text: str) -> None:
        nonlocal last_time
        if (
            fraction >= 1
            or (urgent_prefix and text.startswith(urgent_prefix))
            or time.monotonic() - last_time >= LOG_INTERVAL
        ):
            last_time = time.monotonic()
            print(f"{100 * min(fraction, 1):3.0f}% {name}: {text}", file=sys.stderr, flush=True)

    return show


@contextlib.contextmanager
def hide_progress() -> Iterator[ShowProgress]:
    """Yield a function that shows nothing."""
    yield lambda name, fraction, text: None


def round_callback(show: ShowProgress, epochs: int, monitor: str | None = None) -> "Callable[[RoundRecord], None]":
    """Return a function that shows the epoch and the latest metrics after each round."""
    from fedveil.federation.history import select_main_metrics

    latest_metrics: dict[str, str] = {}

    def show_record(record: "RoundRecord") -> None:
        main_metrics = select_main_metrics(record.metrics, *([monitor] if monitor else []))
        latest_metrics.update({name: f", {name} {value:.4f}" for name, value in main_metrics.items()})
        show("epoch", record.epoch / epochs, f"{record.epoch:.1f}/{epochs}{''.join(latest_metrics.values())}")

    return show_record


def print_table(lines: Sequence[Sequence[str]], text_columns: int) -> None:
    """Print lines of cells in aligned columns: the first `text_columns` are text, the others numbers."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = zip(line, widths, "<" * text_columns + ">" * len(line), strict=False)
        print("  ".join(f"{cell:{side}{width}}" for cell, width, side in cells).rstrip())


def print_result(presentation: "Presentation", *last_lines: str, as_json: bool = False) -> None:
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
    print(f"\n{textwrap.fill(presentation.note, 110)}", *last_lines, sep="\n")
