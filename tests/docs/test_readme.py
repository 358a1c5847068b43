"""Every snippet of the README runs, and its figures are those of the committed results."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from tests.docs.markdown import ROOT, blocks
from tests.docs.running import reader

from fedveil.cli import main

README = ROOT / "README.md"


def numbers(path, row):
    """Return the numbers in the line of a file that starts with `row`."""
    (line,) = [line for line in (ROOT / path).read_text().splitlines() if line.startswith(row)]
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", line.removeprefix(row))]


def cells(path):
    """Return the rows of the first table of a page, by their first cell without links."""
    lines = [line for line in (ROOT / path).read_text().split("\n\n|")[1].split("\n\n")[0].splitlines()[2:]]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", name): own for name, *own in rows}


def test_the_figures_are_those_of_the_committed_results():
    rows = json.loads((ROOT / "results" / "protections" / "results.json").read_text())["data"]
    digits, bank = rows["digits"]["rows"], rows["bank"]["rows"]

    def answers(row):
        return 100 * row["copy"]["agreement"]["as published"][0]

    def rounds(row):
        return f"{round(100 * row['server']['batch']['known'][0], 1):g}"

    def pairs(row):
        return f"{100 * row['final'][row['final']['best']]['auc'][0]:.1f}"

    none, private, both = (digits[name] for name in ("none", "DP 3", "secure aggregation + DP 3"))
    accuracies = {name: f"{100 * row['metric'][0]:.1f} %" for name, row in digits.items()}
    assert [own[2:] for own in cells("README.md").values()] == [
        ["", "", accuracies["none"]],
        ["100 of 100 answers", f"{answers(digits['veil']):.0f}", accuracies["veil"]],
        [f"{rounds(none)} of 100 rounds", rounds(digits["secure aggregation"]), accuracies["secure aggregation"]],
        [f"{pairs(none)} of 100 pairs", pairs(private), accuracies["DP 3"]],
        [f"{rounds(none)} of 100 rounds", rounds(both), accuracies["secure aggregation + DP 3"]],
    ]
    text = " ".join(README.read_text().split())
    assert f"(guessing: {100 * digits['veil']['copy']['constant'][0]:.0f})" in text
    assert f"an update of {rows['digits']['settings']['batch']} records" in text
    with_dp, without = (bank[name]["metric"][0] for name in ("DP 3", "none"))
    assert f"epsilon 3 gives an AUC of {with_dp:.3f}, compared with {without:.3f} without it" in text


def test_the_threat_model_has_the_figures_of_the_audit():
    rows = ("| **veil** | as published", "| **veil** | **two broadcasts, no data**")
    shown, measured = (
        [numbers(path, row)[:3] for row in rows] for path in ("docs/threat-model.md", "results/studies/audit.md")
    )
    assert shown == measured


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
    assert set(commands()) == {"train", "predict", "inspect", "audit", "demo"}
    assert main([*commands()["train"], "--epochs", "3"]) == 0
    (folder / "new.csv").write_text("side,rooms,size\nnorth,2,23\n")
    assert main(commands()["predict"]) == 0
    assert "1 record: from" in capsys.readouterr().out
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
