"""Charts of curves: odd values, axes, bands, thinning, lines that coincide."""

import math
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.report.tree import read

from fedveil.report import Curves, Page, render
from fedveil.report.curves import draw_curves, thin

NAN, INF = math.nan, math.inf


def drawn(lines, log=False, log_x=False, **more):
    """The chart of these lines as a tree."""
    return read(draw_curves(Curves("t", "round", "loss", lines, log_y=log, log_x=log_x, **more), 500))


def notes(tree):
    return " ".join(node.text for node in tree.all("p", "note"))


def curve_paths(tree):
    return tree.all("div", "frame")[0].all("path", "curve")


@pytest.mark.parametrize("lines", [{}, {"a": []}, {"a": [(1, NAN)]}, {"a": [(INF, 1)], "b": []}])
@pytest.mark.parametrize("log", [False, True])
def test_a_chart_without_values_is_empty(lines, log):
    assert drawn(lines, log, log_x=log).all("p", "empty")


@pytest.mark.parametrize(
    ("points", "axes", "runs"),
    [
        ([(1, 1), (2, NAN), (3, 2), (4, 3), (5, -INF)], {}, 2),
        ([(1, 0.0), (2, -1.0), (3, 1e-6), (4, 1e-3)], {"log": True}, 1),
        ([(-1, 1.0), (0, 0.0), (1e-3, 1.0), (1e-1, -2.0)], {"log_x": True}, 1),
    ],
)
def test_values_that_cannot_be_drawn_leave_a_gap_and_are_counted(points, axes, runs):
    tree = drawn({"a": points, "b": []}, **axes)
    assert curve_paths(tree)[0].attributes["d"].count("M") == runs
    assert notes(tree).startswith("b: no values. a: 2 values left out")


def test_one_point_is_drawn():
    assert curve_paths(drawn({"a": [(3, 0.5)]}))[0].attributes["d"] == "M500.0 500.0h0"


def test_a_logarithmic_x_axis_spaces_decades_evenly_and_ends_with_the_data():
    tree = drawn({"a": [(1e-4, 1), (1e-2, 2), (1, 3)]}, log_x=True)
    marks = tree.all("div", "frame")[0].all("use")
    assert [mark.attributes["x"] for mark in marks] == ["0.00%", "50.00%", "100.00%"]
    ticks = [node.text for node in tree.all("text") if "up" not in node.attributes["class"]]
    assert ticks == ["1e-4", "1e-3", "1e-2", "1e-1", "1"]


def test_thinning_keeps_ends_extremes_and_gaps_and_is_reported():
    draw = random.Random(3)
    points = [(float(k), draw.random()) for k in range(20_000)]
    points[777], points[15_123] = (777.0, 40.0), (15_123.0, -40.0)
    kept = thin(points, 500)
    assert len(kept) <= 502
    assert list(kept) == sorted(kept)
    for start in range(0, 20_000, 80):
        run = [y for _, y in points[start : start + 80]]
        assert {min(run), max(run)} <= {y for x, y in kept if start <= x < start + 80}
    assert {points[0], points[-1]} <= set(kept)
    points[5_000] = (5_000.0, NAN)
    assert any(math.isnan(y) for _, y in thin(points, 500))
    tree = drawn({"a": points})
    assert "thinned" in notes(tree)
    assert tree.all("summary")[0].text == "Data100 of 20,000 rows"
    assert len(tree.all("tbody")[0].all("tr")) == 100


def test_coinciding_lines_are_dashed_over_the_first_and_named():
    line = [(float(k), k / 7) for k in range(30)]
    tree = drawn({"plain": line, "veil": [(x, y + 1e-7) for x, y in line], "far": [(x, y + 2) for x, y in line]})
    plain, veil, far = curve_paths(tree)
    assert "stroke-dasharray" not in plain.attributes
    assert "under" in plain.attributes["class"]
    assert veil.attributes["stroke-dasharray"] != far.attributes["stroke-dasharray"]
    assert notes(tree) == "plain and veil coincide: largest difference 1e-7."


def test_lines_that_share_a_colour_differ_in_dash():
    tree = drawn({f"run {number}": [(0, number), (1, number)] for number in range(20)})
    looks = {(path.attributes["class"], path.attributes.get("stroke-dasharray")) for path in curve_paths(tree)}
    assert len(looks) == 20


def test_ticks_of_rounds_are_integers():
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


def heights(tree):
    """The values on the y axis that a band's outline goes through, and the ends of that axis."""
    frame = tree.all("div", "frame")[0]
    low, high = float(frame.attributes["data-y0"]), float(frame.attributes["data-y1"])
    if "data-log" in frame.attributes:
        low, high = math.log10(low), math.log10(high)
    steps = re.findall(r"[\d.]+ ([\d.]+)", tree.all("path", "band")[0].attributes["d"])
    return [low + (1 - float(y) / 1000) * (high - low) for y in steps], low, high


def test_a_band_reaches_from_low_to_high_and_the_axis_includes_it():
    found, low, high = heights(drawn({"a": [(0, 10.0), (1, 20.0)]}, bands={"a": [(5.0, 12.0), (20.0, 20.0)]}))
    assert low <= 5.0 <= 20.0 <= high
    assert found == pytest.approx([12.0, 20.0, 20.0, 5.0], abs=(high - low) / 5000)


def test_a_band_on_a_logarithmic_axis_is_left_out_where_it_reaches_zero_and_the_page_reports_it():
    points = [(0, 1e-7), (1, 2e-7), (2, NAN), (3, 1e-6), (4, 1e-6), (5, 1e-6)]
    ends = [(1e-8, 1e-6), (1e-7, 3e-7), (1e-7, 1e-5), (1e-7, 1e-5), (0.0, 1e-5), (1e-7, 1e-4)]
    tree = drawn({"a": points}, log=True, bands={"a": ends})
    [band] = tree.all("path", "band")
    assert band.attributes["d"].count("M") == band.attributes["d"].count("Z") == 3
    assert heights(tree)[0] == pytest.approx([-6, math.log10(3e-7), -7, -8, -5, -7, -4, -7], abs=0.01)
    assert "a: band left out at 1 point, where it reaches zero." in notes(tree)
