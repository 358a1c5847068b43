"""The pages on concepts and the how-tos beside them: their code runs, and prints what they show."""

import contextlib
import io
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from fedveil.cli import main
from fedveil.defences import registry

DOCS = Path(__file__).parents[1] / "docs"
SVG = "{http://www.w3.org/2000/svg}"
PICTURES = sorted((DOCS / "images").glob("*.svg"))
SIZES = {"data": "digits", "train-size": 120, "clients": 2, "epochs": 2, "hidden": 8, "workers": 1, "trials": 2}
SMALL = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]


def blocks(page, kind=""):
    """The code blocks of a page whose fence says `kind`."""
    every = re.findall(r"^```(\w*)\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    return [code for fence, code in every if fence == kind]


def printed_by(code):
    printed = io.StringIO()
    with torch.random.fork_rng(), contextlib.redirect_stdout(printed):
        try:
            exec(code, {})
        finally:
            torch.set_printoptions(profile="default")
    return printed.getvalue()


def test_the_gradient_on_the_page_of_a_round_is_that_of_autograd():
    code, shown = blocks("concepts/round.md", "python")[0], blocks("concepts/round.md")[0]
    printed = printed_by(code)
    errors = [float(error) for error in re.findall(r"relative error (\S+)", printed)]
    assert len(errors) == 4
    assert max(errors) < 1e-13
    number = re.compile(r"-?\d[\d.e+-]*|\s")  # the noise is new: all else is as shown
    assert number.sub("", printed) == number.sub("", shown)
    assert printed.partition("first layer, as")[0] == shown.partition("first layer, as")[0]


def test_the_page_on_decoys_counts_passes():
    assert printed_by(blocks("concepts/decoys.md", "python")[0]) == blocks("concepts/decoys.md")[0]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with modules of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_KNOWN", dict(registry._KNOWN))
    yield tmp_path
    for name in ("net", "mine", "attack"):
        sys.modules.pop(name, None)


def test_inspect_prints_what_the_page_on_masking_shows(folder, capsys):
    (folder / "net.py").write_text(blocks("concepts/masking.md", "python")[0])
    command, _, shown = blocks("concepts/masking.md")[0].partition("\n")
    assert main(command.removeprefix("$ fedveil ").split()) == 0
    assert capsys.readouterr().out.strip() == shown.strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "file", "spec", "attackers"),
    [
        ("own-defence.md", "mine.py", "mine:Blurred", {"broadcasts averaged", "outputs calibrated"}),
        ("own-attacker.md", "attack.py", "attack:HARDER", {"outputs projected", "two broadcasts, no data"}),
    ],
)
def test_the_how_tos_own_defence_and_attacker_are_audited(folder, capsys, page, file, spec, attackers):
    (folder / file).write_text(blocks(f"how-to/{page}", "python")[0])
    assert main(["audit", *SMALL, "--no-server", "--defence", spec, "--out", "out"]) == 0, capsys.readouterr().err
    found = json.loads((folder / "out" / "results.json").read_text())["results"][spec]["attackers"]
    assert attackers <= set(found)


@pytest.mark.slow
def test_the_how_to_on_privacy_spends_what_it_shows():
    printed, shown = printed_by(blocks("how-to/privacy.md", "python")[0]), blocks("how-to/privacy.md")[1]
    assert re.findall(r"epsilon .*", printed) == re.findall(r"epsilon .*", shown)


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_a_picture_stands_alone_and_says_what_it_shows(path):
    text, root = path.read_text(), ElementTree.parse(path).getroot()
    for name in ("title", "desc"):
        assert root.find(SVG + name).text.strip()
    width, height = (float(root.get(side)) for side in ("width", "height"))
    assert root.get("viewBox") == f"0 0 {width:g} {height:g}"
    assert "prefers-color-scheme: dark" in text
    assert min(map(int, re.findall(r"font-size: (\d+)px", text))) >= width / 40  # 9 pixels on a phone of 360
    assert not re.search(r"<script|<image|<foreignObject|@import|url\((?!#)|(?:href|src)=\"(?!#)", text)


def test_there_are_pictures():
    assert {path.stem for path in PICTURES} >= {"round", "masking", "decoys", "attackers"}
