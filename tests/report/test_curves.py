"""Charts of curves: odd values, axes, bands, lines that coincide."""

import doctest
import math
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.report.tree import read

from fedveil import report
from fedveil.report import Curves, Page, pictures, render, scale, series, style, tables
from fedveil.report.curves import chart
from fedveil.report.series import thin

NAN, INF = math.nan, math.inf


def drawn(lines, log=False, limit=500, log_x=False):
    """The chart of these lines as a tree."""
    return read(chart(Curves("t", "round", "loss", lines, log_y=log, log_x=log_x), limit))


def notes(tree):
    return " ".join(node.text for node in tree.all("p", "note"))


@pytest.mark.parametrize("module", [report, pictures, scale, series, style, tables], ids=lambda module: module.__name__)
def test_the_examples_in_docstrings_run(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("lines", [{}, {"a": []}, {"a": [(1, NAN)]}, {"a": [(INF, 1)], "b": []}])
@pytest.mark.parametrize("log", [False, True])
def test_a_chart_without_values_is_empty(lines, log):
    assert drawn(lines, log, log_x=log).all("p", "empty")


def test_missing_values_leave_a_gap_and_are_counted():
    tree = drawn({"a": [(1, 1), (2, NAN), (3, 2), (4, 3), (5, -INF)], "b": []})
    assert tree.all("path", "curve")[-1].attributes["d"].count("M") == 2
    assert notes(tree) == "b: no values. a: 2 values not finite, left out."


def test_one_point_is_drawn():
    path = drawn({"a": [(3, 0.5)]}).all("div", "frame")[0].all("path", "curve")[0]
    assert path.attributes["d"] == "M500.0 500.0h0"


def test_a_logarithmic_axis_leaves_out_what_is_not_positive_and_says_so():
    tree = drawn({"a": [(1, 0.0), (2, -1.0), (3, 1e-6), (4, 1e-3)]}, log=True)
    assert "a: 2 values at or below zero, left out of the logarithmic axis." in notes(tree)
    assert "1e-6" in [node.text for node in tree.all("text", "up")]


def test_a_logarithmic_x_axis_leaves_out_what_is_not_positive_and_says_so():
    tree = drawn({"a": [(-1, 1.0), (0, 0.0), (1e-3, 1.0), (1e-1, -2.0)]}, log_x=True)
    assert notes(tree) == "a: 2 points with x at or below zero, left out of the logarithmic x axis."
    assert [path.attributes["d"] for path in tree.all("div", "frame")[0].all("path")] == ["M0.0 0.0L1000.0 1000.0"]


def test_a_logarithmic_x_axis_places_decades_evenly_and_ends_with_the_data():
    tree = drawn({"a": [(1e-4, 1), (1e-2, 2), (1, 3)]}, log_x=True)
    marks = tree.all("div", "frame")[0].all("use")
    assert [mark.attributes["x"] for mark in marks] == ["0.00%", "50.00%", "100.00%"]
    ticks = [node.text for node in tree.all("text") if "up" not in node.attributes["class"]]
    assert ticks == ["1e-4", "1e-3", "1e-2", "1e-1", "1"]
    assert tree.all("p", "x")[0].text == "round (logarithmic)"


def test_the_low_end_of_a_logarithmic_x_axis_survives_thinning_marks_and_table():
    points = [(k / 10_000, (k / 10_000) ** 0.5) for k in range(10_001)]
    kept = {x for x, _ in thin(points[1:], 500, log_x=True)}
    assert len(kept) <= 502
    assert {x for x, _ in points[1:13]} <= kept
    tree = drawn({"a": points}, log_x=True)
    marks = [float(mark.attributes["x"].rstrip("%")) for mark in tree.all("div", "frame")[0].all("use")]
    assert marks == pytest.approx([100 * (place + 1 / 8) / 8 for place in range(8)], abs=2)
    rows = [float(row.all("th")[0].text) for row in tree.all("tbody")[0].all("tr")]
    assert rows[0] == 1e-4
    assert rows[-1] == 1
    assert sum(x < 1e-2 for x in rows) > 20


def test_lines_on_one_another_are_told_apart():
    line = [(float(k), k / 7) for k in range(30)]
    tree = drawn({"plain": line, "veil": [(x, y + 1e-7) for x, y in line], "far": [(x, y + 2) for x, y in line]})
    plain, veil, far = tree.all("div", "frame")[0].all("path", "curve")
    assert "stroke-dasharray" not in plain.attributes
    assert "under" in plain.attributes["class"]
    assert veil.attributes["stroke-dasharray"] != far.attributes["stroke-dasharray"]
    assert notes(tree) == "plain and veil coincide: largest difference 1e-7."


def test_a_noisy_line_is_dashed_only_over_another():
    draw = random.Random(2)
    noise = [(float(k), draw.random()) for k in range(300)]
    tree = drawn({"plain": noise, "veil": noise[:-1], "alone": [(x, y + 5) for x, y in noise]})
    dashes = [path.attributes.get("stroke-dasharray") for path in tree.all("div", "frame")[0].all("path", "curve")]
    assert dashes[0] is dashes[2] is None
    assert float(dashes[1].split()[0]) > 20


def test_lines_that_share_a_colour_differ_in_dash():
    tree = drawn({f"run {number}": [(0, number), (1, number)] for number in range(20)})
    looks = [
        (path.attributes["class"], path.attributes.get("stroke-dasharray"))
        for path in tree.all("div", "frame")[0].all("path", "curve")
    ]
    assert len(set(looks)) == len(looks) == 20


def test_a_thinned_chart_says_so_and_names_its_rows():
    tree = drawn({"a": [(k, k) for k in range(1000)]})
    assert "thinned" in notes(tree)
    assert tree.all("summary")[0].text == "Data100 of 1,000 rows"
    assert len(tree.all("tbody")[0].all("tr")) == 100


def test_rounds_are_whole_numbers_on_the_axis():
    ticks = drawn({"a": [(1, 0.5), (2, 0.6), (4, 0.7)]}).all("text")
    assert [node.text for node in ticks if "up" not in node.attributes["class"]] == ["1", "2", "3", "4"]


values = st.floats() | st.sampled_from([0.0, 1.0, 1.0 + 2**-52, 5e-324, 1e-300, 1e299, NAN, INF])


@given(points=st.lists(st.tuples(values, values), max_size=40), log=st.booleans(), log_x=st.booleans())
def test_any_values_make_a_chart_whose_lines_stay_inside(points, log, log_x):
    tree = read(render(Page("t", "l", [Curves("c", "x", "y", {"a": points}, log_y=log, log_x=log_x)], "c")))
    for frame in tree.all("div", "frame"):
        assert frame.all("text", "up")
        for mark in frame.all("use"):
            assert all(-0.01 <= float(mark.attributes[key].rstrip("%")) <= 100.01 for key in ("x", "y"))
        assert not {"nan", "inf"} & set(frame.all("path")[0].attributes["d"].replace("L", " ").split())


def heights(band, frame):
    """The ends of the y axis, and the shares of it at which a band's outline stands."""
    low, high = float(frame.attributes["data-y0"]), float(frame.attributes["data-y1"])
    steps = re.findall(r"[\d.]+ ([\d.]+)", band.attributes["d"])
    return low, high, [1 - float(y) / 1000 for y in steps]


def test_a_band_reaches_from_low_to_high_and_the_axis_holds_it():
    section = Curves("t", "epoch", "accuracy", {"a": [(0, 10.0), (1, 20.0)]}, bands={"a": [(5.0, 12.0), (20.0, 20.0)]})
    tree = read(chart(section, 500))
    low, high, shares = heights(tree.all("path", "band")[0], tree.all("div", "frame")[0])
    assert low <= 5.0 <= 20.0 <= high
    found = [low + share * (high - low) for share in shares]
    assert found == pytest.approx([12.0, 20.0, 20.0, 5.0], abs=(high - low) / 5000)


def test_a_band_on_a_logarithmic_axis_is_left_out_where_it_reaches_zero_and_the_page_says_so():
    points = [(0, 1e-7), (1, 2e-7), (2, NAN), (3, 1e-6), (4, 1e-6), (5, 1e-6)]
    ends = [(1e-8, 1e-6), (1e-7, 3e-7), (1e-7, 1e-5), (1e-7, 1e-5), (0.0, 1e-5), (1e-7, 1e-4)]
    tree = read(chart(Curves("t", "round", "error", {"a": points}, log_y=True, bands={"a": ends}), 500))
    [band] = tree.all("path", "band")
    assert band.attributes["d"].count("M") == band.attributes["d"].count("Z") == 3
    low, high, shares = heights(band, tree.all("div", "frame")[0])
    found = [math.log10(low) + share * (math.log10(high) - math.log10(low)) for share in shares]
    assert found == pytest.approx([-6, math.log10(3e-7), -7, -8, -5, -7, -4, -7], abs=0.01)
    assert "a: band left out at 1 point, where it reaches zero." in notes(tree)


def test_a_long_band_is_thinned_and_keeps_its_extremes():
    line = [(float(k), 0.5) for k in range(20_000)]
    ends = [(0.25 if k == 777 else 0.5, 1.0 if k == 15_123 else 0.5) for k in range(20_000)]
    tree = read(chart(Curves("t", "step", "loss", {"a": line}, bands={"a": ends}), 500))
    low, high, shares = heights(tree.all("path", "band")[0], tree.all("div", "frame")[0])
    assert len(shares) <= 1004
    assert low + min(shares) * (high - low) == pytest.approx(0.25, abs=0.001)
    assert low + max(shares) * (high - low) == pytest.approx(1.0, abs=0.001)
