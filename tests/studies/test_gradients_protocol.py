"""`fedveil attack gradients` from end to end, on digits; with real pictures where they are at hand."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch

from fedveil.errors import BadArgument
from fedveil.federation.shards import generator
from fedveil.models import lenet
from fedveil.runs.config import CHOICES, Config, load_data
from fedveil.runs.folder import train
from fedveil.studies.attack import run_attack
from fedveil.studies.gradients.run import GRADIENTS, GradientSettings, attack, floors, shared_labels

REAL = Path(os.environ.get("FEDVEIL_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")
QUICK = GradientSettings(images=2, victim_batch="1,2", steps=2, restarts=1)


def config_of(**changes):
    return Config(**{**GRADIENTS.defaults, "data": "digits", "train_size": 200, "defence": "plain", **changes})


def test_every_defence_gets_its_rows_and_floors_and_pictures(tmp_path):
    shown = run_attack(GRADIENTS, config_of(), QUICK, CHOICES["defence"], tmp_path, workers=1)
    rows = [dict(zip(shown.header[:5], row[:5], strict=True)) for row in shown.rows]
    for name in CHOICES["defence"]:
        own = {"veil": ["true W, veiled upload"], "ppdl": ["V-diff, masked"]}.get(name, [])
        views = ["V-diff", "V-up", *own]
        own = [(row["view"], row["batch"]) for row in rows if row["defence"] == name]
        assert own == [(view, size) for size in ("1", "2") for view in views]
    assert [row["view"] for row in rows if row["defence"] == "floor"] == ["mean image", "another of its class"]
    assert all(row["images"] == "2" for row in rows)
    _, first, second = shown.sections
    assert [label for label, _ in first.rows][:2] == ["original", "plain, V-diff"]
    assert len(first.rows) == len(second.rows) == 1 + 2 * 5 + 2
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png") == 2 * 2 * 13
    json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)


def test_a_stopped_attack_goes_on_with_the_batch_it_was_at(tmp_path):
    told = []
    asked = {"config": config_of(), "settings": QUICK, "folder": tmp_path, "run": tmp_path / "run"}
    first = attack(lambda share, what: told.append(share), **asked)
    parts = tmp_path / "plain" / "parts"
    assert sorted(path.name for path in parts.iterdir()) == ["batch1-0.json", "batch1-1.json", "batch2-0.json"]
    (parts / "batch1-1.json").unlink()
    before = (parts / "batch1-0.json").stat().st_mtime_ns
    again = attack(lambda share, what: None, **asked)
    assert (parts / "batch1-0.json").stat().st_mtime_ns == before
    for result in (first, again):
        for part in result["parts"].values():
            for view in part["views"].values():
                view.pop("seconds")
    assert again == first
    assert told[-1] == 1


def test_a_batch_that_fails_is_a_failed_row(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise BadArgument("search", "it broke")

    monkeypatch.setattr("fedveil.studies.gradients.run.reconstruct", broken)
    shown = run_attack(GRADIENTS, config_of(), QUICK, ["plain"], tmp_path, workers=1)
    assert [row[-1] for row in shown.rows] == ["failed: search: it broke."] * 2


def test_a_trained_run_is_attacked_where_it_stopped(tmp_path):
    config = Config(data="digits", model="lenet", train_size=200, clients=2, epochs=1, defence="plain")
    train(config, tmp_path / "run")
    shown = run_attack(GRADIENTS, config, QUICK, ["plain"], tmp_path / "out", run=tmp_path / "run", workers=1)
    assert [row[0] for row in shown.rows] == ["plain"] * 4 + ["floor"] * 2


@pytest.mark.parametrize(
    ("changes", "settings", "what"),
    [
        ({"model": "mlp"}, QUICK, "are no images"),
        ({"optimizer": "adam"}, QUICK, "a server of plain SGD"),
        ({"momentum": 0.9}, QUICK, "a server of plain SGD"),
        ({"train_size": 30}, QUICK, "30 training records, the attacker and the victim need 34"),
        ({}, GradientSettings(victim_batch="1,x"), "batches of '1,x' from 8 images"),
        ({}, GradientSettings(victim_batch="16"), "batches of '16' from 8 images"),
    ],
)
def test_what_the_protocol_cannot_do_is_refused(tmp_path, changes, settings, what):
    with pytest.raises(BadArgument, match=what):
        attack(
            lambda share, doing: None,
            config=config_of(**changes),
            settings=settings,
            folder=tmp_path,
            run=tmp_path / "run",
        )


def test_the_method_follows_the_activation():
    assert GradientSettings().search(lenet()).method == "cosine"
    smooth = GradientSettings(restarts=3).search(lenet(activation="sigmoid"))
    assert (smooth.method, smooth.steps, smooth.restarts) == ("idlg", 150, 3)
    with pytest.raises(BadArgument, match="there is no method 'magic'"):
        GradientSettings(method="magic").search(lenet())


def test_labels_count_whatever_their_order():
    assert shared_labels([3, 1, 1], [1, 3, 3]) == 2
    assert shared_labels([0], [1]) == 0


def test_floors_are_the_mean_image_and_another_image_of_the_class():
    data = load_data(config_of())
    rows = torch.arange(20)
    true = data.pixels(data.train.inputs[rows])
    found = floors(data, rows, true, generator("floors"))
    mean = data.train.inputs.mean(0)
    assert found["mean image"]["mse"] == pytest.approx(
        [float((image - mean).square().mean()) for image in true], rel=1e-5
    )
    assert all(error > 0 for error in found["another of its class"]["mse"])


@pytest.mark.slow
def test_plain_training_gives_real_pictures_away(tmp_path, monkeypatch):
    """DLG's own network on CIFAR-10, two clients, from two broadcasts: above the 20 dB that count as success."""
    if not (REAL / "cifar10").is_dir():
        pytest.skip(f"no cifar10 in {REAL}")
    monkeypatch.setenv("FEDVEIL_DATA", str(REAL))
    monkeypatch.setenv("FEDVEIL_CACHE", str(tmp_path / "cache"))
    config = dataclasses.replace(config_of(data="cifar10", train_size=1000), model="lenet-sigmoid")
    settings = GradientSettings(images=1, victim_batch="1", restarts=2)
    found = attack(lambda share, what: None, config, settings, tmp_path, tmp_path / "run")
    part = found["parts"]["batch1-0"]
    assert part["views"]["V-diff"]["psnr"][0] > 20 > part["floors"]["mean image"]["psnr"][0]
    assert part["views"]["V-diff"]["labels"] == 1
