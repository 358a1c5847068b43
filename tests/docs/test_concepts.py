"""The code on the page of concepts and in the how-tos beside it runs and prints what they show; images stand alone."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from tests.docs.markdown import ROOT, blocks
from tests.docs.running import reader

from fedveil.cli import main
from fedveil.defences import registry

DOCS = ROOT / "docs"
SIZES = {"data": "digits", "train-size": 120, "clients": 2, "epochs": 2, "hidden": 8, "workers": 1, "trials": 2}
SMALL = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]


def code_of(page, language, index=0):
    return blocks(DOCS / page, language)[index][1]


def test_the_gradient_on_the_page_is_that_of_autograd(tmp_path, capsys):
    with reader(tmp_path):
        exec(code_of("concepts.md", "python"), {})
        torch.set_printoptions(profile="default")
    printed, shown = capsys.readouterr().out, code_of("concepts.md", "")
    errors = [float(error) for error in re.findall(r"relative error (\S+)", printed)]
    assert len(errors) == 4
    assert max(errors) < 1e-13
    number = re.compile(r"-?\d[\d.e+-]*|\s")  # the noise is new in every run
    assert number.sub("", printed) == number.sub("", shown)
    assert printed.partition("first layer, as")[0] == shown.partition("first layer, as")[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "file", "spec", "attackers"),
    [
        ("own-defence.md", "mine.py", "mine:Blurred", {"broadcasts averaged", "outputs calibrated"}),
        ("own-attacker.md", "attack.py", "attack:HARDER", {"outputs projected", "two broadcasts, no data"}),
    ],
)
def test_the_how_tos_own_defence_and_attacker_are_audited(tmp_path, monkeypatch, capsys, page, file, spec, attackers):
    monkeypatch.setattr(registry, "_KNOWN", dict(registry._KNOWN))
    with reader(tmp_path):
        Path(file).write_text(code_of(f"how-to/{page}", "python"))
        assert main(["audit", *SMALL, "--no-server", "--defence", spec, "--out", "out"]) == 0, capsys.readouterr().err
        found = json.loads(Path("out/results.json").read_text())["results"][spec]["attackers"]
    assert attackers <= set(found)


@pytest.mark.slow
def test_the_how_to_on_privacy_spends_what_it_shows(tmp_path, capsys):
    with reader(tmp_path):
        exec(code_of("how-to/privacy.md", "python"), {})
    shown = code_of("how-to/privacy.md", "", 1)
    assert re.findall(r"epsilon .*", capsys.readouterr().out) == re.findall(r"epsilon .*", shown)


@pytest.mark.parametrize("path", sorted((DOCS / "images").glob("*.svg")), ids=lambda path: path.name)
def test_an_image_describes_itself_and_loads_nothing(path):
    root = ElementTree.parse(path).getroot()
    assert all(root.find(f"{{http://www.w3.org/2000/svg}}{name}").text.strip() for name in ("title", "desc"))
    outside = r"<script|<image|<foreignObject|@import|url\((?!#)|(?:href|src)=\"(?!#)"
    assert not re.search(outside, path.read_text())
