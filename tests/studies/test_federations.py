"""Federations of studies, and what an attacker observes of them."""

import copy

import pytest
import torch
from tests.configs import config_of
from tests.oracle import worst

from fedveil.attacks.leaked_gradients import mean_gradients
from fedveil.defences.registry import BUILT_IN
from fedveil.studies.basis import Basis
from fedveil.studies.federations import load_or_train, measure_quality, observe

CONFIG = config_of(data="digits", train_size=200, clients=2, hidden=16, epochs=2, defence="plain", fuse=False)
DEFENCES = tuple(record.name for record in BUILT_IN)


def silent(fraction, what):
    pass


@pytest.mark.parametrize("defence", DEFENCES)
def test_an_attacker_observes_what_travelled_and_a_finished_run_is_not_trained_again(defence, tmp_path):
    config = CONFIG.changed(defence=defence)
    federation, data = load_or_train(config, tmp_path, silent, Basis())
    written = (tmp_path / "checkpoint.pt").stat().st_mtime_ns
    again, _ = load_or_train(config, tmp_path, silent, Basis())
    assert (tmp_path / "checkpoint.pt").stat().st_mtime_ns == written
    for name, value in federation.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name])
    quality = measure_quality(federation, data)
    assert (quality.metric, quality.gap) == ("accuracy", quality.train - quality.test)
    before = federation.round
    observed = observe(federation, rounds=3)
    assert (federation.round, len(observed.rounds)) == (before + 2, 3)
    assert observed.model is observed.rounds[-1].model
    assert observed.rounds[-1].upload is None
    assert all(seen.upload is not None and len(seen.rows) == 32 for seen in observed.rounds[:-1])
    assert torch.equal(observed.inputs, federation.shards.inputs[: federation.shards.sizes[0]])
    first, last = (dict(observed.rounds[k].model.named_parameters()) for k in (0, 2))
    assert any(not torch.equal(first[name], last[name]) for name in first)  # rounds do not share a model


def test_of_local_training_an_attacker_observes_the_difference_and_every_step(tmp_path):
    config = CONFIG.changed(local_epochs=2, local_lr=0.5, local_batch=30)
    federation, _ = load_or_train(config, tmp_path, silent, Basis())
    own, last = observe(federation, rounds=2).rounds
    assert own.local == federation.defence.local_training
    assert own.reach == 0.5 * len(own.steps) == 0.5 * 2 * 4  # 100 records, a last batch of 10
    assert sorted(torch.cat(own.steps).tolist()) == sorted(2 * list(range(100)))
    assert torch.equal(own.rows, torch.arange(100))
    model, inputs, targets = copy.deepcopy(own.model), *federation.shards.records(0)
    for rows in own.steps:
        gradients = mean_gradients(model, federation.loss, inputs[rows], targets[rows])
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= 0.5 * gradients[name]
    after = model.state_dict()
    moved = {name: p.detach() - after[name] for name, p in own.model.named_parameters()}
    assert worst(own.upload.gradients, moved) < 1e-4  # float32: eps of a weight over a difference 1000 times smaller
    assert (last.local, last.steps, last.reach) == (None, (), 1.0)  # the attacker has not answered
