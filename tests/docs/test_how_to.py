"""The code of the how-tos and of other pages runs."""

import re

import pytest
from tests.docs.markdown import ROOT, blocks
from tests.docs.running import run_page

DOCS = ROOT / "docs"
# not run here: a data set that must be downloaded, packages that are not installed
ELSEWHERE = ("cifar10", "wandb", "mlflow")


def test_the_front_page_trains(tmp_path, capsys):
    run_page(DOCS / "index.md", tmp_path, ("pip install", "fedveil demo"))
    assert float(capsys.readouterr().out) > 0.5


def test_an_own_model_is_inspected(tmp_path, capsys):
    names = run_page(DOCS / "how-to" / "own-model.md", tmp_path, ELSEWHERE)
    printed = capsys.readouterr().out
    first = next(line for line in printed.splitlines() if line.startswith("Plan of Net"))
    shown = (DOCS / "how-to" / "own-model.md").read_text().split("```text\n")[1]
    assert re.findall(r"[\d.,]+%?", first) == re.findall(r"[\d.,]+%?", shown.splitlines()[0])
    assert names["plan"].coverage == 1


def test_a_custom_loader_returns_the_same_records_on_each_load():
    code = next(code for _, code in blocks(DOCS / "how-to" / "own-data.md", "python") if code.startswith("# mine.py"))
    names = {}
    exec(code, names)
    (first, _), (again, _) = names["data"](), names["data"]()
    assert all(one.equal(other) for one, other in zip(first, again, strict=True))


@pytest.mark.slow
def test_own_data_in_every_form(tmp_path, capsys):
    pytest.importorskip("pandas")
    images = pytest.importorskip("PIL.Image")
    for number in range(20):
        picture = tmp_path / "pictures" / ("dog" if number % 2 else "cat") / f"{number}.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        images.new("RGB", (40, 30), (12 * number, 100, 200)).save(picture)
    run_page(DOCS / "how-to" / "own-data.md", tmp_path)
    printed = capsys.readouterr().out
    assert "rmse" in printed
    assert "runs/images-resnet20-veil-0/report.html" in printed


@pytest.mark.slow
def test_training_with_every_setting(tmp_path, capsys):
    names = run_page(DOCS / "how-to" / "training.md", tmp_path, ELSEWHERE)
    assert names["federation"].round == 7 * names["federation"].rounds_per_epoch
    assert (tmp_path / "runs" / "again" / "model.safetensors").exists()
    capsys.readouterr()


def test_callbacks_reach_the_board(tmp_path, capsys):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run_page(DOCS / "how-to" / "callbacks.md", tmp_path, ELSEWHERE)
    found = event_accumulator.EventAccumulator(str(tmp_path / "runs" / "board"))
    found.Reload()
    values = found.Scalars("accuracy")
    printed = [line.rpartition(" ")[2] for line in capsys.readouterr().out.splitlines()]
    assert [f"{value.value:.3f}" for value in values] == printed[-2:]
    assert len(found.Scalars("error")) == values[-1].step


@pytest.mark.parametrize("page", ["how-to/gpu.md", "losses.md", "hostile.md", "reference/scheme.md"])
def test_a_page_runs(tmp_path, page):
    names = run_page(DOCS / page, tmp_path, ELSEWHERE)
    assert "recovered" not in names or names["recovered"].error < 1e-5
