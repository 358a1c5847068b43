"""How a page looks: its templates, colours, dashes and marks."""

import re
from functools import cache
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

THEMES = {  # light, dark; the series s0 to s7 differ for the colour-blind too
    "page": ("#fbfbfa", "#14171b"),
    "surface": ("#ffffff", "#1a1e23"),
    "ink": ("#1b1f24", "#e6e8ea"),
    "quiet": ("#5a626c", "#9aa3ad"),
    "line": ("#dfe2e6", "#30363d"),
    "grid": ("#eceef0", "#262b31"),
    "accent": ("#1f5fae", "#7fb2ee"),
    "bad": ("#a8321a", "#f0917a"),
    "hit": ("#8fbcec", "#23548c"),
    "miss": ("#f3ae84", "#945022"),
    "s0": ("#1f5fae", "#7fb2ee"),
    "s1": ("#d1590b", "#f5924e"),
    "s2": ("#0b8a68", "#41c69f"),
    "s3": ("#a03a86", "#dd8fca"),
    "s4": ("#8a6d00", "#d6b545"),
    "s5": ("#2a8fc4", "#6fd0f2"),
    "s6": ("#6b4fbb", "#b19cf0"),
    "s7": ("#5f676f", "#aab2ba"),
}
LIGHT, DARK = ({name: pair[side] for name, pair in THEMES.items()} for side in (0, 1))
COLOURS = 8
DASHES = ((), (7, 5), (1.5, 5), (12, 4, 2, 4), (3, 3), (14, 6))
SHAPES = (  # of marks: ring, small diamond, square, triangle
    "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0",
    "M0-3.6L3.6 0L0 3.6L-3.6 0Z",
    "M-4-4H4V4H-4Z",
    "M0-4.4L4.2 3.2H-4.2Z",
)
ICON = (  # an F whose lower arm is veiled, on a blue that stands out from light and dark tabs
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="7" fill="#2a6bbd"/>'
    '<path d="M8 26V6h16v4h-10v16z" fill="#fff"/><path d="M14 14h8v4h-8z" fill="#fff" opacity=".6"/></svg>'
)


def series_dash(number: int, stretch: float = 1.0) -> str | None:
    """The dash pattern of series `number`, stretched; None is solid. Series that share a colour differ in dash."""
    pattern = DASHES[(number % COLOURS + number // COLOURS) % len(DASHES)]
    return " ".join(f"{stretch * length:g}" for length in pattern) or None


def asset(name: str) -> str:
    """The text of a file of this package."""
    return files("fedveil.report").joinpath(name).read_text(encoding="utf-8")


def prose(text: str) -> Markup:
    """Text in which a number such as 2.5e-7 or 96.1 % is not broken.

    >>> print(prose("off by 2.5e-7 & less"))
    off by <span class="whole">2.5e-7</span> &amp; less
    """
    return Markup(re.sub(r"\b[\d.]+(?:e-\d+| (?:%|dB))", r'<span class="whole">\g<0></span>', str(escape(text))))


def failed(text: str) -> bool:
    """Whether a text tells of a failure."""
    return text.strip().lower().startswith("failed")


@cache
def _environment() -> Environment:
    """The templates; whatever they print is escaped unless it is markup already, and a name must be known."""
    loader = PackageLoader("fedveil.report")
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters |= {"prose": prose, "percent": lambda share: f"{100 * share:.2f}%"}
    made.tests["failed"] = failed
    made.globals |= {"COLOURS": COLOURS, "SHAPES": SHAPES}
    return made


def filled(template: str, **values: object) -> Markup:
    """A template of this package, filled with values."""
    return Markup(_environment().get_template(template).render(values))
