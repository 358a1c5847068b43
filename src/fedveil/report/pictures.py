"""A grid of small pictures, enlarged by whole factors so that their pixels stay square."""

import base64

from fedveil.report.markup import Attributes, Html, join, note, scrollable, tag
from fedveil.report.png import encode
from fedveil.report.sections import Picture, Pictures

WIDE, NARROW = 96, 64  # about how many pixels of the screen the longer side takes, on a desktop and on a phone


def _enlarged(picture: Picture) -> str:
    """The shown widths as CSS variables: the nearest whole multiples of the picture's own width."""
    side = max(picture.width, picture.height)
    wide, narrow = (picture.width * max(1, round(shown / side)) for shown in (WIDE, NARROW))
    return f"--wide:{wide}px;--narrow:{narrow}px"


def _cell(row: str, column: str, picture: Picture | None) -> Html:
    """A picture over its caption, or a blank."""
    if picture is None:
        return tag("td", {})
    data = encode(picture.width, picture.height, picture.channels, picture.data)
    image: Attributes = {
        "src": f"data:image/png;base64,{base64.b64encode(data).decode()}",
        "alt": ", ".join(label for label in (row, column) if label) or "picture",
        "width": picture.width,
        "height": picture.height,
    }
    caption = tag("span", {}, picture.caption) if picture.caption else ""
    return tag("td", {"style": _enlarged(picture)}, tag("img", image), caption)


def pictures(section: Pictures) -> Html:
    """The grid, in a box that scrolls by itself."""
    if not section.rows or not section.columns:
        return join([tag("p", {"class": "empty"}, "No pictures."), note(section.note)])
    names = [tag("th", {"scope": "col"}, column) for column in section.columns]
    head = tag("thead", {}, tag("tr", {}, tag("td", {}), *names))
    rows = [
        tag("tr", {}, tag("th", {"scope": "row"}, label), *map(_cell, [label] * len(cells), section.columns, cells))
        for label, cells in section.rows
    ]
    body = tag("table", {"class": "pictures"}, head, tag("tbody", {}, *rows))
    return join([scrollable(section.title, body), note(section.note)])
