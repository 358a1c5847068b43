"""Templates of a page, and the dashes of its lines."""

import re
from functools import cache
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

COLOURS = 8  # of series, in theme.html; later ones differ in dash and mark
MARKS = 4  # shapes of marks, in page.html
DASHES = ((), (7, 5), (1.5, 5), (12, 4, 2, 4), (3, 3), (14, 6))


def series_dash(number: int, stretch: float = 1.0) -> str | None:
    """Return the dash pattern of a series, stretched; None is solid. Series that share a colour differ in dash."""
    pattern = DASHES[(number % COLOURS + number // COLOURS) % len(DASHES)]
    return " ".join(f"{stretch * length:g}" for length in pattern) or None


def asset(name: str) -> str:
    """Read a text file of this package."""
    return files("fedveil.report").joinpath(name).read_text(encoding="utf-8")


def prose(text: str) -> Markup:
    """Escape a text in which a number such as 2.5e-7 or 96.1 % is not broken over lines.

    >>> print(prose("off by 2.5e-7 & less"))
    off by <span class="whole">2.5e-7</span> &amp; less
    """
    return Markup(re.sub(r"\b[\d.]+(?:e-\d+| (?:%|dB))", r'<span class="whole">\g<0></span>', str(escape(text))))


def is_failure(text: str) -> bool:
    """Whether a text reports a failure."""
    return text.strip().lower().startswith("failed")


@cache
def _environment() -> Environment:
    """Load the templates; values are escaped unless they are markup, and undefined names are errors."""
    loader = PackageLoader("fedveil.report")
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters |= {"prose": prose, "percent": lambda share: f"{100 * share:.2f}%"}
    made.tests["failed"] = is_failure
    made.globals |= {"COLOURS": COLOURS, "MARKS": MARKS}
    return made


def fill(template: str, **values: object) -> Markup:
    """A template of this package, fill with values."""
    return Markup(_environment().get_template(template).render(values))
