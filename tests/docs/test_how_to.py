"""The code of the concepts, the how-tos and other pages runs and prints what they show; images stand alone."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from tests.docs.markdown import ROOT, blocks
from tests.docs.running import reader, run_page

from fedveil.cli import main
from fedveil.defences import registry

DOCS = ROOT / "docs"
# not run here: a data set that must be downloaded, packages that are not installed, a slow command
ELSEWHERE = ("cifar10", "wandb", "mlflow", "pip install", "fedveil demo")


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


def test_metrics_of_every_kind(tmp_path, capsys):
    names = run_page(DOCS / "how-to" / "metrics.md", tmp_path, (*ELSEWHERE, "history.plot", "fedveil train"))
    printed = capsys.readouterr().out.splitlines()
    assert names["federation"].best[0] > 0.5  # of F2
    assert float(printed[-1]) > 0.8  # the balanced accuracy with class weights


def test_callbacks_reach_the_board(tmp_path, capsys):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run_page(DOCS / "how-to" / "callbacks.md", tmp_path, ELSEWHERE)
    found = event_accumulator.EventAccumulator(str(tmp_path / "runs" / "board"))
    found.Reload()
    values = found.Scalars("accuracy")
    printed = [line.rpartition(" ")[2] for line in capsys.readouterr().out.splitlines()]
    assert [f"{value.value:.3f}" for value in values] == printed[-2:]
    assert [value.step for value in found.Scalars("error")] == [value.step for value in values]
    assert (tmp_path / "runs" / "tracked" / "report.html").exists()


def test_predictions_are_the_same_in_python_and_on_the_command_line_and_without_fedveil(tmp_path, capsys):
    pytest.importorskip("pandas")
    names = run_page(DOCS / "how-to" / "predict.md", tmp_path, ELSEWHERE)
    values = names["predictor"](names["frame"]).values
    lines = (tmp_path / "predictions.csv").read_text().splitlines()[1:]
    assert [float(line.split(",")[1]) for line in lines] == pytest.approx(values, rel=1e-12)
    served = names["program"](names["predictor"].encode(names["frame"]).inputs)
    assert served.flatten().tolist() == pytest.approx(values, rel=1e-5)  # float32
    capsys.readouterr()


@pytest.mark.parametrize(
    "page", ["index.md", "how-to/gpu.md", "inputs.md", "losses.md", "hostile.md", "reference/scheme.md"]
)
def test_a_page_runs(tmp_path, page):
    names = run_page(DOCS / page, tmp_path, ELSEWHERE)
    assert "recovered" not in names or names["recovered"].error < 1e-5


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
    monkeypatch.setattr(registry, "_RECORDS", dict(registry._RECORDS))
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
    spent = r"epsilon [\d.]+"  # the accuracy depends on the noise, which is new in every run
    assert re.findall(spent, capsys.readouterr().out) == re.findall(spent, shown)
    assert len(re.findall(spent, shown)) == 3


@pytest.mark.parametrize("path", sorted((DOCS / "images").glob("*.svg")), ids=lambda path: path.name)
def test_an_image_describes_itself_and_loads_nothing(path):
    root = ElementTree.parse(path).getroot()
    assert all(root.find(f"{{http://www.w3.org/2000/svg}}{name}").text.strip() for name in ("title", "desc"))
    outside = r"<script|<image|<foreignObject|@import|url\((?!#)|(?:href|src)=\"(?!#)"
    assert not re.search(outside, path.read_text())
