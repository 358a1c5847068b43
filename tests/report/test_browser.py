"""The page in a browser: it fits, complains of nothing, shows values, changes theme, saves figures."""

import base64
import shutil
import subprocess

import pytest
from tests.report import demo
from tests.report.browser import CHROMIUM, chromium

from fedveil.report import Answers, Curves, Interval, Intervals, Page, Picture, Pictures, Table, write

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

ASKED = """(() => {
  const root = document.documentElement, found = {};
  found.width = innerWidth;
  found.content = root.scrollWidth;
  found.colour = getComputedStyle(document.body).backgroundColor;
  const cursor = document.querySelector(".cursor"), legend = () => document.querySelector(".legend").textContent;
  found.resting = legend();
  cursor.focus();
  cursor.dispatchEvent(new KeyboardEvent("keydown", { key: "Home", cancelable: true }));
  found.first = legend();
  found.said = cursor.getAttribute("aria-valuetext");
  cursor.blur();
  found.after = legend();
  const box = cursor.getBoundingClientRect();
  cursor.dispatchEvent(new PointerEvent("pointermove", { clientX: box.right, clientY: box.top + 9 }));
  found.hair = document.querySelector(".plot").classList.contains("shown");
  cursor.dispatchEvent(new PointerEvent("pointerleave"));
  const roc = document.querySelector("[data-log-x]"), span = roc.querySelector(".plot").getBoundingClientRect();
  const move = { clientX: span.left + span.width / 4, clientY: span.top + 9 };
  roc.querySelector(".cursor").dispatchEvent(new PointerEvent("pointermove", move));
  found.log = roc.querySelector(".cursor").getAttribute("aria-valuetext");
  found.logHair = roc.querySelector(".hair").getAttribute("x1");
  found.logDots = [...roc.querySelectorAll(".dot.on")].map((dot) => parseFloat(dot.getAttribute("cx")));
  roc.querySelector(".cursor").dispatchEvent(new PointerEvent("pointerleave"));
  found.pictures = [...new Set([...document.querySelectorAll(".pictures img")].map((image) => image.clientWidth))];
  found.decoded = [...document.querySelectorAll(".pictures img")].every((image) => image.naturalWidth === 32);
  found.contents = document.querySelector("nav details").open;
  const wide = document.querySelector(".of-pictures .scroll"), left = (element) => element.getBoundingClientRect().left;
  wide.scrollLeft = 150;
  const first = ["thead td", "tbody th"].map((cell) => left(wide.querySelector(cell)));
  found.scrolled = [wide.scrollLeft, ...first.map((place) => place - left(wide))];
  const inside = (box, outer) => box.left >= outer.left && box.right <= outer.right;
  const plot = document.querySelector(".intervals").getBoundingClientRect();
  const names = [...document.querySelectorAll("text.reference")].map((name) => name.getBoundingClientRect());
  found.names = names.length === 2 && names.every((name) => inside(name, plot));
  const button = document.querySelector(".theme");
  found.button = button.hidden ? null : button.textContent;
  button.click();
  found.changed = root.dataset.theme;
  button.click();
  return found;
})()"""
AS_IT_IS = """document.documentElement.dataset.theme
  + document.body.outerHTML.replaceAll(">Saved<", ">PNG<").replaceAll(/ (style|class)=""/g, "")"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return write(
        Page(demo.TITLE, demo.VERDICT, demo.sections(), demo.COMMAND), tmp_path_factory.mktemp("page") / "a.html"
    )


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_works_in_a_browser(tab, page, width, theme):
    tab.open(page, width, theme)
    found = tab.run(ASKED)
    assert not tab.complaints
    assert found["width"] == width
    assert found["content"] <= width
    assert found["colour"] == {"light": "rgb(251, 251, 250)", "dark": "rgb(20, 23, 27)"}[theme]
    assert "round = 20" in found["resting"]
    assert "round = 1" in found["first"]
    assert found["said"].startswith("round = 1: plain 0.")
    assert found["after"] == found["resting"]
    assert found["hair"]
    assert found["log"] == "false positive rate = 0.001: chance 0.001, no defence 0.125893, veil 0.00123027"
    assert found["logDots"] == pytest.approx([25, 25, 25])
    assert float(found["logHair"].rstrip("%")) == pytest.approx(25)
    assert found["decoded"]
    assert found["pictures"] == [{1280: 96, 390: 64}[width]]
    assert found["names"]
    assert found["contents"] == (width == 1280)  # folded on a phone
    assert found["scrolled"] == [150, 0, 0]  # a box scrolls by itself, its first column stays
    assert (found["button"], found["changed"]) == {"light": ("Dark", "dark"), "dark": ("Light", "light")}[theme]


def saved(tab, folder, number):
    """The picture of a figure, by a click on its button."""
    return tab.download(lambda: tab.run(f"document.querySelectorAll('.png')[{number}].click()"), folder)


def colours(picture, box=None):
    """The colours of a part of a picture and how often each of them is there."""
    part = (picture.crop(box) if box else picture).convert("RGB")
    return {colour: count for count, colour in part.getcolors(1 << 24)}


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "dark")])
def test_a_click_saves_each_kind_of_figure_light_and_at_twice_its_size(tab, page, tmp_path, width, theme):
    image = pytest.importorskip("PIL.Image")
    tab.open(page, width, theme)
    before = tab.run(AS_IT_IS)
    blue, orange, cell = (31, 95, 174), (209, 89, 11), (0x8F, 0xBC, 0xEC)
    kinds = {  # by number of the figure: file, colours that are in it
        0: ("digits-ten-clients-veiled-accuracy.png", [blue, orange]),
        2: ("digits-ten-clients-veiled-audit.png", [blue, orange]),
        4: ("digits-ten-clients-veiled-pictures-recovered.png", []),
        5: ("digits-ten-clients-veiled-confusion-plain.png", [blue, cell]),
    }
    for number, (name, there) in kinds.items():
        path = saved(tab, tmp_path, number)
        assert path.name == name
        with image.open(path) as picture:
            assert picture.width >= 2 * 560
            if number in (0, 2):  # charts have one width everywhere: 880, and margins
                assert picture.width == 2 * (880 + 2 * 32)
            found = colours(picture)
            assert max(found, key=found.get) == (255, 255, 255)
            for colour in there:  # as it is, or a little mixed
                near = (n for c, n in found.items() if max(abs(a - b) for a, b in zip(c, colour, strict=True)) < 12)
                assert sum(near) > 100, (name, colour)
            last = (0, picture.height - 120, picture.width, picture.height)  # who made it
            assert sum(n for c, n in colours(picture, last).items() if sum(c) < 500) > 200
            assert len(colours(picture, (0, 60, picture.width, 140))) > 10  # the title
    assert tab.run(AS_IT_IS) == before
    assert not tab.complaints


def test_figures_of_any_title_are_saved_and_pixels_stay_square(tab, tmp_path):
    image, title = pytest.importorskip("PIL.Image"), "<b>\"x\" & 'y'</b> " + "日本 " * 60
    red, green = bytes([255, 0, 0]), bytes([0, 255, 0])
    picture = Pictures("Pictures", ["one"], [("row", [Picture(2, 2, 3, red + green + green + red)])])
    curves = Curves(title, "<x>", "&", {"<a>": [(1, 1), (2, 2)]})
    tab.open(write(Page(title, title, [picture, curves], "c"), tmp_path / "page.html"))
    assert tab.run("document.title") == f"{title.strip()} \N{EN DASH} Fedveil"
    for folder in ("first", "second"):  # both figures have the same name
        (tmp_path / folder).mkdir()
    with image.open(saved(tab, tmp_path / "first", 0)) as opened:
        found = colours(opened)
    for colour in (red, green):  # shown 96 wide, saved at twice that; edges may lie between pixels
        assert found[tuple(colour)] == pytest.approx(2 * 96 * 96, rel=0.03)
    path = saved(tab, tmp_path / "second", 1)
    assert path.name.startswith("b-x-y-b-日本-日本")
    assert len(path.name) <= 104
    assert not tab.complaints


def test_a_figure_is_saved_by_keyboard_and_its_button_has_a_name(tab, page, tmp_path):
    tab.open(page)
    tab.run("document.querySelector('.under summary').focus()")
    tab.press("Tab")
    assert tab.run("document.activeElement.getAttribute('aria-label')") == "PNG: save the figure “Accuracy”"
    path = tab.download(lambda: tab.press("Enter"), tmp_path)
    assert path.stat().st_size > 10_000
    assert tab.run("document.activeElement.className") == "png"


@pytest.mark.skipif(shutil.which("pdftotext") is None, reason="pdftotext is not installed")
def test_a_chart_that_moves_to_the_second_page_is_printed_there_with_its_axis(tab, tmp_path):
    """Chromium otherwise draws the axis and the reference lines on the first page."""
    answers = Answers("For the decision", {f"Question {n}?": ["A long answer. " * 60] for n in range(4)})
    rows = [Interval(name, 0.6, 0.5, 0.7) for name in ("one", "two", "three")]
    chart = Intervals("The model", "agreement", rows, {"guessing": 0.1})
    table = Table("Result", ["who", "value"], [[f"attacker {n}", f"{n}"] for n in range(25)])
    path = write(Page("Audit", "It leaks.", [answers, chart, table], "fedveil audit"), tmp_path / "page.html")
    tab.open(path)
    printed = tab.send("Page.printToPDF", preferCSSPageSize=True)["data"]
    (tmp_path / "page.pdf").write_bytes(base64.b64decode(printed))
    done = subprocess.run(["pdftotext", str(tmp_path / "page.pdf"), "-"], capture_output=True, text=True, check=True)
    pages = done.stdout.split("\f")
    (chart_page,) = [number for number, text in enumerate(pages) if "The model" in text]
    assert chart_page > 0
    assert [number for number, text in enumerate(pages) if "guessing" in text] == [chart_page]
    with_rows = {number for number, text in enumerate(pages) if "attacker " in text}
    assert len(with_rows) == 1  # a table that fits on a page is not cut


@pytest.mark.skipif(shutil.which("pdftotext") is None, reason="pdftotext is not installed")
@pytest.mark.parametrize("length", [20, 30, 40, 50])
def test_the_answers_begin_on_the_first_printed_page_whatever_their_length(tab, tmp_path, length):
    answers = Answers("For the decision", {f"Question {n}?": ["A long answer. " * length] for n in range(4)})
    tab.open(write(Page("Audit", "It leaks. " * 20, [answers], "fedveil audit"), tmp_path / "page.html"))
    printed = tab.send("Page.printToPDF", preferCSSPageSize=True)["data"]
    (tmp_path / "page.pdf").write_bytes(base64.b64decode(printed))
    done = subprocess.run(["pdftotext", str(tmp_path / "page.pdf"), "-"], capture_output=True, text=True, check=True)
    assert "Question 0?" in done.stdout.split("\f")[0]
