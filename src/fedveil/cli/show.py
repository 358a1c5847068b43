"""What a user sees: live lines on stderr, tables on stdout."""

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fedveil.federation.evaluate import METRICS
from fedveil.report import Text
from fedveil.studies.attack import Shown


class Progress:
    """A live line on stderr: epochs, the metric, time left. Nothing where stderr is not a terminal."""

    def __init__(self, epochs: int, label: str = "") -> None:
        form = "{desc} {percentage:3.0f}% |{bar}| epoch {n:.1f}/{total} [{elapsed}<{remaining}]{postfix}"
        self._bar = tqdm(total=epochs, desc=label, disable=None, bar_format=form, leave=True, file=sys.stderr)
        self._found: dict[str, str] = {}

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, record: dict[str, Any]) -> None:
        """Take a round's record in."""
        self._bar.update(record["epoch"] - self._bar.n)
        found = {name: f"{record[name]:.4f}" for name in METRICS if name in record}
        if found:
            self._bar.set_postfix(found, refresh=False)


class Cells:
    """A live line on stderr for parts that are computed side by side."""

    def __init__(self) -> None:
        form = "{percentage:3.0f}% |{bar}| {n:.1f}/{total} parts [{elapsed}]{postfix}"
        self._bar = tqdm(total=0, disable=None, bar_format=form, file=sys.stderr)
        self._done: dict[str, float] = {}
        self._what: dict[str, str] = {}

    def __enter__(self) -> "Cells":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, name: str, share: float, what: str) -> None:
        """Take in how far a part is."""
        self._done[name], self._what[name] = share, what
        if share >= 1:
            del self._what[name]
        self._bar.total = len(self._done)
        self._bar.set_postfix_str("; ".join(f"{cell}: {doing}" for cell, doing in self._what.items()), refresh=False)
        self._bar.update(sum(self._done.values()) - self._bar.n)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns below one another."""
    widths = [max(len(row[k]) for row in [header, *rows]) for k in range(len(header))]
    for row in [header, *rows]:
        cells = [cell.ljust(w) if k < 2 else cell.rjust(w) for k, (cell, w) in enumerate(zip(row, widths, strict=True))]
        print("  ".join(cells).rstrip())


def print_words(shown: Shown) -> None:
    """The paragraphs."""
    for section in shown.sections:
        if isinstance(section, Text):
            wrapped = [
                textwrap.fill(line, 110, initial_indent="  ", subsequent_indent="    ") for line in section.paragraphs
            ]
            print("", section.title, *wrapped, sep="\n")


def print_shown(shown: Shown, folder: Path, command: str) -> None:
    """The table, the paragraphs, and where the page is."""
    print_table(shown.header, shown.rows)
    print_words(shown)
    print(f"\n{textwrap.fill(shown.note, 110)}\nreport: {folder / 'report.html'}\nrepeat: {command}")
