"""HTML from values. Text is escaped unless it is already Html, so forgetting to escape is not possible."""

import re
from collections.abc import Iterable, Mapping
from html import escape

VOID = frozenset({"meta", "link", "br", "hr", "img"})
Attributes = Mapping[str, str | int | float | None]


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def as_html(text: str) -> Html:
    """The text as markup: itself if it is Html, escaped if it is not."""
    return text if isinstance(text, Html) else Html(escape(text))


def join(parts: Iterable[str], between: str = "") -> Html:
    """The parts one after the other."""
    return Html(as_html(between).join(as_html(part) for part in parts))


def tag(name: str, attributes: Attributes, *children: str) -> Html:
    """One element. An attribute whose value is None is left out; one whose value is "" stands alone.

    >>> tag("p", {"class": "note", "id": None}, "1 < 2")
    '<p class="note">1 &lt; 2</p>'
    """
    written = "".join(
        f" {key}" if value == "" else f' {key}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{written}>" + ("" if name in VOID else f"{join(children)}</{name}>"))


def prose(text: str) -> Html:
    """Text in which a number such as 2.5e-7 is not broken at its hyphen.

    >>> prose("off by 2.5e-7 & less")
    'off by <span class="whole">2.5e-7</span> &amp; less'
    """
    return Html(re.sub(r"\b[\d.]+e-\d+", lambda found: tag("span", {"class": "whole"}, found[0]), as_html(text)))


def note(text: str) -> Html:
    """A remark under a figure, or nothing."""
    return tag("p", {"class": "note"}, prose(text)) if text else Html()


def scrollable(label: str, *children: str) -> Html:
    """A box that scrolls by itself when its content is wide, by keyboard too."""
    return tag("div", {"class": "scroll", "tabindex": 0, "role": "region", "aria-label": label}, *children)
