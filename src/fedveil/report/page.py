"""Render a page and write it to a file."""

import base64
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from fedveil.files import write_atomically
from fedveil.report import Curves, Facts, Intervals, Page, Section, SideBySide
from fedveil.report.charts import draw_curves, draw_intervals
from fedveil.report.markup import fill, read_asset

SCRIPTS = ("page.js", "png.js")
POINTS_PER_LINE = 500  # about the number that a screen can show
POINTS_PER_PAGE = 20_000  # keeps a page with many charts below 1 MB


def _id(number: int, title: str) -> str:
    return f"s{number}-{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-')[:40]}".rstrip("-")


def _count_lines(section: Section) -> int:
    if isinstance(section, SideBySide):
        return sum(map(_count_lines, section.parts))
    return len(section.series) if isinstance(section, Curves) else 0


def _kind(section: Section) -> str:
    return type(section).__name__.lower()


def _body(section: Section, limit: int) -> Markup:
    match section:
        case Curves():
            return draw_curves(section, limit)
        case Intervals():
            return draw_intervals(section)
        case SideBySide():
            parts = [(part.title, _body(part, limit)) for part in section.parts]
            return fill("beside.html", section=section, parts=parts)
    return fill(f"{_kind(section)}.html", section=section)


def _explain(section: Section, limit: int, glossary: Mapping[str, str]) -> Markup:
    body = _body(section, limit)
    if not glossary or isinstance(section, Facts):
        return body
    from fedveil.report.glossary import explain_terms  # imported here because most pages have no glossary

    return explain_terms(body, glossary)


def render(page: Page) -> str:
    """Return the page as HTML. The page loads no other files, follows the reader's theme, and works without its script.

    Its content security policy allows only this script. Link previews show the title and the verdict, but no picture,
    because og:image must be an absolute URL, and the address of the page is not known.

    >>> render(Page("A run", "It worked.", [], "fedveil demo")).startswith("<!doctype html>")
    True
    """
    limit = max(40, min(POINTS_PER_LINE, POINTS_PER_PAGE // max(1, sum(map(_count_lines, page.sections)))))
    style, script = Markup(read_asset("page.css")), Markup("".join(map(read_asset, SCRIPTS)))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    sections = [
        (_id(number, section.title), section.title, _kind(section), _explain(section, limit, page.glossary))
        for number, section in enumerate(page.sections, start=1)
    ]
    parts = {"icon": quote(read_asset("icon.svg")), "style": style, "script": script, "digest": digest}
    return f"{fill('page.html', page=page, sections=sections, **parts)}\n"


def write(page: Page, path: Path) -> Path:
    """Write the page atomically and return its path; an older page is kept until the new one is complete."""
    return write_atomically(path, render(page))
