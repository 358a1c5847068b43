"""Results in one self-contained HTML page: tables, curves, confusion matrices, intervals, pictures, settings.

>>> page = render(Page("A run", "It worked.", [Facts("Settings", {"rounds": "20"})], "fedveil run digits"))
>>> page.startswith("<!doctype html>")
True
"""

from fedveil.report.axes import NOTHING as NOTHING
from fedveil.report.axes import count as count
from fedveil.report.page import Page as Page
from fedveil.report.page import render as render
from fedveil.report.page import write as write
from fedveil.report.sections import Beside as Beside
from fedveil.report.sections import Curves as Curves
from fedveil.report.sections import Facts as Facts
from fedveil.report.sections import Interval as Interval
from fedveil.report.sections import Intervals as Intervals
from fedveil.report.sections import Matrix as Matrix
from fedveil.report.sections import Picture as Picture
from fedveil.report.sections import Pictures as Pictures
from fedveil.report.sections import Section as Section
from fedveil.report.sections import Table as Table
from fedveil.report.sections import Text as Text
