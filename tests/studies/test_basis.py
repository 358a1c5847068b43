"""Results that are kept are used only for the version, data, code and checkpoint that they were made from."""

import importlib.metadata
import json
import random
import sys
from pathlib import Path

import pytest

from fedveil.cli import main
from fedveil.runs.folder import open_run

TINY = ["--trials", "1", "--broadcasts", "1", "--no-network", "--no-server", "--workers", "1"]
NET = """
from torch import nn


def net():
    return nn.Sequential(nn.Linear(3, {hidden}), nn.ReLU(), nn.Linear({hidden}, 2))
"""
LOAD = """
from pathlib import Path

import torch


def load():
    inputs = torch.arange(180.0).reshape(60, 3) / 180 + {shift}
    targets = torch.arange(60) % 2
    return (inputs[:48], targets[:48]), (inputs[48:], targets[48:])
"""


def write_records(path, change=""):
    """A small CSV file; `change` takes the place of its first value."""
    chance = random.Random(0)
    rows = [[f"{chance.gauss(0, 1):.3f}" for _ in range(3)] for _ in range(60)]
    rows[0][0] = change or rows[0][0]
    lines = [",".join([*row, "yes" if number % 3 else "no"]) for number, row in enumerate(rows)]
    path.write_text("\n".join(["a,b,c,answer", *lines]) + "\n")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_records(tmp_path / "records.csv")
    return tmp_path


@pytest.fixture
def lines(capsys):
    """Run a command; returns what it says about each job, the last line of each."""

    def run(*words):
        assert main(list(words)) == 0
        said = [line.split("% ", 1)[-1] for line in capsys.readouterr().err.splitlines() if ": " in line]
        return [line for line in said if "kept" in line or "done" in line or "computed again" in line]

    return run


CSV = ["--data", "csv", "--path", "records.csv", "--target", "answer", "--clients", "2", "--epochs", "1"]


def csv(*words):
    return [*CSV, "--hidden", "4", "--layers", "1", *words]


def train(out, *words):
    assert main(["train", *words, "--out", out]) == 0


def results(folder):
    return {path.name: json.loads(path.read_text()) for path in Path(folder).glob("**/jobs/*.json")}


def kept(said):
    return {line.partition(":")[0] for line in said if line.endswith(": kept")}


def again(said, why):
    return {line.partition(":")[0] for line in said if f": computed again: {why}" in line}


JOBS = {"audit-plain", "shadow-plain-0", "shadow-plain-1"}


@pytest.fixture
def audited(here, lines):
    """A run and its audit."""
    train("run", *csv("--defence", "plain"))
    assert not kept(lines("audit", "run", *TINY))
    return here


def test_nothing_is_computed_again_if_nothing_changed(audited, lines):
    before = {path: path.stat().st_mtime_ns for path in Path("run/audit/jobs").iterdir()}
    assert kept(lines("audit", "run", *TINY)) == JOBS
    assert {path: path.stat().st_mtime_ns for path in Path("run/audit/jobs").iterdir()} == before
    basis = results("run/audit")["audit-plain.json"]["basis"]
    assert basis["version"] == importlib.metadata.version("fedveil")
    assert list(basis["data"]) == ["csv records.csv"]
    assert basis["checkpoint"].startswith("sha256:")


def test_one_changed_value_of_a_csv_file_makes_new_results(audited, lines):
    before, trained = results("run/audit"), Path("run/checkpoint.pt").read_bytes()
    write_records(audited / "records.csv", change="0.5")
    assert again(lines("audit", "run", *TINY), "the data changed since") == JOBS
    after = results("run/audit")
    assert all(after[name]["basis"]["data"] != before[name]["basis"]["data"] for name in before)
    assert kept(lines("audit", "run", *TINY)) == JOBS
    assert Path("run/checkpoint.pt").read_bytes() == trained  # the user's run is never trained again


def test_a_new_checkpoint_of_the_run_makes_a_new_audit(audited, lines):
    _, federation = open_run("run")
    federation.fit(2, folder="run")  # one epoch more; config.json says one
    said = lines("audit", "run", *TINY)
    assert again(said, "the run's checkpoint changed since") == {"audit-plain"}
    assert kept(said) == JOBS - {"audit-plain"}  # shadows are not made from it


def test_another_version_makes_new_results(audited, lines, monkeypatch):
    own = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9.9" if name == "fedveil" else own(name))
    assert again(lines("audit", "run", *TINY), "fedveil ") == JOBS
    assert {found["basis"]["version"] for found in results("run/audit").values()} == {"9.9.9"}


def import_again(name):
    """Forget a module, as a new process would."""
    sys.modules.pop(name, None)
    for cache in Path("__pycache__").glob("*"):
        cache.unlink()
    importlib.invalidate_caches()


def test_changed_code_of_a_model_makes_new_results_and_a_new_run(here, lines, monkeypatch):
    monkeypatch.syspath_prepend(here)
    words = ["attack", "membership", *CSV, "--model", "own_net:net", "--defence", "plain", "--shadows", "0"]
    words += ["--no-full", "--attack-epochs", "1", "--workers", "1", "--out", "study"]
    Path("own_net.py").write_text(NET.format(hidden=4))
    lines(*words)
    assert kept(lines(*words)) == {"train-plain", "membership-plain"}
    Path("own_net.py").write_text(NET.format(hidden=5))
    import_again("own_net")
    assert again(lines(*words), "the code of own_net changed since") == {"train-plain", "membership-plain"}
    _, federation = open_run("study/plain/run", trust_code=True)
    assert federation.model[0].out_features == 5
    import_again("own_net")


def test_changed_records_of_own_code_make_new_results(here, lines, monkeypatch):
    monkeypatch.syspath_prepend(here)
    words = ["compare", "--data", "own_load:load", "--clients", "2", "--epochs", "1", "--hidden", "4", "--seeds", "1"]
    words += ["--defences", "plain", "--workers", "1", "--out", "study"]
    Path("own_load.py").write_text(LOAD.format(shift="len(Path('shift').read_text())"))
    Path("shift").write_text("1")
    lines(*words)
    assert kept(lines(*words)) == {"plain-0"}
    Path("shift").write_text("22")  # the source file stays the same
    assert again(lines(*words), "the data changed since") == {"plain-0"}
    import_again("own_load")


def test_a_stopped_run_of_a_study_is_not_continued_with_other_data(here, lines):
    words = ["compare", *csv("--checkpoint-every", "1"), "--defences", "plain", "--seeds", "1", "--workers", "1"]
    words += ["--out", "study"]
    lines(*words)
    whole = results("study")["plain-0.json"]["result"]["records"]
    (here / "study/jobs/plain-0.json").unlink()  # as if it had been stopped
    (here / "study/runs/plain-0/summary.json").unlink()
    marked = (here / "study/runs/plain-0/checkpoint.pt").read_bytes()
    assert not again(lines(*words), "")  # nothing changed, and it goes on
    assert results("study")["plain-0.json"]["result"]["records"] == whole
    (here / "study/jobs/plain-0.json").unlink()
    write_records(here / "records.csv", change="0.5")
    assert again(lines(*words), "the data changed") == {"plain-0"}
    assert results("study")["plain-0.json"]["result"]["records"] != whole
    assert (here / "study/runs/plain-0/checkpoint.pt").read_bytes() != marked


def draw_pictures(folder, classes):
    image = pytest.importorskip("PIL.Image")
    for part, count in (("train", 6), ("test", 2)):
        for place, label in enumerate(classes):
            (folder / part / label).mkdir(parents=True)
            for number in range(count):
                picture = image.new("RGB", (8, 8), (40 * number, 50 * place, 0))
                picture.save(folder / part / label / f"{number}.png")
    return image


def test_a_changed_file_in_a_folder_of_images_makes_new_results(here, lines):
    image = draw_pictures(here / "pictures", "ab")
    words = ["compare", "--data", "images", "--path", "pictures", "--size", "8", "--clients", "2", "--epochs", "1"]
    words += ["--hidden", "4", "--seeds", "1", "--defences", "plain", "--workers", "1", "--out", "study"]
    lines(*words)
    assert kept(lines(*words)) == {"plain-0"}
    image.new("RGB", (8, 8), (1, 2, 3)).save(here / "pictures/train/a/0.png")
    assert again(lines(*words), "the data changed since") == {"plain-0"}


def test_a_generator_is_not_continued_with_other_images(here, lines):
    image = draw_pictures(here / "pictures", "abcd")
    federation = ["--data", "images", "--path", "pictures", "--size", "8", "--labels", "0-1", "--clients", "2"]
    few = ["--codes", "1", "--broadcasts", "1", "--steps", "1", "--restarts", "1", "--pixel-steps", "0"]
    nets = ["--gan-epochs", "1", "--gan-width", "4", "--judge-epochs", "1", "--judge-width", "2", "--width", "2"]
    words = ["attack", "inversion", *federation, "--model", "cnn", "--epochs", "1", "--defence", "plain", *few, *nets]
    words += ["--workers", "1", "--out", "study"]
    lines(*words)
    before = [Path("study", name).read_bytes() for name in ("gan.pt", "judge.pt")]
    assert kept(lines(*words)) == {"gan", "evaluator", "train-plain", "inversion-plain"}
    image.new("RGB", (8, 8), (1, 2, 3)).save(here / "pictures/train/d/0.png")  # a class that is not trained on
    assert again(lines(*words), "the data changed since") == {"gan", "evaluator", "train-plain", "inversion-plain"}
    after = [Path("study", name).read_bytes() for name in ("gan.pt", "judge.pt")]
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_a_run_that_is_attacked_is_never_written_to_and_its_state_is_told(here, capsys):
    train("run", *csv())
    _, federation = open_run("run")
    rounds = federation.rounds_per_epoch
    config = json.loads(Path("run/config.json").read_text())
    config["training"]["epochs"] = 5  # four of which are missing
    Path("run/config.json").write_text(json.dumps(config))
    Path("run/summary.json").unlink()
    write_records(here / "records.csv", "0.5")
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main(["audit", "run", "--out", "audit", *TINY]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"This run is not finished: it is attacked after round {rounds} of {5 * rounds}." in said
    assert "The data changed since this run was trained" in said
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before
    assert main(["train", "--resume", "--out", "run"]) == 2
    assert "the data changed since the run here was trained" in capsys.readouterr().err


def test_a_folder_without_a_checkpoint_is_not_attacked(here, capsys):
    train("run", *csv())
    for name in ("checkpoint.pt", "checkpoint.previous.pt"):
        Path("run", name).unlink(missing_ok=True)
    assert main(["audit", "run", "--out", "audit", *TINY]) == 2
    assert "there is no checkpoint here" in capsys.readouterr().err
