"""What the attacker is given, and what only the experimenter knows."""

import pytest
import torch
from tests.configs import config_of

from fedveil.errors import BadArgument
from fedveil.runs.folder import is_finished, open_run
from fedveil.studies.compare import DEFENCES
from fedveil.studies.federations import load_or_train, measure_quality
from fedveil.studies.observation import observe


def silent(share, what):
    pass


@pytest.fixture(params=DEFENCES)
def config(request):
    return config_of(data="digits", train_size=200, clients=2, hidden=16, epochs=2, defence=request.param, fuse=False)


def test_an_attacker_observes_what_travelled_and_its_own_records(config, tmp_path):
    federation, data = load_or_train(config, tmp_path, silent)
    quality = measure_quality(federation, data)
    assert 0 <= quality.test <= 1
    assert quality.metric == "accuracy"
    assert quality.gap == quality.train - quality.test
    before = federation.round
    observed = observe(federation, rounds=3)
    assert federation.round == before + 2
    assert len(observed.rounds) == 3
    assert observed.model is observed.rounds[-1].model
    assert observed.rounds[-1].upload is None
    assert all(seen.upload is not None and len(seen.rows) == 32 for seen in observed.rounds[:-1])
    size = federation.shards.sizes[0]
    assert torch.equal(observed.inputs, federation.shards.inputs[:size])
    first, last = (dict(observed.rounds[k].model.named_parameters()) for k in (0, 2))
    assert any(not torch.equal(first[name], last[name]) for name in first)  # each round's is its own


def test_a_run_is_opened_as_it_was_left_and_not_trained_twice(tmp_path):
    config = config_of(data="digits", train_size=200, clients=2, hidden=16, epochs=2, defence="plain")
    assert not is_finished(config, tmp_path)
    federation, _ = load_or_train(config, tmp_path, silent)
    assert is_finished(config, tmp_path)
    assert not is_finished(config.changed(epochs=3), tmp_path)
    written = (tmp_path / "checkpoint.pt").stat().st_mtime_ns
    again, _ = load_or_train(config, tmp_path, silent)
    assert (tmp_path / "checkpoint.pt").stat().st_mtime_ns == written
    for name, value in federation.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name])
    with pytest.raises(BadArgument, match="holds no run"):
        open_run(tmp_path / "nothing")
