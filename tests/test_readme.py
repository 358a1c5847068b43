"""Everything in the README is run, and its figures are those of the evidence."""

import contextlib
import io
import json
import re
import shlex
import sys
import tomllib
from pathlib import Path
from statistics import mean

import pytest
import torch
from tests.docs.markdown import ROOT, blocks

from fedveil.cli import main

README = ROOT / "README.md"
RESULTS = ROOT / "results" / "cpu"


def cells():
    """The table of results: for each first cell the others. "the same ..." belongs to the row above."""
    found, last = {}, ""
    table = README.read_text().split("|---|---:|---:|\n")[1].split("\n\n")[0]
    for line in table.splitlines():
        name, *values = (cell.strip() for cell in line.strip("|").split("|"))
        last = last if name.startswith("the same") else name
        found[name if name == last else f"{last}; {name}"] = values
    return found


def percent(values):
    return f"{100 * mean(values):.1f} %"


def committed(table):
    return json.loads((RESULTS / f"{table}.json").read_text())["results"]


def figures_of(page, row):
    """The numbers in a row of a page's tables."""
    (line,) = [line for line in (ROOT / "docs" / page).read_text().splitlines() if line.startswith(row)]
    return re.findall(r"\d+(?:\.\d+)?", line.removeprefix(row))


def test_figures_of_training_are_those_of_the_committed_results():
    runs = [run for run in committed("table1") if (run["layers"], run["clients"]) == (3, 5)]
    errors = [mean(run["value"] for run in runs if run["defence"] == name) for name in ("plain", "veil")]
    found = cells()
    assert found["**Same accuracy.** Bank, test error (MSE), 5 clients"] == [f"{error:.4f}" for error in errors]
    attacked = committed("table3")["cifar10"]
    accuracies = [percent(run["test"] for run in attacked[name].values()) for name in ("plain", "veil")]
    assert found["CIFAR-10, small CNN, test accuracy"] == accuracies
    assert {len(attacked[name]) for name in ("plain", "veil")} == {3} == {len({run["seed"] for run in runs})}


def test_figures_of_attackers_are_those_of_the_committed_results():
    found = cells()
    two = "the same, by a client with two broadcasts"
    member = "**Attackers.** Membership of a record, published attack on three layers (guessing: 50 %)"
    invert = "Model inversion, published attack (guessing: 20 %)"

    def success(table, defence, attacker):
        seeds = [run["attackers"][attacker] for run in committed(table)["cifar10"][defence].values()]
        pick = {"table3": lambda one: one["attacks"]["three"]["accuracy"], "table4": lambda one: one["codes"]}[table]
        return percent(pick(one)["value"] for one in seeds)

    for row, table in ((member, "table3"), (invert, "table4")):
        assert found[row] == [success(table, name, "as published") for name in ("plain", "veil")]
        assert found[f"{row}; {two}"] == ["", success(table, "veil", "two broadcasts, no data")]


def test_figures_of_cost_and_of_the_audit_are_those_of_their_pages():
    found = cells()
    _, plain, _, veil, *_ = figures_of("deploy.md", "nvflare            resnet20-32")
    seconds = [f"{float(value) / 1000:.2f} s" for value in (plain, veil)]
    assert found["**Cost.** ResNet20 over FLARE, one round"] == seconds
    *_, down, veil_down, up, veil_up = figures_of("benchmarks.md", "resnet20  deployment")
    sent = [f"{float(a):.1f} + {float(b) + 1e-9:.1f} MB" for a, b in ((down, up), (veil_down, veil_up))]
    assert found["ResNet20, sent to a client and back, per round"] == sent
    published = figures_of("threat-model.md", "| **veil** | as published")[0]
    adaptive = figures_of("threat-model.md", "| **veil** | **two broadcasts, no data**")[0]
    row = "A client's copy predicts what the model predicts (digits)"
    assert found[row] == ["100 %", f"{published} %"]
    assert found[f"{row}; the same, with two broadcasts"] == ["", f"{adaptive} %"]


def test_the_python_block_trains_on_own_arrays(tmp_path, monkeypatch):
    (_, code), *_ = blocks(README, "python")
    assert len([line for line in code.splitlines() if line]) <= 10
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with torch.random.fork_rng(), contextlib.redirect_stdout(printed):
        torch.manual_seed(0)
        exec(code, {})
    accuracy, error = re.fullmatch(r"accuracy (\S+), gradient off by (\S+)\n", printed.getvalue()).groups()
    assert float(accuracy) > 0.9
    assert float(error) < 1e-5
    assert (tmp_path / "runs" / "first" / "model.safetensors").is_file()


def test_the_flower_blocks_train(monkeypatch):
    pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedveil[flower]'")
    from flwr.app import Context, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from tests.flower.grid import LocalGrid, parts

    import fedveil.flower

    torch.manual_seed(0)
    records = parts(classes=True, dtype=torch.float32)
    scope = {
        "fedveil": fedveil,
        "Net": lambda: torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)),
        "load_data": lambda context: records[int(context.node_config["partition-id"])],
        "example": records[0][0][:2],
        "test": records[0],
    }
    (_, client), (_, server) = blocks(README, "python")[1:]
    assert "client_app.py" in client
    assert "server_app.py" in server
    app, histories = ClientApp(), []
    exec(client, scope | {"app": app})
    fit = fedveil.flower.Server.fit
    monkeypatch.setattr(fedveil.flower.Server, "fit", lambda *a, **k: histories.append(fit(*a, **k)))
    exec(server, own := scope | {"app": ServerApp()})
    own["main"](LocalGrid(app, 3), Context(1, 0, {}, RecordDict(), {}))
    (history,) = histories
    assert [record["answers"] for record in history.records] == [3] * 50
    assert history.records[-1]["accuracy"] > history.records[0]["accuracy"]


def commands():
    """The lines of the README's shell blocks, without comments."""
    return [shlex.split(line, comments=True) for _, block in blocks(README, "sh") for line in block.splitlines()]


def own_files(folder):
    """What the README's commands name: a table and a model."""
    rows = [f"{20 + k % 7},{k % 3},{'north' if k % 2 else 'south'},{1000 * (k % 7) + 50 * k}" for k in range(200)]
    (folder / "houses.csv").write_text("\n".join(["size,rooms,side,price", *rows]) + "\n")
    (folder / "my_package").mkdir()
    code = "from fedveil.models import cnn\n\ndef net():\n    return cnn()\n"
    (folder / "my_package" / "models.py").write_text(code)


SMALL = {  # what a quick run of a command adds to it; None where it is quick enough
    "train": ("--epochs", "3"),
    "inspect": (),
    "audit": ("--trials", "2", "--broadcasts", "2", "--shadows", "0", "--no-network"),
    "demo": (),
}


def run(command, *more):
    name = command[1]
    assert main([*command[1:], *SMALL[name], *more]) == 0, command


def test_what_is_installed_exists():
    (install,) = [line for _, block in blocks(README, "sh") for line in block.splitlines() if line.startswith("pip ")]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = set(re.findall(r"fedveil\[(\w+)\]", install))
    assert named == set(extras) - {"dev", "docs"}


def test_quick_commands_run(tmp_path, monkeypatch, capsys):
    own_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    ours = [command for command in commands() if command and command[0] == "fedveil"]
    assert {command[1] for command in ours} == set(SMALL)
    for command in ours:
        if command[1] in ("train", "inspect"):
            run(command)
    assert (tmp_path / "runs" / "houses" / "report.html").exists()
    assert "the final layer" in capsys.readouterr().out
    sys.modules.pop("my_package.models", None)
    sys.modules.pop("my_package", None)


@pytest.mark.slow
def test_slow_commands_run(tmp_path, monkeypatch, capsys):
    own_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    for command in commands():
        if command[0] == "fedveil" and command[1] != "inspect":
            run(command)
    printed = capsys.readouterr().out
    assert "two broadcasts" in printed
    assert Path("runs/demo/report.html").exists()
