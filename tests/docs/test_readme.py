"""Every snippet of the README runs, and its figures are those of the committed results."""

import json
import re
import shlex
import tomllib
from pathlib import Path
from statistics import mean

import pytest
from tests.docs.markdown import ROOT, blocks
from tests.docs.running import reader

from fedveil.cli import main

README = ROOT / "README.md"


def figures():
    """Return the figures of each row of the table of results."""
    table = README.read_text().split("|---|---:|---:|---:|\n")[1].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")[1:]] for line in table.splitlines()]


def numbers(path, row):
    """Return the numbers in the line of a file that starts with `row`."""
    (line,) = [line for line in (ROOT / path).read_text().splitlines() if line.startswith(row)]
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", line.removeprefix(row))]


def test_the_figures_and_those_of_the_threat_model_are_those_of_the_committed_results():
    runs = json.loads((ROOT / "results" / "cpu" / "table1.json").read_text())["results"]
    runs = [run for run in runs if (run["layers"], run["clients"]) == (3, 5)]
    assert len({run["seed"] for run in runs}) == 3
    errors = [mean(run["value"] for run in runs if run["defence"] == name) for name in ("plain", "veil")]
    _, plain, _, veil, *_ = numbers("results/benchmarks/engines.txt", "nvflare            resnet20-32")
    rows = ("| **veil** | as published", "| **veil** | **two broadcasts, no data**")
    (published, *_), (adaptive, *_) = measured = [numbers("results/studies/audit.md", row)[:3] for row in rows]
    assert [numbers("docs/threat-model.md", row)[:3] for row in rows] == measured
    assert figures() == [
        [f"{errors[0]:.4f}", f"{errors[1]:.4f}", ""],
        [f"{plain / 1000:.2f} s", f"{veil / 1000:.2f} s", ""],
        ["100 %", f"{published} %", f"{adaptive} %"],
    ]


def test_the_python_block_trains_on_arrays(tmp_path, capsys):
    ((_, code),) = blocks(README, "python")
    assert len([line for line in code.splitlines() if line]) == 8
    with reader(tmp_path):
        exec(code, {})
    assert float(capsys.readouterr().out) > 0.9


def commands():
    """Return the fedveil commands of the shell blocks, without comments."""
    lines = [shlex.split(line, comments=True) for _, block in blocks(README, "sh") for line in block.splitlines()]
    return {line[1]: line[1:] for line in lines if line and line[0] == "fedveil"}


@pytest.fixture
def folder(tmp_path):
    """Work in a folder with the table and the model that the commands name."""
    rows = [f"{20 + k % 7},{k % 3},{'north' if k % 2 else 'south'},{1000 * (k % 7) + 50 * k}" for k in range(200)]
    (tmp_path / "houses.csv").write_text("\n".join(["size,rooms,side,price", *rows]) + "\n")
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "models.py").write_text("from fedveil.models import cnn as net")
    with reader(tmp_path):
        yield tmp_path


def test_the_extras_that_can_be_installed_exist():
    (install,) = [line for _, block in blocks(README, "sh") for line in block.splitlines() if line.startswith("pip ")]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"fedveil\[(\w+)\]", install)) == set(extras) - {"dev", "docs"}


def test_quick_commands_run(folder, capsys):
    assert set(commands()) == {"train", "inspect", "audit", "demo"}
    assert main([*commands()["train"], "--epochs", "3"]) == 0
    assert main(commands()["inspect"]) == 0
    assert (folder / "runs" / "houses" / "report.html").exists()
    assert "the final layer" in capsys.readouterr().out


@pytest.mark.slow
def test_slow_commands_run(folder, capsys):
    assert main(commands()["demo"]) == 0
    assert main([*commands()["train"], "--epochs", "3"]) == 0
    small = ("--trials", "2", "--broadcasts", "2", "--shadows", "0", "--no-network")
    assert main([*commands()["audit"], *small]) == 0
    assert "two broadcasts" in capsys.readouterr().out
    assert Path("runs/demo/report.html").exists()
