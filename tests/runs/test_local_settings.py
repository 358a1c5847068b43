"""Local training in a configuration: the optimizer chosen for it, rounds, and the command that repeats a run."""

import json
import shlex

import pytest
import torch
from tests.configs import config_of
from tests.small import SMALL

from fedveil import Federation, load_model
from fedveil.cli import main
from fedveil.defences import Plain
from fedveil.defences.interface import LocalTraining
from fedveil.runs.build import build_defence, build_federation, choose_settings, load_data, rounds_per_epoch
from fedveil.runs.folder import is_finished, train

AVERAGE = {"optimizer": "sgd", "lr": 1.0, "momentum": 0.0}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"defence": "plain", "local_epochs": 5}, AVERAGE),
        ({"defence": "ppdl", "local_epochs": 5, "optimizer": "sgd"}, AVERAGE),
        ({"defence": "plain", "local_epochs": 5, "lr": 0.5}, AVERAGE | {"lr": 0.5}),
        ({"defence": "plain", "local_epochs": 5, "optimizer": "sgd", "momentum": 0.9}, AVERAGE | {"momentum": 0.9}),
        ({"defence": "plain", "local_epochs": 5, "optimizer": "adam"}, {"optimizer": "adam", "lr": 1e-3}),
        ({"defence": "veil", "local_epochs": 5}, {"optimizer": "adam", "lr": 1e-3}),  # as in an audit of several
        ({"defence": "plain"}, {"optimizer": "adam", "lr": 1e-3}),
    ],
)
def test_the_server_averages_models_unless_the_user_chose_otherwise(values, expected):
    assert expected.items() <= choose_settings(config_of(**values), 1438).flat().items()


def test_every_key_arrives_and_an_epoch_is_one_round():
    values = {"local_epochs": 3, "local_lr": 0.2, "local_batch": 16, "local_momentum": 0.5}
    config = config_of(**SMALL, **values)
    assert build_defence(config).local_training == LocalTraining(3, 0.2, 16, 0.5)
    data = load_data(config)
    federation = build_federation(config, data)
    assert (federation.shards.batch_size, federation.rounds_per_epoch, rounds_per_epoch(config, 30)) == (16, 1, 1)
    other = build_federation(config_of(**SMALL, local_epochs=3), data)
    assert other.shards.batch_size == SMALL["batch_size"]


def test_a_configured_run_is_fedavg_and_repeats_from_its_command(tmp_path):
    config = config_of(**SMALL, local_epochs=2, epochs=3, data="digits")
    train(config, tmp_path / "run")
    federation = build_federation(config, data := load_data(config))
    assert is_finished(config, tmp_path / "run")
    assert not is_finished(config.changed(lr=0.5), tmp_path / "run")
    assert not is_finished(config.changed(local_epochs=3), tmp_path / "run")
    parts = [federation.shards.records(client) for client in range(2)]
    model = build_federation(config, data).model
    run = Federation(
        model, parts, Plain(local_epochs=2), lambda p: torch.optim.SGD(p, 1.0), loss="cross_entropy", batch_size=15
    )
    run.fit(rounds=3)
    repeat = json.loads((tmp_path / "run" / "summary.json").read_text())["repeat"]
    assert "--optimizer sgd --lr 1.0 --momentum 0.0" in repeat
    assert main([*shlex.split(repeat)[1:], "--out", str(tmp_path / "again")]) == 0
    for folder in ("run", "again"):
        for name, value in load_model(tmp_path / folder).state_dict().items():
            assert torch.equal(value, run.model.state_dict()[name]), (folder, name)


def test_values_equal_to_the_usual_defaults_are_repeated_too(tmp_path):
    given = {"optimizer": "sgd", "lr": 1e-3, "momentum": 0.9}
    train(config_of(**SMALL, local_epochs=1, epochs=1, **given), tmp_path)
    repeat = json.loads((tmp_path / "summary.json").read_text())["repeat"]
    assert "--lr 0.001" in repeat
    assert "--momentum 0.9" in repeat
