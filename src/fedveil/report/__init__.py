"""Results in one self-contained HTML page: tables, curves, confusion matrices, intervals, pictures, settings.

>>> page = render(Page("A run", "It worked.", [Facts("Settings", {"rounds": "20"})], "fedveil run digits"))
>>> page.startswith("<!doctype html>")
True
"""

from fedveil.report.page import Page, render, write
from fedveil.report.scale import NOTHING, count
from fedveil.report.sections import (
    Beside,
    Curves,
    Facts,
    Interval,
    Intervals,
    Matrix,
    Picture,
    Pictures,
    Section,
    Table,
    Text,
)

__all__ = [
    "NOTHING",
    "Beside",
    "Curves",
    "Facts",
    "Interval",
    "Intervals",
    "Matrix",
    "Page",
    "Picture",
    "Pictures",
    "Section",
    "Table",
    "Text",
    "count",
    "render",
    "write",
]
