"""Stored results are used only for the version, data, code and checkpoint that they were computed from."""

import importlib.metadata
import json
import random
import sys
from pathlib import Path

import pytest

from fedveil.cli import main
from fedveil.runs.folder import open_run

TINY = ["--trials", "1", "--broadcasts", "1", "--no-network", "--no-server", "--workers", "1"]
CSV = ["--data", "csv", "--path", "records.csv", "--target", "answer", "--clients", "2", "--epochs", "1"]
SMALL = [*CSV, "--hidden", "4", "--layers", "1"]
COMPARE = ["--defences", "plain", "--seeds", "1", "--workers", "1", "--out", "study"]
NET = """
from torch import nn


def net():
    return nn.Sequential(nn.Linear(3, {hidden}), nn.ReLU(), nn.Linear({hidden}, 2))
"""
LOAD = """
from pathlib import Path

import torch


def load():
    inputs = torch.arange(180.0).reshape(60, 3) / 180 + len(Path("shift").read_text())
    targets = torch.arange(60) % 2
    return (inputs[:48], targets[:48]), (inputs[48:], targets[48:])
"""


def write_records(change=""):
    """Write a small CSV file; `change` replaces its first value."""
    chance = random.Random(0)
    rows = [[f"{chance.gauss(0, 1):.3f}" for _ in range(3)] for _ in range(60)]
    rows[0][0] = change or rows[0][0]
    lines = [",".join([*row, "yes" if number % 3 else "no"]) for number, row in enumerate(rows)]
    Path("records.csv").write_text("\n".join(["a,b,c,answer", *lines]) + "\n")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    write_records()
    return tmp_path


@pytest.fixture
def run(capsys):
    """Run a command; returns the jobs whose results were reused, and the reason of each that was computed again."""

    def call(*words):
        assert main(list(words)) == 0
        lines = [line.split("% ", 1)[-1] for line in capsys.readouterr().err.splitlines()]
        kept = {line.partition(":")[0] for line in lines if line.endswith(": reused")}
        again = [line.partition(": computed again: ")[::2] for line in lines if ": computed again: " in line]
        return kept, dict(again)

    return call


def stored(folder):
    return {path.name: json.loads(path.read_text()) for path in Path(folder).glob("**/jobs/*.json")}


def train_more(monkeypatch):
    open_run("run")[1].fit(2, folder="run")  # one epoch more; config.json says one


def rename_version(monkeypatch):
    own = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9.9" if name == "fedveil" else own(name))


JOBS = {"audit-plain", "shadow-plain-0", "shadow-plain-1"}


@pytest.mark.parametrize(
    ("change", "why", "stale"),
    [
        (lambda monkeypatch: None, "", set()),
        (lambda monkeypatch: write_records("0.5"), "the data changed since", JOBS),
        (train_more, "the run's checkpoint changed since", {"audit-plain"}),
        (rename_version, "fedveil ", JOBS),
    ],
)
def test_an_audit_computes_again_what_another_basis_makes_stale(here, run, monkeypatch, change, why, stale):
    assert main(["train", *SMALL, "--defence", "plain", "--out", "run"]) == 0
    assert run("audit", "run", *TINY) == (set(), {})
    change(monkeypatch)
    trained = Path("run/checkpoint.pt").read_bytes()
    kept, again = run("audit", "run", *TINY)
    assert (kept, set(again)) == (JOBS - stale, stale)
    assert all(reason.startswith(why) for reason in again.values())
    assert run("audit", "run", *TINY) == (JOBS, {})
    assert Path("run/checkpoint.pt").read_bytes() == trained  # the user's run is never trained again
    basis = stored("run/audit")["audit-plain.json"]["basis"]
    assert list(basis["data"]) == ["csv records.csv"]
    assert basis["checkpoint"].startswith("sha256:")


def import_again(name):
    """Forget a module, as a new process would."""
    sys.modules.pop(name, None)
    for cache in Path("__pycache__").glob("*"):
        cache.unlink()
    importlib.invalidate_caches()


def test_changed_code_of_a_model_and_changed_records_of_own_code_make_new_results_and_a_new_run(here, run):
    words = ["attack", "membership", "--data", "own_load:load", "--model", "own_net:net", "--defence", "plain"]
    words += ["--clients", "2", "--epochs", "1", "--shadows", "0", "--no-full", "--attack-epochs", "1"]
    words += ["--workers", "1", "--out", "study"]
    jobs = {"train-plain", "membership-plain"}
    for name, text in (("own_net.py", NET.format(hidden=4)), ("own_load.py", LOAD), ("shift", "1")):
        Path(name).write_text(text)
    run(*words)
    assert run(*words) == (jobs, {})
    Path("shift").write_text("22")  # the source file stays the same
    _, again = run(*words)
    assert set(again) == jobs
    assert all(why.startswith("the data changed") for why in again.values())
    Path("own_net.py").write_text(NET.format(hidden=5))
    import_again("own_net")
    _, again = run(*words)
    assert set(again) == jobs
    assert all(why.startswith("the code of own_net changed") for why in again.values())
    assert open_run("study/plain/run", trust_code=True)[1].model[0].out_features == 5
    import_again("own_net")
    import_again("own_load")


def test_a_stopped_run_of_a_study_is_not_continued_with_other_data(here, run):
    words = ["compare", *SMALL, "--checkpoint-every", "1", *COMPARE]
    run(*words)
    whole = stored("study")["plain-0.json"]["result"]["records"]
    Path("study/jobs/plain-0.json").unlink()  # as if it had been stopped
    Path("study/runs/plain-0/summary.json").unlink()
    assert run(*words) == (set(), {})  # nothing changed, and it resumes
    assert stored("study")["plain-0.json"]["result"]["records"] == whole
    Path("study/jobs/plain-0.json").unlink()
    write_records("0.5")
    assert run(*words)[1]["plain-0"].startswith("the data changed")
    assert stored("study")["plain-0.json"]["result"]["records"] != whole


def test_a_changed_image_makes_a_new_generator_evaluator_and_attack(here, run):
    image = pytest.importorskip("PIL.Image")
    for part, count in (("train", 6), ("test", 2)):
        for index, label in enumerate("abcd"):
            folder = here / "pictures" / part / label
            folder.mkdir(parents=True)
            for number in range(count):
                image.new("RGB", (8, 8), (40 * number, 50 * index, 0)).save(folder / f"{number}.png")
    federation = ["--data", "images", "--path", "pictures", "--size", "8", "--labels", "0-1", "--clients", "2"]
    few = ["--codes", "1", "--broadcasts", "1", "--steps", "1", "--restarts", "1", "--pixel-steps", "0"]
    nets = ["--gan-epochs", "1", "--gan-width", "4", "--judge-epochs", "1", "--judge-width", "2", "--width", "2"]
    words = ["attack", "inversion", *federation, "--model", "cnn", "--epochs", "1", "--defence", "plain", *few, *nets]
    words += ["--workers", "1", "--out", "study"]
    jobs = {"gan", "evaluator", "train-plain", "inversion-plain"}
    run(*words)
    before = {path: path.read_bytes() for path in (Path("study/gan.pt"), Path("study/judge.pt"))}
    assert run(*words) == (jobs, {})
    image.new("RGB", (8, 8), (1, 2, 3)).save("pictures/train/d/0.png")  # a class that is not trained on
    _, again = run(*words)
    assert set(again) == jobs
    assert all(old != path.read_bytes() for path, old in before.items())


def test_an_attacked_run_is_never_written_to_and_its_state_is_reported(here, capsys):
    assert main(["train", *SMALL, "--out", "run"]) == 0
    rounds = open_run("run")[1].rounds_per_epoch
    config = json.loads(Path("run/config.json").read_text())
    config["training"]["epochs"] = 5  # four of which are missing
    Path("run/config.json").write_text(json.dumps(config))
    Path("run/summary.json").unlink()
    write_records("0.5")
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main(["audit", "run", "--out", "audit", *TINY]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"This run is unfinished: the attack uses its state after round {rounds} of {5 * rounds}." in said
    assert "The data have changed since this run was trained" in said
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before
    assert main(["train", "--resume", "--out", "run"]) == 2
    assert "the data have changed since this run was trained" in capsys.readouterr().err
    for name in ("checkpoint.pt", "checkpoint.previous.pt"):
        Path("run", name).unlink(missing_ok=True)
    assert main(["audit", "run", "--out", "audit", *TINY]) == 2
    assert "there is no checkpoint at this path" in capsys.readouterr().err
