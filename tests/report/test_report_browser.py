"""The page in a browser: it fits, complains of nothing, shows values to pointer and keyboard, changes its theme."""

import json
import shutil
import subprocess

import pytest
from tests.report import demo
from tests.report.tree import read

from fedveil.report import Page, render

CHROMIUM = shutil.which("chromium")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"),
    *("--virtual-time-budget=4000", "--hide-scrollbars"),
]
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

# A frame is as narrow as a phone; a window of headless Chromium is not. The page inside is untouched but for its theme.
WRAPPER = """<!doctype html><meta charset="utf-8"><body style="margin:0"><pre id="found"></pre><script>
const frame = document.createElement("iframe");
frame.style.cssText = "width:%(width)spx;height:2000px;border:0";
frame.srcdoc = %(page)s;
frame.onload = () => {
  const page = frame.contentDocument, root = page.documentElement, view = frame.contentWindow, found = {};
  found.width = view.innerWidth;
  found.content = root.scrollWidth;
  found.colour = view.getComputedStyle(page.body).backgroundColor;
  const cursor = page.querySelector(".cursor"), legend = () => page.querySelector(".legend").textContent;
  found.resting = legend();
  cursor.focus();
  cursor.dispatchEvent(new view.KeyboardEvent("keydown", { key: "Home", cancelable: true }));
  found.first = legend();
  found.said = cursor.getAttribute("aria-valuetext");
  cursor.blur();
  found.after = legend();
  const box = cursor.getBoundingClientRect();
  cursor.dispatchEvent(new view.PointerEvent("pointermove", { clientX: box.right, clientY: box.top + 9 }));
  found.hair = page.querySelector(".plot").classList.contains("shown");
  cursor.dispatchEvent(new view.PointerEvent("pointerleave"));
  const roc = page.querySelector("[data-log-x]"), span = roc.querySelector(".plot").getBoundingClientRect();
  const move = { clientX: span.left + span.width / 4, clientY: span.top + 9 };
  roc.querySelector(".cursor").dispatchEvent(new view.PointerEvent("pointermove", move));
  found.log = roc.querySelector(".cursor").getAttribute("aria-valuetext");
  found.logHair = roc.querySelector(".hair").getAttribute("x1");
  found.logDots = [...roc.querySelectorAll(".dot.on")].map((dot) => parseFloat(dot.getAttribute("cx")));
  roc.querySelector(".cursor").dispatchEvent(new view.PointerEvent("pointerleave"));
  found.pictures = [...new Set([...page.querySelectorAll(".pictures img")].map((image) => image.clientWidth))];
  found.decoded = [...page.querySelectorAll(".pictures img")].every((image) => image.naturalWidth === 32);
  found.contents = page.querySelector("nav details").open;
  const wide = page.querySelector(".of-pictures .scroll"), left = (element) => element.getBoundingClientRect().left;
  wide.scrollLeft = 150;
  const first = ["thead td", "tbody th"].map((cell) => left(wide.querySelector(cell)));
  found.scrolled = [wide.scrollLeft, ...first.map((place) => place - left(wide))];
  const inside = (box, outer) => box.left >= outer.left && box.right <= outer.right;
  const plot = page.querySelector(".intervals").getBoundingClientRect();
  const names = [...page.querySelectorAll("text.reference")].map((name) => name.getBoundingClientRect());
  found.names = names.length === 2 && names.every((name) => inside(name, plot));
  const button = page.querySelector(".theme");
  found.button = button.hidden ? null : button.textContent;
  button.click();
  found.changed = root.dataset.theme;
  button.click();
  document.getElementById("found").textContent = JSON.stringify(found);
};
document.body.prepend(frame);
</script>"""


def chromium(profile, page, width, *more):
    """Run the browser on a file; what it printed and what it complained of."""
    flags = [*FLAGS, f"--user-data-dir={profile}", f"--window-size={max(width, 500)},2000"]
    command = [CHROMIUM, *flags, *more, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, encoding="utf-8")
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def wrapped(folder, width, theme):
    """A test-only page that holds the report in a frame `width` pixels wide and asks it some questions."""
    page = render(Page(demo.TITLE, demo.LEAD, demo.sections(), demo.COMMAND))
    page = page.replace('<html lang="en">', f'<html lang="en" data-theme="{theme}">')
    path = folder / "wrapper.html"
    path.write_text(WRAPPER % {"width": width, "page": json.dumps(page).replace("<", "\\u003c")}, encoding="utf-8")
    return path


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_works_in_a_browser(tmp_path, width, theme):
    page, picture = wrapped(tmp_path, width, theme), tmp_path / "page.png"
    dom, complaints = chromium(tmp_path / "profile", page, width, f"--screenshot={picture}", "--dump-dom")
    assert not complaints
    assert picture.stat().st_size > 10_000
    found = json.loads(next(node.text for node in read_pre(dom)))
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


def read_pre(dom):
    """The element in which the wrapper wrote its answers."""
    start = dom.index('<pre id="found">')
    return read(dom[start : dom.index("</pre>", start) + len("</pre>")]).all("pre")
