"""The page: its structure, escaping, policy, colours, and how it is written."""

import errno
import os
import re
import stat
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest
from tests.report import demo
from tests.report.tree import read

from fedveil import files
from fedveil.errors import BadArgument
from fedveil.report import (
    Beside,
    Curves,
    Facts,
    Interval,
    Intervals,
    Matrix,
    Page,
    Picture,
    Pictures,
    Table,
    Text,
    render,
    write,
)

EVIL = "<script>alert('x')</script>\"&' onload=\"x"


@pytest.fixture(scope="module")
def text():
    return render(Page(demo.TITLE, demo.VERDICT, demo.sections(), demo.COMMAND, "Longer.", "97.19 %"))


@pytest.fixture(scope="module")
def tree(text):
    return read(text)


def test_the_page_has_one_first_heading_and_one_heading_per_section(tree):
    assert [node.text for node in tree.all("h1")] == [demo.TITLE]
    assert [node.text for node in tree.all("h2")] == [section.title for section in demo.sections()]


def test_every_link_inside_the_page_leads_somewhere(tree):
    ids = [node.attributes["id"] for node in tree.walk() if "id" in node.attributes]
    assert len(ids) == len(set(ids))
    links = [node.attributes["href"] for node in tree.walk() if node.attributes.get("href", "").startswith("#")]
    assert len([*tree.all("nav")[0].all("a")]) == len(demo.sections())
    assert {link[1:] for link in links} <= set(ids)
    named = {name for node in tree.walk() for name in node.attributes.get("aria-labelledby", "").split()}
    assert named <= set(ids)


def policy(tree):
    return next(node for node in tree.all("meta") if "http-equiv" in node.attributes).attributes["content"]


def test_the_page_loads_nothing(tree):
    for node in tree.walk():
        assert node.attributes.get("src", "data:").startswith("data:")
        assert node.attributes.get("href", "#").startswith(("#", "data:"))
    style = tree.all("style")[0].text
    assert "url(" not in style
    assert "@import" not in style
    assert "default-src 'none'" in policy(tree)


def tags(tree):
    found = [node.attributes for node in tree.all("meta")]
    return {one.get("name") or one["property"]: one["content"] for one in found if one.keys() & {"name", "property"}}


def test_title_icon_and_preview_say_what_the_page_is_when_they_are_all_that_is_seen(tree):
    tab = f"{demo.TITLE}: 97.19 %"
    assert tree.all("title")[0].text == f"{tab} \N{EN DASH} Fedveil"
    found = tags(tree)
    assert found.pop("viewport")
    assert found == {
        "description": demo.VERDICT,
        "og:type": "article",
        "og:site_name": "Fedveil",
        "og:title": tab,
        "og:description": demo.VERDICT,
        "twitter:card": "summary",
        "twitter:title": tab,
        "twitter:description": demo.VERDICT,
    }
    (icon,) = (node.attributes["href"] for node in tree.all("link"))
    kind, _, drawing = icon.partition(",")
    assert kind == "data:image/svg+xml"
    assert {node.tag.rpartition("}")[2] for node in ElementTree.fromstring(unquote(drawing))} == {"rect", "path"}


def test_tags_are_escaped():
    title = '"><script>alert(1)</script> & <b>'
    page = render(Page(title, title, [], "c", title, title))
    found = tags(read(page))
    assert {found["description"], found["og:description"], found["twitter:description"]} == {title}
    assert {found["og:title"], found["twitter:title"]} == {f"{title}: {title}"}
    assert page.count("<script>") == 1
    assert "<b>" not in page


def test_every_figure_has_a_button_that_saves_it_and_is_hidden_without_the_script(tree):
    figures, buttons = tree.all("figure"), tree.all("button", "png")
    assert len(figures) == len(buttons) == 5 + 1 + 1 + 4  # charts, intervals, pictures, matrices
    assert all("hidden" in button.attributes and button.text == "PNG" for button in buttons)
    empty = [Curves("c", "x", "y", {}), Pictures("p", [], []), Intervals("i", "AUC", [], {})]
    assert not read(render(Page("t", "v", empty, "c"))).all("button", "png")


def test_sections_of_one_title_have_ids_of_their_own():
    tree = read(render(Page("t", "l", [Text("Same", ["a"]), Text("Same", ["b"]), Text("日本", ["c"])], "c")))
    assert len({node.attributes["id"] for node in tree.all("section")}) == 3


def test_whatever_can_scroll_can_be_reached_by_keyboard_and_has_a_name(tree):
    boxes = tree.all("div", "scroll")
    assert boxes
    assert all(box.attributes["tabindex"] == "0" and box.attributes["aria-label"] for box in boxes)


def test_nothing_a_caller_supplies_becomes_markup():
    matrix = Matrix(EVIL, [EVIL, "b"], [[1, 2], [3, 4]], note=EVIL)
    curves = Curves(EVIL, EVIL, EVIL, {EVIL: [(1, 1), (2, 2)], "empty" + EVIL: []}, note=EVIL)
    table = Table(EVIL, [EVIL, "b"], [[EVIL, EVIL]], note=EVIL)
    text = Text(EVIL, [EVIL])
    pictures = Pictures(EVIL, [EVIL], [(EVIL, [Picture(1, 1, 1, b"x", EVIL)])], note=EVIL)
    rows = [Interval(EVIL, 0.5, 0.4, 0.6, EVIL), Interval(EVIL, None, group=EVIL, missing=EVIL)]
    intervals = Intervals(EVIL, EVIL, rows, {EVIL: 0.5}, note=EVIL)
    sections = [matrix, curves, table, text, pictures, intervals, Facts(EVIL, {EVIL: EVIL}), Beside(EVIL, [matrix])]
    tree = read(render(Page(EVIL, EVIL, sections, EVIL)))
    assert len(tree.all("script")) == 1
    assert not any("onload" in node.attributes for node in tree.walk())
    assert tree.all("h1")[0].text == EVIL
    assert tree.all("dd")[0].text == EVIL


def test_the_policy_runs_no_script_but_our_own(tree):
    scripts = next(rule for rule in policy(tree).split("; ") if rule.startswith("script-src"))
    assert scripts.startswith("script-src 'sha256-")
    assert "unsafe" not in scripts


def test_columns_of_numbers_are_aligned_and_failures_marked(tree):
    results = next(node for node in tree.all("section") if node.attributes["id"].endswith("results"))
    numeric = ["number" in node.attributes.get("class", "") for node in results.all("thead")[0].all("th")]
    assert numeric == [False, True, True, True, True, True, False]
    assert [node.text for node in results.all("td", "failed")] == ["failed: out of memory"]


def test_an_interval_in_brackets_is_set_smaller_and_the_cell_reads_the_same():
    rows = [["plain", "89.1% [87.7%, 90.4%]"], ["veil", "0.30 (0.55)"], ["dp", "12 (of 40) clients"]]
    tree = read(render(Page("t", "l", [Table("t", ["defence", "success"], rows)], "c")))
    assert [node.text for node in tree.all("td")] == [row[1] for row in rows]
    assert [node.text for node in tree.all("small")] == ["[87.7%, 90.4%]", "(0.55)"]


def test_a_matrix_marks_its_diagonal_and_says_what_it_shows():
    tree = read(render(Page("t", "l", [Matrix("m", ["cat", "dog"], [[9, 1], [0, 0]])], "c")))
    assert [node.text for node in tree.all("td", "hit")] == ["9", "0"]
    assert (
        tree.all("p", "summary")[0].text
        == "90.00% right: 9 of 10 answers. Most common mistake: cat answered as dog, 1 time."
    )


@pytest.mark.parametrize(
    "section",
    [
        Matrix("m", [], []),
        Table("t", [], []),
        Facts("f", {}),
        Beside("b", []),
        Text("t", []),
        Pictures("p", [], []),
        Intervals("i", "AUC", [], {}),
    ],
)
def test_an_empty_section_is_no_reason_to_fail(section):
    assert len(read(render(Page("t", "l", [section], "c"))).all("section")) == 1


def test_writing_replaces_a_page_whole(tmp_path):
    path = tmp_path / "runs" / "report.html"
    assert write(Page("one", "l", [], "c"), path) == path
    write(Page("two", "l", [], "c"), path)
    assert "<h1>two</h1>" in path.read_text(encoding="utf-8")
    assert [entry.name for entry in path.parent.iterdir()] == ["report.html"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_the_umask_decides_who_may_read_a_page(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        path = write(Page("one", "l", [], "c"), tmp_path / "report.html")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_write_that_fails_leaves_the_older_page_and_no_rubbish(tmp_path, monkeypatch):
    path = write(Page("one", "l", [], "c"), tmp_path / "report.html")
    before = path.read_bytes()
    monkeypatch.setattr(files.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "disk full")))
    with pytest.raises(BadArgument, match="cannot be written: disk full"):
        write(Page("two", "l", [], "c"), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["report.html"]


def test_a_page_of_a_dozen_long_charts_stays_below_a_megabyte():
    series = {
        name: [(k / 7, (k * 7919 % 1013) / 997 + k) for k in range(20_000)] for name in ("plain", "veil", "control")
    }
    charts = [Curves(f"chart {number}", "step", "loss", series) for number in range(12)]
    assert len(render(Page("t", "l", charts, "c")).encode()) < 1_000_000


def _luminance(colour):
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one, other):
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_lines_stand_out_in_both_themes(text, scheme):
    theme = dict(re.findall(r"--(\w+):(#\w+);", re.search(rf"color-scheme:{scheme};([^}}]*)}}", text)[1]))
    for ink, ground in [("ink", "page"), ("quiet", "page"), ("accent", "page"), ("bad", "page"), ("quiet", "surface")]:
        assert _contrast(theme[ink], theme[ground]) >= 4.5, (ink, ground)
    for ground in ("hit", "miss"):
        assert _contrast(theme["ink"], theme[ground]) >= 4.5, ground
    for number in range(8):
        assert _contrast(theme[f"s{number}"], theme["page"]) >= 3, number
