"""`fedveil data`, and `fedveil train` on data as users have them, in process, on what it prints and writes."""

import json
import shlex

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from tests.data.making import picture, write_folder
from torch.utils.data import DataLoader, TensorDataset

from fedveil.cli import main
from fedveil.cli.training import TrainCommand
from fedveil.runs.build import load_data
from fedveil.runs.choices import format_command
from fedveil.runs.config import configure, format_flags
from fedveil.runs.folder import open_run, read_config

HERE = "tests.cli.test_own_data"


def test_data_sets_are_listed_with_their_state(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path))
    assert main(["data", "list"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["digits"].split()[1] == "embedded"
    assert lines["bank"].split()[1] == "missing"


def test_what_cannot_be_downloaded_says_where_to_get_it(capsys, tmp_path):
    assert main(["data", "get", "lesion", "--to", str(tmp_path)]) == 2
    assert "lesion" in capsys.readouterr().err


def test_a_download_without_a_name_is_refused(capsys):
    assert main(["data", "get"]) == 2
    assert "no data set is named" in capsys.readouterr().err


@pytest.fixture
def houses(tmp_path, monkeypatch):
    """houses.csv, where the command runs: prices from sizes and regions, with some cells missing."""
    monkeypatch.chdir(tmp_path)
    rows = ["id;size in m2;zip;region;label;price"]
    for n in range(60):
        size = "NA" if n % 20 == 7 else f"{50 + n},5"
        rows.append(f"{n};{size};{10115 + n % 3};{('north', 'south', 'unknown')[n % 3]};{n % 2};{100 + 2 * n},25")
    (tmp_path / "houses.csv").write_text("\n".join(rows))
    return tmp_path


FLAGS = ["--data", "csv", "--path", "houses.csv", "--target", "price", "--decimal", ","]
TABLE = [*FLAGS, "--ignore", "id", "label", "--categorical", "zip", "--missing", "impute", "--test-share", "0.25"]
QUICK = ["--defence", "plain", "--epochs", "2", "--clients", "2", "--hidden", "8"]


def train(capsys, *words):
    assert main(["train", *words, *QUICK, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def outputs(folder):
    return list(load_file(folder / "model.safetensors").values())[-1].shape[0]


def test_a_numeric_target_trains_one_output_and_not_a_class_per_value(houses, capsys):
    (houses / "plain.csv").write_text("x,y\n" + "\n".join(f"{n},{n}.5" for n in range(60)))
    summary = train(capsys, "--data", "csv", "--path", "plain.csv", "--target", "y", "--out", "run")
    assert "mse" in summary
    assert "accuracy" not in summary
    assert outputs(houses / "run") == 1


def test_a_numeric_target_is_classes_where_that_is_asked(houses, capsys):
    flags = ["--data", "csv", "--path", "houses.csv", "--target", "label", "--ignore", "size in m2", "price"]
    assert "accuracy" in train(capsys, *flags, "--task", "classification", "--out", "run")
    assert outputs(houses / "run") == 2


def test_a_run_on_a_csv_file_is_loaded_again_and_repeats(houses, capsys):
    summary = train(capsys, *TABLE, "--out", "run")
    config = read_config(houses / "run")
    assert (config.data.ignore, config.data.categorical) == (("id", "label"), ("zip",))
    assert (config.data.missing, config.data.decimal, config.data.test_share) == ("impute", ",", 0.25)
    data = load_data(config)
    assert (len(data.train.targets), len(data.test.targets), data.train.inputs.shape[1]) == (45, 15, 1 + 3 + 3)
    assert "filled in 3 missing cells (size in m2: 3 with the median" in " ".join(data.notes)
    _, federation = open_run(houses / "run")
    assert federation.round == summary["rounds"]
    words = shlex.split(summary["repeat"])[2:]
    at = words.index("--out") if "--out" in words else len(words)
    again = [*words[:at], *words[at + 2 :], "--out", "again", "--json"]
    assert main(["train", *again]) == 0
    assert json.loads(capsys.readouterr().out)["mse"] == summary["mse"]
    assert read_config(houses / "again") == config


def test_flags_toml_and_a_pasted_command_mean_the_same(houses):
    (houses / "run.toml").write_text("""
[data]
data = "csv"
path = "houses.csv"
target = "price"
decimal = ","
delimiter = ";"
ignore = ["id", "size in m2"]
categorical = ["zip"]
missing = "drop"
test_share = 0.25
""")
    words = ["--ignore", "id", "size in m2", "--categorical", "zip", "--missing", "drop", "--test-share", "0.25"]
    from_flags = TrainCommand.parse("fedveil train", [*FLAGS, "--delimiter", ";", *words]).config
    from_file = TrainCommand.parse("fedveil train", ["run.toml"]).config
    assert from_flags == from_file
    assert from_flags.data.ignore == ("id", "size in m2")
    command = format_command(from_flags)
    assert "--ignore id 'size in m2' --categorical zip" in command
    assert "--delimiter ';'" in command
    assert TrainCommand.parse("fedveil train", shlex.split(command)).config == from_flags
    assert configure(json.loads(json.dumps(from_flags.to_sections()))) == from_flags
    overridden = TrainCommand.parse("fedveil train", ["run.toml", "--ignore", "label"]).config
    assert overridden.data.ignore == ("label",)


def test_odd_names_of_columns_survive_the_shell():
    names = ("a b", "it's", "$HOME", 'say "x"', "grün", "*", ";")
    assert shlex.split(format_flags({"ignore": names})) == ["--ignore", *names]


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        ([], ["it needs a path", "--path records.csv"]),
        (["--path", "gone.csv"], ["gone.csv: there is no such file", "--path"]),
        (["--path", "."], [".: it is a folder, not a CSV file", "name one of its files with --path: houses.csv"]),
        (
            ["--path", "houses.csv"],
            ["it needs the column to predict", "with one of id, size in m2, zip, region, label, price"],
        ),
        (FLAGS[2:], ["houses.csv, line 9, column 'size in m2': 'NA' means missing", "3 in 1 column", "--missing drop"]),
        ([*FLAGS[2:6]], ["line 2, column 'size in m2': '50,5' is not a number", "--decimal ,"]),
        ([*FLAGS[2:], "--delimiter", "|"], ["only one column", "--delimiter ';'"]),
        ([*FLAGS[2:], "--ignore", "price"], ["'price' is both the target and in ignore"]),
        ([*FLAGS[2:], "--ignore", "idd"], ["there is no column 'idd'", "'id' is the nearest"]),
        (
            [*FLAGS[2:], "--target", "region", "--task", "regression"],
            ["'north' is not a number", "--task classification"],
        ),
        ([*FLAGS[2:], "--test-share", "1.5"], ["--test-share", "less than 1"]),
    ],
)
def test_what_is_wrong_with_a_csv_file_is_said_with_the_flag_that_mends_it(words, texts, houses, capsys):
    assert main(["train", "--data", "csv", *words]) == 2
    error = capsys.readouterr().err
    assert all(text in error for text in texts), error


def test_a_flag_for_tables_is_refused_by_other_data(capsys, tmp_path):
    assert main(["train", "--data", "digits", "--ignore", "x", "--out", str(tmp_path / "run")]) == 2
    assert "--ignore does not apply to --data digits" in capsys.readouterr().err


def test_images_in_folders_of_classes_alone_are_trained_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FEDVEIL_CACHE", str(tmp_path / "cache"))
    files = {f"{label}/{n}.png": picture((n, 100 * (label == "cat"), 0)) for label in ("cat", "dog") for n in range(10)}
    words = ["--data", "images", "--path", str(write_folder(tmp_path / "pets", files)), "--size", "8"]
    assert "accuracy" in train(capsys, *words, "--test-share", "0.3", "--out", str(tmp_path / "run"))
    data = load_data(read_config(tmp_path / "run"))
    assert (data.train.targets.bincount().tolist(), data.test.targets.bincount().tolist()) == ([7, 7], [3, 3])


def numbers(records, seed):
    x = np.random.default_rng(seed).normal(size=(records, 3))
    return x, (x[:, 0] > 0).astype(np.int64)


def arrays():
    return numbers(60, 0), numbers(40, 1)


def frames():
    return [(pd.DataFrame(x, columns=["a", "b", "c"]), pd.Series(y)) for x, y in arrays()]


def loaders():
    return tuple(DataLoader(TensorDataset(*map(torch.from_numpy, part)), 8, shuffle=True) for part in arrays())


def mixed():
    return arrays()[0], loaders()[1].dataset


def apart():
    (x, y), (u, v) = arrays()
    return x, u, y, v


@pytest.mark.parametrize("spec", ["frames", "loaders", "mixed"])
def test_own_data_may_have_any_form(spec, tmp_path, capsys):
    wanted = train(capsys, "--data", f"{HERE}:arrays", "--out", str(tmp_path / "wanted"))
    found = train(capsys, "--data", f"{HERE}:{spec}", "--out", str(tmp_path / "found"))
    assert found["accuracy"] == wanted["accuracy"]
    weights = [load_file(tmp_path / run / "model.safetensors") for run in ("wanted", "found")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_four_arrays_are_told_how_to_be_returned(tmp_path, capsys):
    assert main(["train", "--data", f"{HERE}:apart", "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "gave tuple of 4, not data" in error
    assert "return (train, test), each (inputs, targets), a Dataset or a DataLoader" in error
