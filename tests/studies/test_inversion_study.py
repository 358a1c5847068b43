"""`fedveil attack inversion` from the command line, on digits; the evaluator's measures against slow ones."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.configs import config_of
from torch import nn

from fedveil.cli import main
from fedveil.data import keep_labels, load
from fedveil.errors import BadArgument
from fedveil.models import cnn, resnet
from fedveil.report import NOTHING
from fedveil.runs.build import load_data
from fedveil.studies.inversion import results
from fedveil.studies.inversion.evaluator import distances, make_judge, outputs_and_features, per_class, train_judge
from fedveil.studies.inversion.results import Counts, Inversion, InversionFigures, SuccessRate, judge_attackers
from fedveil.studies.inversion.run import data_config, first_images, public_images
from fedveil.studies.study import encode_image
from fedveil.studies.verdicts import Label

SMALL = dict(codes=4, broadcasts=2, steps=5, restarts=1, pixel_steps=5, gan_epochs=1, judge_epochs=2, judge_width=8)
FLAGS = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
VICTIM = ["--data", "digits", "--model", "cnn", "--width", "4", "--epochs", "2", "--clients", "2", "--labels", "5-9"]


@pytest.fixture
def run(tmp_path, capsys):
    def call(*words):
        code = main(["attack", "inversion", *FLAGS, "--workers", "1", "--out", str(tmp_path / "out"), *words])
        return code, capsys.readouterr(), tmp_path / "out"

    return call


def test_the_table_has_a_row_per_attacker_beside_floor_and_ceiling(run):
    code, captured, folder = run(*VICTIM, "--defence", "plain,veil,dbcl", "--json")
    assert code == 0, captured.err
    rows = json.loads(captured.out)
    assert [row["defence"] for row in rows] == ["plain", "veil", "veil", "veil", "dbcl", "dbcl", "floor", "ceiling"]
    found = json.loads((folder / "results.json").read_text())["results"]["veil"]
    published = found["attackers"]["as published"]
    everything = load_data(config_of(data="digits")).train.targets
    members = int((everything >= 5).sum())
    public = len(everything) - members
    assert found["records"] == {"members": members, "public": public, "reconstructions": 20, "broadcasts": 2}
    assert published["codes"]["trials"] == 20
    assert sum(published["codes"]["per_class"]) / 5 == pytest.approx(published["codes"]["value"])
    assert {"as_received", "true_model", "pixels"} <= set(published)
    assert (folder / "report.html").read_text().count("data:image/png") >= 5 * 2 * (2 + 2 * 3)


def test_no_public_image_is_of_a_private_class_and_networks_are_kept_when_the_victim_changes():
    config = config_of(data="digits", model="cnn", labels="5-9")
    private = {image.numpy().tobytes() for image in load_data(config).train.inputs}
    public = public_images(config, 10_000)
    assert len(public) == int((load_data(config_of(data="digits", model="cnn")).train.targets < 5).sum())
    assert not private & {image.numpy().tobytes() for image in public}
    assert len(public_images(config, 30)) == 30
    first = config_of(data="digits", model="cnn", labels="5-9", epochs=3, defence="plain")
    second = config_of(data="digits", model="resnet8", labels="5-9", epochs=9, lr=0.1)
    assert data_config(first) == data_config(second)
    assert data_config(first) != data_config(first.changed(labels="0-4"))


def test_a_class_without_images_keeps_its_columns():
    images = first_images(torch.ones(3, 1, 8, 8), torch.tensor([0, 0, 0]), 2)
    white, grey = (encode_image(torch.full((1, 8, 8), value)) for value in (1.0, 0.5))
    assert images == [white, white, grey, grey]


def test_success_by_class_and_by_broadcast_and_its_error_by_hand():
    assert per_class(torch.tensor([0, 1, 1, 2]), torch.tensor([0, 0, 1, 1]), 3) == [0.5, 0.5, None]
    judged = SuccessRate(0.5, 0.0, 1.0, 3, 6, 0.0, 0.0, right=[1, 0, 1, 1, 0, 0])
    parts = results.broadcast_success(judged, 3)
    assert parts == [0.5, 1.0, 0.0]
    assert results.standard_error(parts) == f"{100 * 0.5 / 3**0.5:.1f}"
    assert results.standard_error([0.5]) == NOTHING


def inversion(floor=0.1, **successes):
    def judged(value):
        return SuccessRate(value, value - 0.05, value + 0.05, 1, 1, 0.0, 0.0)

    found = {name: InversionFigures(*[judged(value)] * 3) for name, value in successes.items()}
    return Inversion("", 0, 1.0, 1.0, ["a"], Counts(1, 1, 1, 1), found, judged(floor), judged(1.0))


def test_success_is_judged_beside_the_generator_alone():
    found = {"plain": inversion(published=0.7), "veil": inversion(published=0.12, own=0.6)}
    verdicts = judge_attackers(found)
    assert {name: one.label for name, one in verdicts.items()} == {"plain": Label.LEAK, "veil": Label.LEAK}
    assert (verdicts["veil"].strongest.attacker, verdicts["veil"].guess) == ("own", 0.1)
    assert judge_attackers({"plain": inversion(published=0.12)})["plain"].label is Label.NOTHING


@given(st.integers(0, 1000), st.booleans())
def test_distances_are_those_of_loops(seed, same_class):
    random = torch.Generator().manual_seed(seed)
    found, known = (torch.randn(count, 3, generator=random, dtype=torch.float64) for count in (5, 9))
    wanted, targets = torch.randint(0, 3, (5,), generator=random), torch.arange(9) % 3
    centroid, nearest = 0.0, 0.0
    for row, label in zip(found, wanted, strict=True):
        own = [k for k, target in zip(known, targets, strict=True) if target == label]
        others = own if same_class else list(known)
        centroid += float((row - sum(own) / len(own)).square().sum()) / 5
        nearest += min(float((row - k).square().sum()) for k in others) / 5
    assert distances(found, wanted, known, targets, same_class=same_class) == pytest.approx((centroid, nearest))


def test_features_are_what_the_head_gets():
    images = torch.rand(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for model in (cnn(3, 4, width=4), resnet(8, 3, 4, width=4), make_judge(3, 32, 4, 4)):
        head = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
        outputs, features = outputs_and_features(model, images, batch_size=2)
        assert torch.allclose(head(features), outputs)
        assert not any(module._forward_pre_hooks for module in model.modules())
        assert model.training  # as it was
    with pytest.raises(BadArgument, match="not call any module with parameters"):
        outputs_and_features(nn.Flatten(), images)


def test_a_judge_learns_and_resumes_after_a_stop(tmp_path):
    data = keep_labels(load("digits", flat=False), range(5, 10))
    judge = train_judge(data, 4, width=8, path=tmp_path / "judge.pt")
    assert (outputs_and_features(judge, data.test.inputs)[0].argmax(1) == data.test.targets).double().mean() > 0.9
    seen = []
    again = train_judge(data, 4, width=8, path=tmp_path / "judge.pt", progress=lambda share, what: seen.append(what))
    assert not seen  # nothing left to train
    assert all(torch.equal(a, b) for a, b in zip(judge.parameters(), again.parameters(), strict=True))
