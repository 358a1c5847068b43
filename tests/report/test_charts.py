"""Charts: odd values, axes, bands, thinning, lines that coincide; order and look of rows, references, gaps."""

import math
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.report.tree import read

from fedveil.report import NOTHING, Curves, Interval, Intervals, Page, render
from fedveil.report.axes import linear_axis, log_axis
from fedveil.report.charts import build_axis, draw_curves, draw_intervals, thin

NAN, INF = math.nan, math.inf


def drawn(lines, log=False, log_x=False, **more):
    """The chart of these lines as a tree."""
    return read(draw_curves(Curves("t", "round", "loss", lines, log_y=log, log_x=log_x, **more), 500))


def notes(tree):
    return " ".join(node.text for node in tree.all("p", "note"))


def across(tree):
    """Labels of the x axis."""
    return [node.text for node in tree.all("text") if "up" not in node.attributes["class"]]


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
        ([(1, NAN), (3, 0.5), (5, NAN)], {}, 1),  # one point
        ([(1, 0.0), (2, -1.0), (3, 1e-6), (4, 1e-3)], {"log": True}, 1),
        ([(-1, 1.0), (0, 0.0), (1e-3, 1.0), (1e-1, -2.0)], {"log_x": True}, 1),
    ],
)
def test_values_that_cannot_be_drawn_leave_a_gap_and_are_counted(points, axes, runs):
    tree = drawn({"a": points, "b": []}, **axes)
    assert curve_paths(tree)[0].attributes["d"].count("M") == runs
    assert notes(tree).startswith("b: no values. a: 2 values left out")


def test_a_logarithmic_x_axis_spaces_decades_evenly_and_ends_with_the_data():
    tree = drawn({"a": [(1e-4, 1), (1e-2, 2), (1, 3)]}, log_x=True)
    marks = tree.all("div", "frame")[0].all("use")
    assert [mark.attributes["x"] for mark in marks] == ["0.00%", "50.00%", "100.00%"]
    assert across(tree) == ["1e-4", "1e-3", "1e-2", "1e-1", "1"]
    assert across(drawn({"a": [(1, 0.5), (2, 0.6), (4, 0.7)]})) == ["1", "2", "3", "4"]  # integers for rounds


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
    assert "reduced to the points" in notes(tree)
    assert tree.all("summary")[0].text == "Data100 of 20,000 rows"
    assert len(tree.all("tbody")[0].all("tr")) == 100


def test_later_lines_are_dashed_over_the_first_and_those_that_coincide_are_named():
    line = [(float(k), k / 7) for k in range(30)]
    tree = drawn({"plain": line, "veil": [(x, y + 1e-7) for x, y in line], "far": [(x, y + 2) for x, y in line]})
    plain, veil, far = curve_paths(tree)
    assert "stroke-dasharray" not in plain.attributes
    assert "under" in plain.attributes["class"]
    assert veil.attributes["stroke-dasharray"] != far.attributes["stroke-dasharray"]
    assert notes(tree) == "plain and veil coincide: largest difference 1e-7."
    tree = drawn({f"run {number}": [(0, number), (1, number)] for number in range(20)})
    looks = {(path.attributes["class"], path.attributes.get("stroke-dasharray")) for path in curve_paths(tree)}
    assert len(looks) == 20


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


def test_a_band_reaches_from_low_to_high_and_is_left_out_where_a_logarithmic_axis_has_no_place_for_it():
    found, low, high = heights(drawn({"a": [(0, 10.0), (1, 20.0)]}, bands={"a": [(5.0, 12.0), (20.0, 20.0)]}))
    assert low <= 5.0 <= 20.0 <= high
    assert found == pytest.approx([12.0, 20.0, 20.0, 5.0], abs=(high - low) / 5000)
    points = [(0, 1e-7), (1, 2e-7), (2, NAN), (3, 1e-6), (4, 1e-6), (5, 1e-6)]
    ends = [(1e-8, 1e-6), (1e-7, 3e-7), (1e-7, 1e-5), (1e-7, 1e-5), (0.0, 1e-5), (1e-7, 1e-4)]
    tree = drawn({"a": points}, log=True, bands={"a": ends})
    [band] = tree.all("path", "band")
    assert band.attributes["d"].count("M") == band.attributes["d"].count("Z") == 3
    assert heights(tree)[0] == pytest.approx([-6, math.log10(3e-7), -7, -8, -5, -7, -4, -7], abs=0.01)
    assert "a: band left out at 1 point, where it reaches zero." in notes(tree)


AUDIT = [
    Interval("as published", 0.507, 0.488, 0.526, "veil"),
    Interval("as published", 0.872, 0.853, 0.891, "no defence"),
    Interval("adaptive", 0.5182, 0.5012, 0.5371, "veil"),
    Interval("adaptive", None, group="no defence", missing="failed: out of memory"),
]
LINES = {"chance": 0.5, "undefended": 0.87}


def draw_rows(rows, references=LINES, **more):
    """The plot as a tree."""
    return read(draw_intervals(Intervals("t", "AUC", rows, references, **more)))


def texts(tree, part):
    return [node.text for node in tree.all("div", part)]


def test_rows_are_grouped_and_entries_of_one_name_look_the_same():
    tree = draw_rows(AUDIT)
    assert texts(tree, "group") == ["veil", "", "no defence", ""]
    assert texts(tree, "name") == ["as published", "adaptive"] * 2
    values = ["0.507 [0.488, 0.526]", "0.518 [0.501, 0.537]", "0.872 [0.853, 0.891]", "failed: out of memory"]
    assert texts(tree, "value") == values
    assert len(tree.all("div", "rule")) == 1
    assert tree.all("summary")[0].text == "Data6 rows"
    names = [row.all("th")[0].text for row in tree.all("tbody")[0].all("tr")]
    assert [names[0], *names[-2:]] == ["veil: as published", "reference: chance", "reference: undefended"]
    tracks = tree.all("div", "rows")[0].all("svg", "track")
    assert [track.attributes["class"] for track in tracks] == ["track s0", "track s1"] * 2
    marks = [[use.attributes["href"] for use in track.all("use")] for track in tracks]
    assert marks == [["#mark-0"], ["#mark-1"], ["#mark-0"], []]
    legend = tree.all("ul", "legend")[0].all("li")
    assert [entry.text for entry in legend] == ["as published", "adaptive"]
    many = draw_rows([Interval(f"run {k}", k) for k in range(20)])
    looks = [(one.attributes["class"], one.all("use")[0].attributes["href"]) for one in many.all("svg", "track")]
    assert len(set(looks)) == 20  # names that share a colour differ in mark
    assert not many.all("ul", "legend")
    assert not many.all("div", "group")


def test_missing_values_are_explained_and_only_failures_marked():
    tree = draw_rows([Interval("a", None), Interval("b", None, missing="failed: diverged"), Interval("c", 0.7)])
    assert [node.text for node in tree.all("span", "unmeasured")] == ["not measured"]
    assert [node.text for node in tree.all("span", "failed")] == ["failed: diverged"]
    rows = [[cell.text for cell in row.all("td")] for row in tree.all("tbody")[0].all("tr")]
    assert rows[:2] == [["not measured", NOTHING, NOTHING], ["failed: diverged", NOTHING, NOTHING]]


@pytest.mark.parametrize(
    ("limits", "ends"),
    [
        ({}, (0.4, 0.9)),
        ({"low": 0.0, "high": 1.0}, (0.0, 1.0)),
        ({"low": 0.43}, (0.43, 0.9)),
        ({"low": 0.6, "high": 0.7}, (0.4, 0.9)),
    ],
)
def test_the_axis_includes_all_numbers_and_the_limits(limits, ends):
    axis = build_axis(Intervals("t", "AUC", AUDIT, LINES, **limits))
    assert (axis.low, axis.high) == pytest.approx(ends)
    assert all(axis.low - 1e-9 <= value <= axis.high + 1e-9 for value, _ in axis.ticks)


def test_names_of_references_are_on_separate_levels_inside_the_plot():
    names = draw_rows(AUDIT, {"chance": 0.5, "ideal": 0.95, "DP": 0.45}, low=0.4, high=1.0).all("text", "reference")
    sides = {name.text: name.attributes["text-anchor"] for name in names}
    assert sides == {"chance 0.5": "start", "ideal 0.95": "end", "DP 0.45": "start"}
    assert len({name.attributes["y"] for name in names}) == 3


numbers = st.floats(-1e299, 1e299) | st.sampled_from([0.0, 5e-324, 1.0, 1.0 + 2**-52])
rows = st.builds(
    lambda name, group, value, ends: Interval(name, value, *sorted(ends), group=group),
    st.sampled_from("ab"),
    st.sampled_from(["", "g", "h"]),
    numbers,
    st.tuples(numbers, numbers),
)


@given(rows=st.lists(rows, max_size=6), references=st.dictionaries(st.sampled_from("rst"), numbers), limit=numbers)
def test_any_numbers_make_a_plot_that_stays_inside(rows, references, limit):
    tree = draw_rows(rows, references, low=limit)
    for node in tree.walk():
        places = [node.attributes.get(key, "") for key in ("x", "x1", "x2")]
        if node.name != "text":
            assert all(-0.01 <= float(place.rstrip("%")) <= 100.01 for place in places if place.endswith("%"))


@pytest.mark.parametrize(
    ("log", "low", "high", "labels"),
    [
        (False, 0.1, 0.97, "0.0 0.2 0.4 0.6 0.8 1.0"),
        (False, 0, 20_000, "0 5,000 10,000 15,000 20,000"),
        (False, -1, 1, "-1.0 -0.5 0.0 0.5 1.0"),
        (False, 0.9, 0.98, "0.90 0.92 0.94 0.96 0.98"),
        (False, 1e-7, 4e-7, "1e-7 2e-7 3e-7 4e-7"),
        (True, 1e-7, 1e-2, "1e-7 1e-6 1e-5 1e-4 1e-3 1e-2"),
        (True, 2e-6, 7e-6, "2e-6 5e-6"),
        (True, 1e-15, 1e-5, "1e-14 1e-12 1e-10 1e-8 1e-6"),
    ],
)
def test_ticks_are_round_numbers_or_powers_of_ten(log, low, high, labels):
    axis = log_axis(low, high, max_intervals=6) if log else linear_axis(low, high, max_intervals=5, extend=True)
    assert [label for _, label in axis.ticks] == labels.split()
