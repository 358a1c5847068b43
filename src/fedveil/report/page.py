"""The page around the sections, and how it reaches the disk."""

import base64
import hashlib
import os
import re
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import assert_never

from fedveil.report.chart import chart
from fedveil.report.heatmap import heatmap
from fedveil.report.intervals import intervals
from fedveil.report.markup import Html, join, note, prose, tag
from fedveil.report.palette import series_css, theme_css
from fedveil.report.pictures import pictures
from fedveil.report.sections import Beside, Curves, Facts, Intervals, Matrix, Pictures, Section, Table, Text
from fedveil.report.strokes import marker_shapes
from fedveil.report.tables import facts, table

POINTS_A_LINE = 500  # about what a screen shows
POINTS_A_PAGE = 20_000  # keeps a page of many charts below 1 MB


def _asset(name: str) -> str:
    """The text of a file of this package."""
    return files("fedveil.report").joinpath(name).read_text(encoding="utf-8")


def _identify(number: int, title: str) -> str:
    """An id for a section: its number keeps it unique, its title makes it readable."""
    slug = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:40]
    return f"s{number}-{slug}".rstrip("-")


def _lines(section: Section) -> int:
    """How many lines a section draws."""
    if isinstance(section, Beside):
        return sum(map(_lines, section.parts))
    return len(section.series) if isinstance(section, Curves) else 0


def _body(section: Section, limit: int) -> Html:
    """A section without its heading."""
    match section:
        case Curves():
            return chart(section, limit)
        case Table():
            return table(section)
        case Matrix():
            return heatmap(section)
        case Pictures():
            return pictures(section)
        case Intervals():
            return intervals(section)
        case Facts():
            return facts(section)
        case Text():
            return join(tag("p", {}, prose(paragraph)) for paragraph in section.paragraphs)
        case Beside():
            parts = [
                tag("div", {"class": "part"}, tag("h3", {}, part.title), _body(part, limit)) for part in section.parts
            ]
            return join([tag("div", {"class": "beside"}, *parts), note(section.note)])
        case _:
            assert_never(section)


def _section(name: str, section: Section, limit: int) -> Html:
    """A section with its heading, which names it."""
    heading = tag("h2", {"id": f"{name}-title"}, section.title)
    kind = f"of-{type(section).__name__.lower()}"
    return tag(
        "section", {"id": name, "class": kind, "aria-labelledby": f"{name}-title"}, heading, _body(section, limit)
    )


def _head(title: str) -> Html:
    """Title, style and script. The policy lets the page load nothing and run no script but its own."""
    script = _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return tag(
        "head",
        {},
        tag("meta", {"charset": "utf-8"}),
        tag("meta", {"http-equiv": "Content-Security-Policy", "content": policy}),
        tag("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        tag("link", {"rel": "icon", "href": "data:,"}),
        tag("title", {}, title),
        tag("style", {}, Html(theme_css() + series_css() + _asset("page.css"))),
        tag("script", {}, Html(script)),
    )


def _command(command: str) -> Html:
    """The command that repeats the run."""
    code = tag("pre", {"tabindex": 0, "aria-label": "Command that repeats this run"}, tag("code", {}, command))
    return tag("div", {"class": "command"}, tag("p", {}, "Repeat this run"), code)


def _masthead(title: str, lead: str, command: str) -> Html:
    """Title, result, command; the theme button stays hidden until the script works."""
    button = tag("button", {"type": "button", "class": "theme", "hidden": ""}, "Dark")
    return tag("header", {}, button, tag("h1", {}, title), tag("p", {"class": "lead"}, prose(lead)), _command(command))


def _contents(names: Sequence[str], sections: Sequence[Section]) -> Html:
    """Links to the sections."""
    links = [
        tag("li", {}, tag("a", {"href": f"#{name}"}, section.title))
        for name, section in zip(names, sections, strict=True)
    ]
    return tag("nav", {"aria-label": "Contents"}, tag("ol", {}, *links))


def render(title: str, lead: str, sections: Sequence[Section], command: str) -> str:
    """The page as HTML: it loads nothing, follows the reader's theme, and works without its script.

    Args:
        title: what was run.
        lead: the result in one sentence.
        sections: what to show, in order.
        command: what to type to get the same page again.
    """
    limit = max(40, min(POINTS_A_LINE, POINTS_A_PAGE // max(1, sum(map(_lines, sections)))))
    names = [_identify(number, section.title) for number, section in enumerate(sections, start=1)]
    bodies = [_section(name, section, limit) for name, section in zip(names, sections, strict=True)]
    skip = tag("a", {"class": "skip", "href": "#main"}, "Skip to the results")
    main = tag("main", {"id": "main", "tabindex": -1}, *bodies)
    layout = tag("div", {"class": "layout"}, _contents(names, sections), main)
    body = tag("body", {}, skip, marker_shapes(), _masthead(title, lead, command), layout)
    return "<!doctype html>\n" + tag("html", {"lang": "en"}, _head(title), body) + "\n"


def write(path: Path, title: str, lead: str, sections: Sequence[Section], command: str) -> Path:
    """Write the page, whole or not at all, and return its path; an older page stays until the new one is complete."""
    page = render(title, lead, sections, command).encode("utf-8", "replace")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(page)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path
