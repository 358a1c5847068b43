"""The page: its structure, escaping, policy, colours, tables and pictures, and how it is written."""

import base64
import errno
import os
import re
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest
from tests.report import demo
from tests.report.tree import read

from fedveil import files, report
from fedveil.errors import BadArgument

EVIL = "<script>alert('x')</script>\"&' onload=\"x"


@pytest.fixture(scope="module")
def text():
    return report.render(report.Page(demo.TITLE, demo.VERDICT, demo.sections(), demo.COMMAND, "Longer.", "97.19 %"))


@pytest.fixture(scope="module")
def tree(text):
    return read(text)


def test_headings_links_figures_and_boxes_that_scroll_are_complete(tree):
    assert [node.text for node in tree.all("h1")] == [demo.TITLE]
    assert [node.text for node in tree.all("h2")] == [section.title for section in demo.sections()]
    ids = [node.attributes["id"] for node in tree.walk() if "id" in node.attributes]
    assert len(ids) == len(set(ids))
    links = [node.attributes["href"] for node in tree.walk() if node.attributes.get("href", "").startswith("#")]
    assert len([*tree.all("nav")[0].all("a")]) == len(demo.sections())
    assert {link[1:] for link in links} <= set(ids)
    named = {name for node in tree.walk() for name in node.attributes.get("aria-labelledby", "").split()}
    assert named <= set(ids)
    boxes = tree.all("div", "scroll")
    assert all(box.attributes["tabindex"] == "0" and box.attributes["aria-label"] for box in boxes)  # by keyboard


def test_the_page_loads_nothing_and_runs_no_script_but_its_own(tree):
    for node in tree.walk():
        assert node.attributes.get("src", "data:").startswith("data:")
        assert node.attributes.get("href", "#").startswith(("#", "data:"))
    style = tree.all("style")[0].text
    assert "url(" not in style
    assert "@import" not in style
    policy = next(node for node in tree.all("meta") if "http-equiv" in node.attributes).attributes["content"]
    assert "default-src 'none'" in policy
    scripts = next(rule for rule in policy.split("; ") if rule.startswith("script-src"))
    assert scripts.startswith("script-src 'sha256-")
    assert "unsafe" not in scripts


def tags(tree):
    found = [node.attributes for node in tree.all("meta")]
    return {one.get("name") or one["property"]: one["content"] for one in found if one.keys() & {"name", "property"}}


def test_title_icon_and_preview_describe_the_page(tree):
    tab = f"{demo.TITLE}: 97.19 %"
    assert tree.all("title")[0].text == f"{tab} \N{EN DASH} Fedveil"
    found = tags(tree)
    assert {found["description"], found["og:description"], found["twitter:description"]} == {demo.VERDICT}
    assert {found["og:title"], found["twitter:title"]} == {tab}
    (icon,) = (node.attributes["href"] for node in tree.all("link"))
    kind, _, drawing = icon.partition(",")
    assert kind == "data:image/svg+xml"
    assert {node.tag.rpartition("}")[2] for node in ElementTree.fromstring(unquote(drawing))} == {"rect", "path"}


def test_every_figure_has_a_button_that_saves_it_and_is_hidden_without_the_script(tree):
    figures, buttons = tree.all("figure"), tree.all("button", "png")
    assert len(figures) == len(buttons) == 5 + 1 + 1 + 4  # charts, intervals, pictures, matrices
    assert all("hidden" in button.attributes and button.text == "PNG" for button in buttons)
    empty = [report.Curves("c", "x", "y", {}), report.Pictures("p", [], []), report.Intervals("i", "AUC", [], {})]
    assert not read(report.render(report.Page("t", "v", empty, "c"))).all("button", "png")


def test_nothing_a_caller_supplies_becomes_markup():
    matrix = report.Matrix(EVIL, [EVIL, "b"], [[1, 2], [3, 4]], note=EVIL)
    curves = report.Curves(EVIL, EVIL, EVIL, {EVIL: [(1, 1), (2, 2)], "empty" + EVIL: []}, note=EVIL)
    table = report.Table(EVIL, [EVIL, "b"], [[EVIL, EVIL]], note=EVIL)
    pictures = report.Pictures(EVIL, [EVIL], [(EVIL, [report.Picture(1, 1, 1, b"x", EVIL)])], note=EVIL)
    rows = [report.Interval(EVIL, 0.5, 0.4, 0.6, EVIL), report.Interval(EVIL, None, group=EVIL, missing=EVIL)]
    intervals = report.Intervals(EVIL, EVIL, rows, {EVIL: 0.5}, note=EVIL)
    words = [report.Text(EVIL, [EVIL]), report.Facts(EVIL, {EVIL: EVIL}), report.SideBySide(EVIL, [matrix])]
    tree = read(
        report.render(report.Page(EVIL, EVIL, [matrix, curves, table, pictures, intervals, *words], EVIL, EVIL, EVIL))
    )
    assert len(tree.all("script")) == 1
    assert not any("onload" in node.attributes for node in tree.walk())
    assert tree.all("h1")[0].text == tree.all("dd")[0].text == tags(tree)["description"] == EVIL
    assert tags(tree)["og:title"] == f"{EVIL}: {EVIL}"


def test_empty_sections_are_rendered():
    empty = [report.Matrix("m", [], []), report.Table("t", [], []), report.Facts("f", {}), report.SideBySide("b", [])]
    page = report.Page("t", "l", [*empty, report.Text("t", [])], "c")
    assert len(read(report.render(page)).all("section")) == 5


def test_a_page_is_replaced_atomically_and_a_failed_write_leaves_the_older_one(tmp_path, monkeypatch):
    path = tmp_path / "runs" / "report.html"
    assert report.write(report.Page("one", "l", [], "c"), path) == path
    report.write(report.Page("two", "l", [], "c"), path)
    assert "<h1>two</h1>" in path.read_text(encoding="utf-8")
    monkeypatch.setattr(files.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "disk full")))
    with pytest.raises(BadArgument, match="cannot be written: disk full"):
        report.write(report.Page("three", "l", [], "c"), path)
    assert "<h1>two</h1>" in path.read_text(encoding="utf-8")
    assert os.listdir(path.parent) == ["report.html"]


def test_a_page_of_a_dozen_long_charts_stays_below_a_megabyte():
    line = [(k / 7, (k * 7919 % 1013) / 997 + k) for k in range(20_000)]
    series = {"plain": line, "veil": line, "control": line}
    charts = [report.Curves(f"chart {number}", "step", "loss", series) for number in range(12)]
    assert len(report.render(report.Page("t", "l", charts, "c")).encode()) < 1_000_000


def _luminance(colour):
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one, other):
    low, high = sorted(_luminance(colour) + 0.05 for colour in (one, other))
    return high / low


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_lines_have_enough_contrast_in_both_themes(text, scheme):
    theme = dict(re.findall(r"--(\w+):(#\w+);", re.search(rf"color-scheme:{scheme};([^}}]*)}}", text)[1]))
    pairs = [("ink", "page"), ("quiet", "page"), ("accent", "page"), ("bad", "page"), ("quiet", "surface")]
    for ink, ground in [*pairs, ("ink", "hit"), ("ink", "miss")]:
        assert _contrast(theme[ink], theme[ground]) >= 4.5, (ink, ground)
    for number in range(8):
        assert _contrast(theme[f"s{number}"], theme["page"]) >= 3, number


GREY = report.Picture(2, 2, 1, bytes([0, 90, 180, 255]))


def drawn(section):
    return read(report.render(report.Page("t", "v", [section], "c"))).all("section")[0]


def test_columns_of_numbers_are_aligned_failures_marked_and_intervals_printed_smaller():
    results = drawn(next(section for section in demo.sections() if section.title == "Results"))
    numeric = ["number" in node.attributes.get("class", "") for node in results.all("thead")[0].all("th")]
    assert numeric == [False, True, True, True, True, True, False]
    assert [node.text for node in results.all("td", "failed")] == ["failed: out of memory"]
    rows = [["plain", "89.1% [87.7%, 90.4%]"], ["veil", "0.30 (0.55)"], ["dp", "12 (of 40) clients"]]
    tree = drawn(report.Table("t", ["defence", "success"], rows))
    assert [node.text for node in tree.all("td")] == [row[1] for row in rows]
    assert [node.text for node in tree.all("small")] == ["[87.7%, 90.4%]", "(0.55)"]


def test_a_matrix_marks_its_diagonal_and_describes_itself():
    tree = drawn(report.Matrix("m", ["cat", "dog"], [[9, 1], [0, 0]]))
    assert [node.text for node in tree.all("td", "hit")] == ["9", "0"]
    said = "90.00% correct: 9 of 10 predictions. Most common mistake: cat predicted as dog, 1 time."
    assert tree.all("p", "summary")[0].text == said


def test_a_grid_has_one_picture_per_cell_with_alternative_text_and_caption():
    rows = [("original", [GREY, GREY]), ("veil", [None, report.Picture(2, 2, 1, GREY.data, "7.2 dB")])]
    tree = drawn(report.Pictures("p", ["image 1", "image 2"], rows, note="PSNR."))
    images = tree.all("img")
    assert [image.attributes["alt"] for image in images] == ["original, image 1", "original, image 2", "veil, image 2"]
    assert [row.text for row in tree.all("tbody")[0].all("tr")] == ["original", "veil7.2 dB"]
    prefix, _, data = images[0].attributes["src"].partition(",")
    assert prefix == "data:image/png;base64"
    assert base64.b64decode(data) == GREY.to_png()


def test_a_picture_is_enlarged_by_an_integer_factor():
    sizes = {(8, 8): (96, 64), (28, 28): (84, 56), (32, 64): (64, 32), (224, 224): (224, 224)}
    for (width, height), (wide, narrow) in sizes.items():
        tree = drawn(report.Pictures("p", ["a"], [("r", [report.Picture(width, height, 1, bytes(width * height))])]))
        assert tree.all("img")[0].parent.attributes["style"] == f"--wide:{wide}px;--narrow:{narrow}px"
