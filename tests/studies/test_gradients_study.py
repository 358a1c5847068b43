"""`fedveil attack gradients` from end to end, on digits."""

import pytest
import torch
from tests.configs import config_of

from fedveil.attacks.gradients import Search
from fedveil.defences.registry import BUILT_IN
from fedveil.errors import BadArgument
from fedveil.models import lenet
from fedveil.records.shards import generator
from fedveil.runs.build import load_data
from fedveil.runs.folder import train
from fedveil.studies.attack import AttackRequest
from fedveil.studies.gradients.results import Batch, Gradients, ImageFigures, View, judge_views
from fedveil.studies.gradients.run import GRADIENTS, GradientOptions, floors, shared_labels
from fedveil.studies.study import gather, publish
from fedveil.studies.verdicts import Label

QUICK = GradientOptions(images=2, victim_batch="1,2", steps=2, restarts=1)
DEFENCES = tuple(record.name for record in BUILT_IN)


def small(**changes):
    return config_of(**{**GRADIENTS.defaults, "data": "digits", "train_size": 200, "defence": "plain", **changes})


def attacked(folder, config=None, options=QUICK, defences=("plain",), run=None):
    asked = AttackRequest(config or small(), defences, options, run)
    return publish(GRADIENTS, asked, gather(GRADIENTS, asked, folder, workers=1), folder, "again")


def test_every_defence_has_a_row_for_each_view_and_batch_size_and_pictures(tmp_path):
    shown = attacked(tmp_path, defences=DEFENCES)
    adaptive = {"veil": ["true W, veiled upload", "V-diff, two broadcasts"], "ppdl": ["V-diff, masked"]}
    views = {name: ["V-diff", "V-up", *adaptive.get(name, [])] for name in DEFENCES}
    wanted = [(name, view, size) for name, own in views.items() for size in ("1", "2") for view in own]
    wanted += [("floor", view, "") for view in ("mean image", "another of its class")]
    assert [(row[0], row[1], row[3]) for row in shown.rows] == wanted
    assert all(row[4] == "2" for row in shown.rows)  # images
    _, first, second, _ = shown.sections
    assert [label for label, _ in first.rows][:2] == ["original", "plain, V-diff"]
    assert len(first.rows) == len(second.rows) == 1 + 2 * 5 + 3
    assert (tmp_path / "report.html").read_text().count("data:image/png") == 2 * 2 * 14


def test_a_server_of_adam_is_attacked_by_its_signs(tmp_path):
    shown = attacked(tmp_path, small(optimizer="adam", lr=1e-3), defences=("veil",))
    rows = [row[2:4] for row in shown.rows if row[1] == "V-diff, two broadcasts"]
    assert rows == [["adaptive", "1"], ["adaptive", "2"]]


def test_a_batch_that_fails_is_a_failed_row(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise BadArgument("search", "it broke")

    monkeypatch.setattr("fedveil.studies.gradients.run.reconstruct", fail)
    assert [row[-1] for row in attacked(tmp_path).rows] == ["failed: search: it broke."] * 2


def test_a_trained_run_is_attacked_where_it_stopped(tmp_path):
    config = config_of(data="digits", model="lenet", train_size=200, clients=2, epochs=1, defence="plain")
    train(config, tmp_path / "run")
    shown = attacked(tmp_path / "out", config, run=tmp_path / "run")
    assert [row[0] for row in shown.rows] == ["plain"] * 4 + ["floor"] * 2


def test_the_method_follows_the_activation():
    assert GradientOptions().search(lenet()).method == "cosine"
    smooth = GradientOptions(restarts=3).search(lenet(activation="sigmoid"))
    assert (smooth.method, smooth.steps, smooth.restarts) == ("idlg", 150, 3)
    with pytest.raises(BadArgument, match="there is no method 'magic'"):
        GradientOptions(method="magic").search(lenet())


def test_floors_are_the_mean_image_and_another_image_of_the_class_and_labels_count_in_any_order():
    data, rows = load_data(small()), torch.arange(20)
    true = data.pixels(data.train.inputs[rows])
    found = floors(data, rows, true, generator("floors"))
    mean = data.train.inputs.mean(0)
    assert found["mean image"].mse == pytest.approx([float((image - mean).square().mean()) for image in true], rel=1e-5)
    assert all(error > 0 for error in found["another of its class"].mse)
    assert (shared_labels([3, 1, 1], [1, 3, 3]), shared_labels([0], [1])) == (2, 0)


def rebuilt(**psnr):
    """Images rebuilt with these PSNRs by view, where a guess has 11 dB."""
    near = {view: View(own, [0.5], [0.1], 1, 0.0, 0, ["AA=="] * len(own)) for view, own in psnr.items()}
    guesses = {"mean image": ImageFigures([11.0], [0.1], [0.1])}
    return Gradients(0, {"batch1-0": Batch(1, [0], Search(), near, guesses, ["AA=="], (1, 1, 1))})


def test_the_nearest_view_is_judged_beside_a_guess():
    veil = rebuilt(**{"V-up": [11.9, 12.1], "V-diff, two broadcasts": [21.8, 22.2]})
    verdicts = judge_views({"plain": rebuilt(**{"V-up": [24.8, 25.2]}), "veil": veil}, 1)
    assert {name: one.label for name, one in verdicts.items()} == {"plain": Label.LEAK, "veil": Label.LEAK}
    assert (verdicts["veil"].guess, verdicts["veil"].published.value) == (11.0, pytest.approx(12.0))
    for psnr in ([30.0], [5.0, 17.5]):  # one image proves nothing
        assert judge_views({"plain": rebuilt(**{"V-up": psnr})}, 1)["plain"].label is Label.TOO_FEW
