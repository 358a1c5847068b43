"""The templates of a page and the functions that they call."""

import base64
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from fedveil.report import NOTHING, Matrix, Picture, count

COLOURS = 8  # number of colours in theme.html; further series reuse them with other dashes and marks
MARKS = 4  # number of mark shapes in page.html
DESKTOP_WIDTH, PHONE_WIDTH = (
    96,
    64,
)  # approximate width of a picture's longer side in pixels, on a desktop and on a phone
NUMERIC_PATTERN = re.compile(
    r"(?i)[<>≤≥~≈]?\s*[-+\u2212±]?\s*[\d.,]*\d(e[-+]?\d+)?\b.{0,24}"
)  # a number, then its unit
INTERVAL_PATTERN = re.compile(
    r"(.*\S) (\[[^\]]*\]|\([^)]*\))"
)  # a value, then its interval or another value in brackets
BLANK_CELLS = frozenset({"", "-", "\u2013", "\u2014", "n/a", "nan", "inf", "not measured"})


def read_asset(name: str) -> str:
    """Read a text file of this package."""
    return files("fedveil.report").joinpath(name).read_text(encoding="utf-8")


def fill(template: str, **values: object) -> Markup:
    """Fill a template of this package with values."""
    return Markup(_environment().get_template(template).render(values))


@cache
def _environment() -> Environment:
    """Return the template environment: values are escaped unless they are markup, and undefined names are errors."""
    loader = PackageLoader("fedveil.report")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "prose": prose,
        "percent": lambda fraction: f"{100 * fraction:.2f}%",
        "brackets": split_brackets,
    }
    environment.filters |= {
        "widths": display_widths,
        "description": describe_matrix,
        "numeric_columns": numeric_columns,
    }
    environment.filters["base64"] = lambda content: base64.b64encode(content).decode()
    environment.tests["failed"] = is_failure
    environment.globals |= {"COLOURS": COLOURS, "MARKS": MARKS, "NOTHING": NOTHING}
    return environment


def prose(text: str) -> Markup:
    """Escape text, and keep numbers such as 2.5e-7 or 96.1 % on one line.

    >>> print(prose("off by 2.5e-7 & less"))
    off by <span class="whole">2.5e-7</span> &amp; less
    """
    return Markup(re.sub(r"\b[\d.]+(?:e-\d+| (?:%|dB))", r'<span class="whole">\g<0></span>', str(escape(text))))


def is_failure(text: str) -> bool:
    """Return whether the text begins with "failed"."""
    return text.strip().lower().startswith("failed")


def numeric_columns(rows: Sequence[Sequence[str]], columns: int) -> list[bool]:
    """Return, for each column, whether it contains only numbers, apart from blanks and failures."""
    cells = ([row[index].strip() for row in rows] for index in range(columns))
    values_by_column = [
        [cell for cell in column if cell.lower() not in BLANK_CELLS and not is_failure(cell)] for column in cells
    ]
    return [bool(column) and all(NUMERIC_PATTERN.fullmatch(cell) for cell in column) for column in values_by_column]


def split_brackets(cell: str) -> tuple[str, str]:
    """Split a cell into its value and the text in brackets, which is printed smaller.

    >>> split_brackets("89.1% [87.7%, 90.4%]"), split_brackets("12.5")
    (('89.1%', '[87.7%, 90.4%]'), ('12.5', ''))
    """
    result = INTERVAL_PATTERN.fullmatch(cell)
    return (result[1], result[2]) if result else (cell, "")


def display_widths(picture: Picture) -> str:
    """Return the displayed widths as CSS variables: integer multiples of the picture's width, so pixels stay square."""
    side = max(picture.width, picture.height)
    desktop, phone = (picture.width * max(1, round(width / side)) for width in (DESKTOP_WIDTH, PHONE_WIDTH))
    return f"--wide:{desktop}px;--narrow:{phone}px"


def describe_matrix(matrix: Matrix) -> str:
    """Describe the accuracy and the most common mistake in words."""
    indices, total = range(len(matrix.labels)), sum(map(sum, matrix.counts))
    if not total:
        return "No predictions."
    num_correct = sum(matrix.counts[index][index] for index in indices)
    accuracy = f"{num_correct / total:.2%} correct: {num_correct:,} of {count(total, 'prediction')}."
    mistakes = [
        (matrix.counts[truth][prediction], truth, prediction)
        for truth in indices
        for prediction in indices
        if truth != prediction
    ]
    num_mistakes, truth, prediction = max(mistakes, default=(0, 0, 0))
    description = f"{matrix.labels[truth]} predicted as {matrix.labels[prediction]}, {count(num_mistakes, 'time')}"
    return f"{accuracy} Most common mistake: {description}." if num_mistakes else accuracy
