"""Intervals: order and look of rows, axis, reference lines, missing values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.report.tree import read

from fedveil.report import NOTHING, Interval, Intervals
from fedveil.report.intervals import build_axis, draw_intervals

AUDIT = [
    Interval("as published", 0.507, 0.488, 0.526, "veil"),
    Interval("as published", 0.872, 0.853, 0.891, "no defence"),
    Interval("adaptive", 0.5182, 0.5012, 0.5371, "veil"),
    Interval("adaptive", None, group="no defence", missing="failed: out of memory"),
]
LINES = {"chance": 0.5, "undefended": 0.87}


def drawn(rows, references=LINES, **more):
    """The plot as a tree."""
    return read(draw_intervals(Intervals("t", "AUC", rows, references, **more)))


def texts(tree, part):
    return [node.text for node in tree.all("div", part)]


def test_rows_are_grouped_in_the_order_given_and_printed_to_a_thousandth_of_the_axis():
    tree = drawn(AUDIT)
    assert texts(tree, "group") == ["veil", "", "no defence", ""]
    assert texts(tree, "name") == ["as published", "adaptive"] * 2
    values = ["0.507 [0.488, 0.526]", "0.518 [0.501, 0.537]", "0.872 [0.853, 0.891]", "failed: out of memory"]
    assert texts(tree, "value") == values
    assert len(tree.all("div", "rule")) == 1


def test_entries_of_one_name_look_the_same_and_are_in_the_legend():
    tree = drawn(AUDIT)
    tracks = tree.all("div", "rows")[0].all("svg", "track")
    assert [track.attributes["class"] for track in tracks] == ["track s0", "track s1"] * 2
    marks = [[use.attributes["href"] for use in track.all("use")] for track in tracks]
    assert marks == [["#mark-0"], ["#mark-1"], ["#mark-0"], []]
    legend = tree.all("ul", "legend")[0].all("li")
    assert [entry.text for entry in legend] == ["as published", "adaptive"]
    many = drawn([Interval(f"run {k}", k) for k in range(20)])
    looks = [(one.attributes["class"], one.all("use")[0].attributes["href"]) for one in many.all("svg", "track")]
    assert len(set(looks)) == 20  # names that share a colour differ in mark
    assert not many.all("ul", "legend")
    assert not many.all("div", "group")


def test_missing_values_are_explained_and_only_failures_marked():
    tree = drawn([Interval("a", None), Interval("b", None, missing="failed: diverged"), Interval("c", 0.7)])
    assert [node.text for node in tree.all("span", "unmeasured")] == ["not measured"]
    assert [node.text for node in tree.all("span", "failed")] == ["failed: diverged"]
    rows = [[cell.text for cell in row.all("td")] for row in tree.all("tbody")[0].all("tr")]
    assert rows[:2] == [["not measured", NOTHING, NOTHING], ["failed: diverged", NOTHING, NOTHING]]


def test_the_data_include_every_row_and_the_references():
    tree = drawn(AUDIT)
    assert tree.all("summary")[0].text == "Data6 rows"
    names = [row.all("th")[0].text for row in tree.all("tbody")[0].all("tr")]
    assert [names[0], *names[-2:]] == ["veil: as published", "reference: chance", "reference: undefended"]


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
    names = drawn(AUDIT, {"chance": 0.5, "ideal": 0.95, "DP": 0.45}, low=0.4, high=1.0).all("text", "reference")
    assert {name.text: name.attributes["text-anchor"] for name in names} == {
        "chance 0.5": "start",
        "ideal 0.95": "end",
        "DP 0.45": "start",
    }
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
    tree = drawn(rows, references, low=limit)
    for node in tree.walk():
        places = [node.attributes.get(key, "") for key in ("x", "x1", "x2")]
        if node.name != "text":
            assert all(-0.01 <= float(place.rstrip("%")) <= 100.01 for place in places if place.endswith("%"))
