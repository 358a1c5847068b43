"""Tiny runs like those at the paper's scale: a kill changes no result, and all defences use the same batches."""

import json
import shutil

import pytest
import torch
from benchmarks.full import __main__ as command
from benchmarks.full import distance, images, page, tasks, training
from benchmarks.full.augmented import PADDING, AugmentedImages
from benchmarks.full.tasks import Run
from tests.docs.markdown import ROOT
from torch.nn.functional import pad

from fedveil.data import Data, DataPart

TASK = tasks.ImageTask(12, 0.05, True, ("accuracy", "auc"))
KILLED = 7  # in the middle of the third epoch of four


def pictures():
    draw = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(66, 3, 8, 8, generator=draw), torch.arange(66) % 3
    parts = [DataPart(inputs[rows], targets[rows]) for rows in (slice(36), slice(36, 66))]
    return Data("tiny", *parts, classes=("a", "b", "c"))


def accounts():
    draw = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(220, 4, generator=draw), torch.rand(220, 1, generator=draw).round()
    return Data("tiny", DataPart(inputs[:160], targets[:160]), DataPart(inputs[160:], targets[160:]))


def start(run, data, dtype=torch.float64):
    if run.task == "bank":
        return training.build(run, data)
    return images.build(run, TASK, data, depth=8, dtype=dtype)


def finish(run, data, folder, on_round=()):
    """Train to the end in a new federation, as a new process does; return the values of the model."""
    federation = start(run, data)
    training.fit(run, federation, data, folder, on_round)
    return federation.model.state_dict()


def copy_disk(folder, copy, number):
    """Copy what is on disk after round `number`, as a kill at that moment would leave it."""
    return lambda record: shutil.copytree(folder, copy) if record.round == number else None


def differences(one, other):
    return max(float((value.double() - other[name].double()).abs().max()) for name, value in one.items())


@pytest.mark.parametrize("defence", tasks.DEFENCES)
def test_a_killed_run_on_images_ends_as_one_that_was_not(tmp_path, defence):
    run, data, whole, half = Run("cifar10", 3, defence, 4), pictures(), tmp_path / "whole", tmp_path / "half"
    expected = finish(run, data, whole, [copy_disk(whole, half, KILLED)])
    found = finish(run, data, half)
    if defence == "veil":  # new secrets: equal up to the promise of recovery in float64
        assert differences(found, expected) < 1e-9
    else:
        assert differences(found, expected) == 0.0
    assert [line["epoch"] for line in page.read_evaluations(half)] == [1, 2, 3, 4]


@pytest.mark.parametrize("defence", ["plain", "rounding"])
def test_a_killed_run_on_bank_ends_as_one_that_was_not(tmp_path, defence):
    run, data, whole, half = Run("bank", 5, defence, 200, layers=3), accounts(), tmp_path / "whole", tmp_path / "half"
    expected = finish(run, data, whole, [copy_disk(whole, half, 25)])
    assert differences(finish(run, data, half), expected) == 0.0


def test_veil_and_rounding_baseline_train_on_the_same_augmented_batches_as_plain(tmp_path):
    ends = [finish(Run("cifar10", 3, name, 2), pictures(), tmp_path / name) for name in tasks.DEFENCES]
    assert all(differences(ends[0], other) < 1e-9 for other in ends[1:])
    assert differences(ends[0], start(Run("cifar10", 3, "plain", 2), pictures()).model.state_dict()) > 1e-3


def test_the_rounding_baseline_differs_from_plain_by_rounding():
    runs = [start(Run("cifar10", 3, name, 2), pictures(), torch.float32) for name in ("plain", "rounding")]
    plain, other = (run.step().gradients for run in runs)
    assert any(not torch.equal(plain[name], other[name]) for name in plain)


def test_an_augmented_image_is_a_crop_or_its_mirror_and_depends_on_client_and_round_only():
    data = pictures().train
    own, twin, stranger = (AugmentedImages(data.tensor, data.targets, 0, client) for client in (1, 1, 2))
    rows = list(range(36))
    first = torch.stack([image for image, _ in own.__getitems__(rows)])
    twin.__getitems__([3])  # reading other records in between changes nothing
    assert all(torch.equal(image, first[row]) for row, (image, _) in enumerate(twin.__getitems__(rows)))
    padded = pad(data.tensor, (PADDING,) * 4)
    for image, wide in zip(first, padded, strict=True):
        crops = wide.unfold(1, 8, 1).unfold(2, 8, 1).permute(1, 2, 0, 3, 4).reshape(-1, 3, 8, 8)
        assert torch.cat([crops, crops.flip(-1)]).eq(image).flatten(1).all(1).any()
    own.current_round = lambda: 1
    for others in (own, stranger):
        assert not torch.equal(first, torch.stack([image for image, _ in others.__getitems__(rows)]))


def test_class_weights_have_a_mean_of_one_over_the_records():
    targets = torch.tensor([0, 0, 0, 1, 2, 2])
    weights = torch.tensor(images.class_weights(targets, 3))
    assert torch.allclose(weights[targets].mean(), torch.tensor(1.0))
    assert torch.allclose(weights * targets.bincount(), torch.tensor(2.0))


def test_the_command_trains_skips_what_is_complete_and_the_page_shows_only_complete_runs(tmp_path, monkeypatch, capsys):
    runs = tuple(Run("bank", 5, defence, 200, layers=3) for defence in tasks.DEFENCES)
    for module in (command, page):
        monkeypatch.setattr(module, "RUNS", runs)
    monkeypatch.setattr(training, "load", lambda name: accounts())
    where = ["--folder", str(tmp_path / "runs")]
    assert command.main(["bank-l3-k5-plain-0", "bank-l3-k5-veil", *where]) == 0
    assert command.main(["bank-l3-k5-plain", *where]) == 0
    assert "bank-l3-k5-plain-0 is complete" in capsys.readouterr().out
    page.main([*where, "--out", str(tmp_path / "out")])
    assert "| 3 | 5 | 0 | not complete |" in (tmp_path / "out" / "bank.md").read_text()
    command.main(["bank", *where])
    page.main([*where, "--out", str(tmp_path / "out")])
    found = json.loads((tmp_path / "out" / "results.json").read_text())["runs"]
    values = [found[run.name]["curve"][-1][1] for run in runs]
    assert (
        "| 3 | 5 | 1 | " + " | ".join(f"{value:.5f}" for value in values) in (tmp_path / "out" / "bank.md").read_text()
    )
    with pytest.raises(SystemExit, match="no run is called bank-l4"):
        command.main(["bank-l4", *where])


def test_every_run_has_its_own_name_and_every_bank_run_is_in_the_papers_table():
    assert len({run.name for run in tasks.RUNS}) == len(tasks.RUNS)
    for run in tasks.RUNS:
        if run.task == "bank" and run.seed == 0:
            assert training.bank.paper_config(run).training.batch_size == 32


def test_tables_and_curves_show_complete_runs_and_how_far_the_others_are():
    whole = {"epochs": 24, "done": 24, "columns": ["epoch", "accuracy", "loss"], "cpu_hours": 1.25}
    runs = {"cifar10-k5-plain-0": {**whole, "curve": [[23, 0.5, 2.0], [24, 0.875, 0.5]]}}
    results = {"made": "torch", "runs": {**runs, "cifar10-k5-veil-0": {"epochs": 24, "done": 3}}}
    text = page.write_tables(results)
    assert "| 5 | plain | 24 | 87.50 | 0.5000 | 1.2 |" in text
    assert "| 5 | veil | 24 | not complete: epoch 3 of 24 |  |  |" in text
    (chart,) = page.curves(results)
    assert chart.series == {"plain": [(23.0, 50.0), (24.0, 87.5)]}
    assert page.make_page(results).verdict.startswith(f"1 of {len(tasks.RUNS)} runs")


def test_the_committed_tables_are_those_of_the_committed_results():
    home = ROOT / "results" / "full"
    results = json.loads((home / "results.json").read_text())
    assert (home / "tables.md").read_text() == page.write_tables(results)
    assert (home / "bank.md").read_text() == page.write_bank(results)


def test_distances_continue_after_a_kill_between_two_checkpoints(tmp_path):
    data, made = pictures(), []

    def make(name):
        made.append(start(Run("cifar10", 3, name, 4), data))
        return made[-1]

    whole = distance.measure(make, tmp_path / "whole", 5)
    distance.measure(make, tmp_path / "half", 2)
    made[-1].step()
    made[-1].save(tmp_path / "half" / "rounding")  # a kill that came after one of three checkpoints
    found = distance.measure(make, tmp_path / "half", 5)
    assert list(found) == list(whole) == [1, 2, 3, 4, 5]
    assert [own["rounding"] for own in found.values()] == [own["rounding"] for own in whole.values()]
    assert all(0 < own["veil"] < distance.BOUND for own in found.values())
    assert distance.exceeded({1: {"veil": 1e-15, "rounding": 1e-15}, 21: {"veil": 1.0, "rounding": 0.5}}) == []
    assert distance.exceeded({1: {"veil": 1e-9, "rounding": 1.0}, 2: {"veil": 4e-15, "rounding": 1e-15}}) == [1, 2]
