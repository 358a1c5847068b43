"""The chart: a row for each protection, a column for each question, as a self-contained SVG file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from fedveil.report.axes import ChartAxis, linear_axis

LABELS, PANEL, GAP, COST = 142, 126, 36, 66  # widths
ROW, HEAD, FOOT = 26, 92, 40  # heights
TOP, LEGEND = 12, 100
WIDTH = LABELS + 4 * (PANEL + GAP) + COST
STYLE = """
    text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif }
    text { font-size: 14px; fill: #1b1f24 }
    .title { font-size: 17px; font-weight: 700 }
    .head { font-weight: 600; font-size: 13px }
    .quiet { fill: #5a626c; font-size: 13px }
    .page { fill: #ffffff }
    .band { fill: #f3f5f7 }
    .grid { stroke: #dfe2e6 }
    .guess { stroke: #5a626c; stroke-dasharray: 3 3 }
    .range { stroke: #1f5fae; stroke-width: 2 }
    .full { fill: #1f5fae; stroke: #1f5fae; stroke-width: 2 }
    .same { fill: #9aa3ad; stroke: #9aa3ad; stroke-width: 2 }
    .open { fill: #ffffff; stroke: #d1590b; stroke-width: 2 }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6e8ea }
      .quiet { fill: #9aa3ad }
      .page { fill: #14171b }
      .band { fill: #1e2329 }
      .grid { stroke: #30363d }
      .guess { stroke: #9aa3ad }
      .range { stroke: #7fb2ee }
      .full { fill: #7fb2ee; stroke: #7fb2ee }
      .same { fill: #5f676f; stroke: #5f676f }
      .open { fill: #14171b; stroke: #f5924e }
    }
  """
TITLE = "What each protection costs, and what each attacker gets"
DESCRIPTION = (
    "For each protection: the quality of the model on test records; how often a client's copy answers like the "
    "server's model; in how many rounds the server rebuilds a record; how often the final model tells a training "
    "record from another; and the time of a round. All values are in the tables of results.md."
)
LEGEND_LINES = (
    "SA: secure aggregation. DP 3: differential privacy per record, epsilon 3. Lines are 95 % intervals.",
    "Other organisations: orange, the copy as received; blue, with the noise removed from two rounds.",
    "Server: orange, one record per client and round; blue, the federation's own batches. Dashed: guessing.",
    "Grey: the same by construction as in another row, and not measured again.",
)


@dataclass(frozen=True)
class Mark:
    """A value in per cent; `kind` is "full", "open", or "same" for the figure of another row."""

    value: float
    kind: str = "full"
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Panel:
    """A column: its heading in two lines, its axis, a line for guessing, and the marks of each row."""

    heading: tuple[str, str]
    axis: ChartAxis
    guess: float | None
    marks: Sequence[Sequence[Mark]]


def short_label(label: str) -> str:
    """Return the label of a row."""
    return label.replace("secure aggregation", "SA")


def panels(rows: Mapping[str, Any], metric: str) -> list[Panel]:
    """Return the four columns of a data set."""
    quality = [interval_marks(row["metric"]) for row in rows.values()]
    low = min(mark.low for own in quality for mark in own if mark.low is not None)
    final = {label: row["final"] for label, row in rows.items()}
    inferred = [interval_marks(own[own["best"]]["auc"], own["from"] == label) for label, own in final.items()]
    top = max(60.0, *(mark.high or 0.0 for own in inferred for mark in own))
    constant = next(row["copy"]["constant"][0] for row in rows.values() if "copy" in row)
    everything = linear_axis(0, 100, max_intervals=2, extend=True)
    copies, rebuilt = ([marks(label, row) for label, row in rows.items()] for marks in (copy_marks, server_marks))
    return [
        Panel(("The model", f"test {'AUC' if metric == 'auc' else metric}, %"), _axis(low, 100), None, quality),
        Panel(("Other organisations", "copy agrees, %"), everything, 100 * constant, copies),
        Panel(("The server", "rebuilds a record, %"), everything, None, rebuilt),
        Panel(("The final model", "pairs told apart, %"), _axis(48, top), 50.0, inferred),
    ]


def _axis(low: float, high: float) -> ChartAxis:
    return linear_axis(low, high, max_intervals=3, extend=True)


def _scaled(values: Sequence[float]) -> list[float]:
    return [100 * min(1.0, value) for value in values]


def interval_marks(figure: Sequence[float], own: bool = True) -> list[Mark]:
    """Return one mark with its interval; without one if it is the figure of another row."""
    value, low, high = _scaled(figure)
    return [Mark(value, "full", low, high)] if own else [Mark(value, "same")]


def copy_marks(label: str, row: Mapping[str, Any]) -> list[Mark]:
    """Return the agreement of a client's copy: as received, and with the noise removed from two broadcasts."""
    if "copy" not in row:
        return [Mark(100.0, "same")]
    own = row["copy"]["agreement"]
    received, removed = (100 * own[name][0] for name in ("as published", "two broadcasts, no data"))
    if row["copy"]["from"] != label:
        return [Mark(removed, "same"), Mark(received, "same")]
    return [Mark(removed), Mark(received, "open")]


def server_marks(label: str, row: Mapping[str, Any]) -> list[Mark]:
    """Return the share of rounds with a known record: with one record per client, and with the task's batches."""
    one, batch = (row["server"][key]["known"] for key in ("one", "batch"))
    if row["server"]["from"] != label:
        return [Mark(100 * one[0], "same"), Mark(100 * batch[0], "same")]
    return [Mark(100 * one[0], "open"), *interval_marks(batch)]


def draw(results: Mapping[str, Any]) -> str:
    """Return the chart as SVG, one block of rows per data set."""
    blocks, y = [], TOP
    for name, own in results["data"].items():
        rows = own["rows"]
        blocks.append(draw_block(name, rows, own["settings"]["metric"], y))
        y += HEAD + ROW * len(rows) + FOOT
    legend = [text(14, y + 22 * (n + 1) - 4, line, "quiet") for n, line in enumerate(LEGEND_LINES)]
    height = y + LEGEND
    body = "\n".join([f'  <rect class="page" width="{WIDTH}" height="{height}" rx="8"/>', *blocks, *legend])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'role="img" aria-labelledby="title desc">\n  <title id="title">{TITLE}</title>\n'
        f'  <desc id="desc">{escape(DESCRIPTION)}</desc>\n  <style>{STYLE}</style>\n{body}\n</svg>\n'
    )


def draw_block(name: str, rows: Mapping[str, Any], metric: str, y: float) -> str:
    """Return the rows of a data set."""
    found, start, end = [text(14, y + 22, name, "title")], y + HEAD, y + HEAD + ROW * len(rows)
    for number, (label, row) in enumerate(rows.items()):
        line = start + ROW * number
        if number % 2 == 0:
            found.append(f'  <rect class="band" x="6" y="{line}" width="{WIDTH - 12}" height="{ROW}" rx="3"/>')
        found.append(text(14, line + 18, short_label(label)))
        found.append(text(WIDTH - 14, line + 18, f"x {row['cost']['ratio'][0]:.1f}", anchor="end"))
    found.append(text(WIDTH - 14, y + 52, "Time", "head", "end"))
    found.append(text(WIDTH - 14, y + 72, "of a round", "quiet", "end"))
    for number, panel in enumerate(panels(rows, metric)):
        found += draw_panel(panel, LABELS + number * (PANEL + GAP) + GAP / 2, start, end)
    return "\n".join(found)


def draw_panel(panel: Panel, x: float, start: float, end: float) -> list[str]:
    """Return a column: headings, grid, and marks with their intervals."""
    found = [text(x - 4, start - 40, panel.heading[0], "head"), text(x - 4, start - 20, panel.heading[1], "quiet")]
    for value, label in panel.axis.ticks:
        at = x + PANEL * panel.axis.position(value)
        found += [segment("grid", at, at, start, end), text(at, end + 18, label, "quiet", "middle")]
    if panel.guess is not None:
        at = x + PANEL * panel.axis.position(panel.guess)
        found.append(segment("guess", at, at, start, end))
    for number, marks in enumerate(panel.marks):
        middle = start + ROW * (number + 0.5)
        for mark in marks:
            if mark.low is not None and mark.high is not None:
                left, right = (x + PANEL * panel.axis.position(value) for value in (mark.low, mark.high))
                found.append(segment("range", left, right, middle, middle))
        for mark in marks:
            at = x + PANEL * panel.axis.position(mark.value)
            found.append(f'  <circle class="{mark.kind}" cx="{at:.1f}" cy="{middle:.1f}" r="5"/>')
    return found


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Return a line of text."""
    look = f' class="{kind}"' if kind else ""
    return f'  <text{look} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def segment(kind: str, x1: float, x2: float, y1: float, y2: float) -> str:
    """Return a line."""
    return f'  <line class="{kind}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'
