"""Settings that are chosen for differential privacy."""

import json
import math
import shlex

import pytest
import torch
from tests.configs import config_of

from fedveil import Federation, Privacy, load_model
from fedveil.cli import main
from fedveil.errors import BadArgument
from fedveil.privacy.defaults import default_rate, default_rounds
from fedveil.runs.build import build_federation, choose_settings, load_data
from fedveil.runs.choices import applicable_values
from fedveil.runs.folder import is_finished, train
from fedveil.runs.settings import PRIVACY_KEYS, configure, read_file


def chosen(records=1438, **values):
    flat = choose_settings(config_of(**values), records).flat()
    return {key: flat[key] for key in PRIVACY_KEYS}


def test_settings_follow_from_the_number_of_records_alone():
    small = {"rate": 0.5, "epochs": 75, "clip": 2.0, "lr": 0.02, "layers": 1, "norm": "group"}
    large = {"rate": 0.031, "epochs": 18, "lr": 0.0051}
    assert small.items() <= chosen(epsilon=3.0).items()
    assert large.items() <= chosen(32950, epsilon=1.0).items()
    rounds = [chosen(10**power, noise=1.0)["epochs"] * math.ceil(1 / default_rate(10**power)) for power in range(2, 9)]
    assert rounds[0] == 150
    assert rounds[:4] == sorted(rounds[:4])
    assert config_of().flat() == choose_settings(config_of(), 1438).flat()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"epochs": 20}, {"epochs": 20, "rate": 0.5, "lr": 0.075}),
        ({"rate": 0.1}, {"rate": 0.1, "epochs": 30, "lr": 0.01}),
        ({"batch_size": 32, "clients": 4}, {"rate": 32 / 360, "epochs": 28}),
        ({"whole_shard": True}, {"rate": 1.0, "epochs": 150}),
        ({"lr": 0.001, "layers": 3, "clip": 1.0}, {"lr": 0.001, "layers": 3, "clip": 1.0, "epochs": 75}),
        ({"optimizer": "sgd"}, {"lr": 0.001}),
        ({"norm": "batch", "schedule": "constant"}, {"norm": "batch", "schedule": "constant"}),
        ({"unit": "client"}, {"epochs": 20, "lr": 0.001, "layers": 3, "rate": None, "norm": "group"}),
    ],
)
def test_what_the_user_chose_is_kept_even_if_it_is_the_usual_default(values, expected):
    assert expected.items() <= chosen(**values, epsilon=3.0).items()


def test_a_file_and_flags_count_as_given_and_a_changed_copy_remembers_them(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[training]\nlr = 0.001\n[privacy]\nepsilon = 3.0\n")
    config = configure(read_file(path)).changed(seed=4)
    assert config.explicit_values() == {"lr": 0.001, "epsilon": 3.0, "seed": 4}
    assert choose_settings(config, 1438).training.lr == 0.001


def test_train_learns_at_epsilon_3_by_itself_and_repeats_from_its_files(tmp_path, capsys):
    command = ["train", "--epsilon", "3", "--out", str(tmp_path / "run"), "--json"]
    assert main(command) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["accuracy"] > 0.8  # three runs had 0.905 to 0.919
    assert found["epsilon"] <= 3
    assert "chosen for privacy, given the number of records: --layers 1 --multiplicative 1.0 --lr 0.02" in printed.err
    again = choose_settings(config_of(epsilon=3.0, loss="cross_entropy"), 1438)
    assert applicable_values(configure(read_file(tmp_path / "run" / "config.json"))) == applicable_values(again)
    assert is_finished(config_of(epsilon=3.0), tmp_path / "run")
    assert not is_finished(config_of(epsilon=3.0, lr=0.001), tmp_path / "run")
    words = shlex.split(found["repeat"])
    assert words[words.index("--clip") :][:2] == ["--clip", "2.0"]
    assert main([*command, "--resume"]) == 0
    assert "chosen for privacy" not in capsys.readouterr().err


def test_factors_are_1_with_privacy_per_record_and_others_are_refused(tmp_path, capsys):
    small = {"train_size": 60, "test_size": 20, "clients": 2, "hidden": 8, "epochs": 1, "rate": 0.5, "epsilon": 3.0}
    summary = train(config_of(**small), tmp_path)
    assert configure(read_file(tmp_path / "config.json")).defence.multiplicative == 1
    assert "<dt>multiplicative</dt><dd>1.0</dd>" in (tmp_path / "report.html").read_text()
    assert "--multiplicative 1.0" in summary.repeat
    assert summary.coverage["scaled"] == pytest.approx((8 * 10 + 10) / (64 * 8 + 8 + 8 * 10 + 10))  # the last layer
    assert train(config_of(**small), tmp_path, resume=True).rounds == summary.rounds
    capsys.readouterr()
    assert main(["train", "--multiplicative", "4", "--epsilon", "3", "--out", str(tmp_path / "refused")]) == 2
    assert "Fix: leave multiplicative out" in capsys.readouterr().err
    config_of(multiplicative=4.0, epsilon=3.0, defence="plain")
    assert config_of(multiplicative=2.0, noise=1.0, unit="client").defence.multiplicative == 2


def test_resnets_get_group_norm_and_can_be_loaded_again(tmp_path):
    small = {"model": "resnet8", "width": 4, "train_size": 40, "test_size": 9, "clients": 2, "epochs": 1}
    train(config_of(**small, epsilon=3.0), tmp_path / "run")
    kinds = {type(module) for module in load_model(tmp_path / "run").modules()}
    assert torch.nn.GroupNorm in kinds
    assert torch.nn.BatchNorm2d not in kinds
    with pytest.raises(BadArgument, match="BatchNorm"):
        train(config_of(**small, epsilon=3.0, norm="batch"), tmp_path / "other")


def test_a_schedule_lasts_for_the_rounds_of_a_private_run():
    config = config_of(epsilon=3.0)
    assert build_federation(config, load_data(config)).schedule.T_max == 150


def test_a_federation_plans_rounds_for_an_epsilon_and_fit_trains_for_them():
    data = torch.randn(40, 3), torch.randint(2, (40,))
    own = Federation(torch.nn.Linear(3, 2), [data, data], "plain", privacy=Privacy(epsilon=3.0))
    assert (own.defence.sampling_rate, own.defence.planned_rounds) == (0.5, default_rounds(0.5))
    assert len(own.fit().records) == 150
    by_size = Federation(torch.nn.Linear(3, 2), [data, data], "plain", batch_size=4, privacy=Privacy(epsilon=3.0))
    assert (by_size.defence.sampling_rate, by_size.defence.planned_rounds) == (0.1, 300)
    with pytest.raises(BadArgument, match="depends on the number of rounds"):
        Privacy(epsilon=3.0, unit="client")


def test_with_privacy_inputs_are_scaled_by_constants_whatever_the_records_are():
    usual, private = (load_data(config_of(data="diabetes", **own)) for own in ({}, {"epsilon": 3.0}))
    assert private.target_scale == (150.0, 75.0)
    assert not torch.equal(usual.train.inputs, private.train.inputs)
    assert private.train.inputs.std(0).sub(1).abs().max() < 0.3
    assert "constants" in private.notes[-1]
    accepted = load_data(config_of(data="diabetes", epsilon=3.0, scaling="records"))
    assert torch.equal(usual.train.inputs, accepted.train.inputs)
    assert "epsilon does not cover" in accepted.notes[-1]


def test_a_csv_file_with_privacy_is_refused_unless_its_statistics_are_accepted(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("x,y\n" + "".join(f"{row * 0.5},{row % 2}\n" for row in range(30)))
    own = {"data": "csv", "path": str(path), "target": "y"}
    with pytest.raises(BadArgument, match="which epsilon does not cover"):
        load_data(config_of(**own, epsilon=3.0))
    with pytest.raises(BadArgument, match="no public constants"):
        load_data(config_of(**own, scaling="public"))
    assert "epsilon does not cover" in load_data(config_of(**own, epsilon=3.0, scaling="records")).notes[-1]
    assert len(load_data(config_of(**own)).train.targets) == 24
