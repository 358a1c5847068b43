"""Results in one self-contained HTML page: tables, curves, confusion matrices, settings.

>>> page = render("A run", "It worked.", [Facts("Settings", {"rounds": "20"})], "fedveil run digits")
>>> page.startswith("<!doctype html>")
True
"""

from fedveil.report.page import render, write
from fedveil.report.sections import Beside, Curves, Facts, Matrix, Section, Table, Text

__all__ = ["Beside", "Curves", "Facts", "Matrix", "Section", "Table", "Text", "render", "write"]
