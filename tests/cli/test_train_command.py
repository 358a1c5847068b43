"""`fedveil train`, on data as users have them: what it prints and writes, how it is stopped and resumed."""

import errno
import json
import os
import shlex
import signal

import pytest
import torch
from safetensors.torch import load_file
from tests.cli.test_inspection import Both
from tests.configs import config_of
from tests.small import SMALL
from torch import nn

import fedveil.runs.folder
from fedveil.cli import main
from fedveil.cli.training import TrainCommand
from fedveil.data import from_records
from fedveil.defences.plain import PlainRound
from fedveil.federation import checkpoint
from fedveil.federation.status import read_status
from fedveil.runs.build import load_data
from fedveil.runs.choices import format_command
from fedveil.runs.folder import open_run, read_config
from fedveil.runs.settings import configure, format_flags

HERE = "tests.cli.test_train_command"
QUICK = ["--defence", "plain", "--epochs", "2", "--clients", "2", "--hidden", "8"]


def train(capsys, *words):
    assert main(["train", *words, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_data_sets_are_listed_and_downloaded_where_they_can(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path))
    assert main(["data", "list"]) == 0
    states = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert {("digits", "embedded"), ("bank", "missing")} <= set(map(tuple, states))
    assert main(["data", "get", "lesion", "--to", str(tmp_path)]) == 2
    assert "'lesion' cannot be downloaded automatically" in capsys.readouterr().err


@pytest.fixture
def houses(tmp_path, monkeypatch):
    """houses.csv, where the command runs: prices from sizes and regions, with some cells missing."""
    monkeypatch.chdir(tmp_path)
    rows = ["id;size in m2;zip;region;label;stars;price"]
    for n in range(60):
        size, region = "NA" if n % 20 == 7 else f"{50 + n},5", ("north", "south", "unknown")[n % 3]
        rows.append(f"{n};{size};{10115 + n % 3};{region};{n % 2};{1 + n % 5};{100 + 2 * n},25")
    (tmp_path / "houses.csv").write_text("\n".join(rows))
    return tmp_path


FLAGS = ["--data", "csv", "--path", "houses.csv", "--target", "price", "--decimal", ","]
TABLE = [*FLAGS, "--ignore", "id", "label", "--categorical", "zip", "--missing", "impute", "--test-share", "0.25"]


@pytest.mark.parametrize(
    ("words", "metric", "outputs", "note"),
    [
        ([], "mse", 1, "regression, because the target 'price' has numbers"),
        (["--target", "stars", "--task", "classification"], "accuracy", 5, "filled in"),
        (["--target", "label", "--ignore", "id"], "accuracy", 2, "two classes, because the target 'label' has only"),
    ],
)
def test_a_column_is_trained_as_classes_or_as_numbers_with_a_note(words, metric, outputs, note, houses, capsys):
    assert main(["train", *FLAGS, "--missing", "impute", *words, *QUICK, "--out", "run", "--json"]) == 0
    out, err = capsys.readouterr()
    assert note in err
    assert metric in json.loads(out)
    assert list(load_file("run/model.safetensors").values())[-1].shape[0] == outputs


def test_a_run_on_a_csv_file_is_loaded_again_and_repeats(houses, capsys):
    summary = train(capsys, *TABLE, *QUICK, "--out", "run")
    config = read_config(houses / "run")
    assert (config.data.ignore, config.data.categorical) == (("id", "label"), ("zip",))
    data = load_data(config)
    assert (len(data.train.targets), len(data.test.targets), data.train.inputs.shape[1]) == (45, 15, 1 + 3 + 3 + 1)
    _, federation = open_run(houses / "run")
    assert federation.round == summary["rounds"]
    again = train(capsys, *shlex.split(summary["repeat"])[2:], "--out", "again")
    assert again["mse"] == summary["mse"]
    assert read_config(houses / "again") == config


def test_flags_toml_and_a_pasted_command_mean_the_same(houses):
    text = 'path = "houses.csv"\ntarget = "price"\ndecimal = ","\nignore = ["id", "size in m2"]\nmissing = "drop"\n'
    (houses / "run.toml").write_text(f'[data]\ndata = "csv"\n{text}categorical = ["zip"]\n')

    def parse(*words):
        return TrainCommand.parse("fedveil train", words).config

    from_flags = parse(*FLAGS, "--ignore", "id", "size in m2", "--categorical", "zip", "--missing", "drop")
    assert from_flags == parse("run.toml")
    command = format_command(from_flags)
    assert "--ignore id 'size in m2' --categorical zip" in command
    assert parse(*shlex.split(command)) == from_flags
    assert configure(json.loads(json.dumps(from_flags.model_dump()))) == from_flags
    assert parse("run.toml", "--ignore", "label").data.ignore == ("label",)
    names = ("a b", "it's", "$HOME", 'say "x"', "grün", "*", ";")
    assert shlex.split(format_flags({"ignore": names})) == ["--ignore", *names]


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["--data", "csv"], ["the data set needs a path", "--path records.csv"]),
        (
            FLAGS[:4],
            ["the column to predict is not specified", "with one of id, size in m2, zip, region, label, stars, price"],
        ),
        (FLAGS, ["houses.csv, line 9, column 'size in m2': 'NA' counts as missing", "3 in 1 column", "--missing drop"]),
        ([*TABLE, "--loss", "cross_entropy"], ["cross_entropy compares classes, but the model has one output"]),
        ([*TABLE, "--label-smoothing", "0.1"], ["label_smoothing does not apply to squared_error", "leave it out"]),
        ([*TABLE, "--target", "region", "--loss", "binary_cross_entropy"], ["has one class", "--loss cross_entropy"]),
        (["--data", f"{HERE}:part"], ["expected records and their targets, got a dict"]),
        (["--data", f"{HERE}:pairs"], ["mlp takes one floating-point tensor"]),
        (
            ["--data", f"{HERE}:apart"],
            ["expected data, got tuple", "return (train, test) or (train, test, validation)"],
        ),
        (["--data", f"{HERE}:floats"], ["could be classes or quantities", "int64", "--loss squ"]),
    ],
)
def test_a_mistake_in_the_data_is_reported_with_its_fix_before_a_folder_is_made(words, texts, houses, capsys):
    assert main(["train", *words]) == 2
    error = capsys.readouterr().err
    assert all(text in error for text in texts), error
    assert not (houses / "runs").exists()


def masks():
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 1))


def part(records=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 9, (records, 5), generator=generator)
    numbers = torch.randn(records, 3, generator=generator)
    return {"ids": ids, "numbers": numbers}, (numbers[:, 0] > 0).long()


def pairs():
    return part(), part(20, 1)


def apart():
    return *part(), *part(20, 1)


def floats():
    return [(inputs["numbers"], targets.float()) for inputs, targets in pairs()]


NAMED = from_records("named", *(((x["ids"], x["numbers"]), y) for x, y in pairs()), classes=["low", "high"])


def pictures():
    found = []
    for records, seed in ((30, 0), (10, 1)):
        pixels = torch.randn(records, 1, 4, 5, generator=torch.Generator().manual_seed(seed))
        found.append((pixels, (pixels[:, 0] > 0).long()))
    return found


def broken():
    raise TypeError("inside the factory")


LONGER = ["--defence", "plain", "--epochs", "8", "--lr", "0.05", "--batch-size", "8", "--clients", "2"]


@pytest.mark.parametrize("spec", ["pairs", "NAMED"])
def test_data_of_several_tensors_trains_a_model_that_takes_it_and_is_resumed(spec, tmp_path, capsys):
    words = ["--data", f"{HERE}:{spec}", "--model", f"{HERE}:Both", *LONGER, "--out", str(tmp_path)]
    summary = train(capsys, *words)
    assert summary["accuracy"] > 0.75
    assert f"--data {HERE}:{spec} " in summary["repeat"]
    model = Both()
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    inputs, targets = part(20, 1)
    right = (model(**inputs).argmax(1) == targets).double().mean()
    assert summary["accuracy"] == pytest.approx(float(right))
    assert train(capsys, *words, "--epochs", "9", "--resume")["rounds"] == 9 * 3


def test_a_class_at_each_pixel_is_trained_and_an_attack_takes_one_tensor_only(tmp_path, capsys):
    words = ["--data", f"{HERE}:pictures", "--model", f"{HERE}:masks", *LONGER, "--out", str(tmp_path / "run")]
    assert train(capsys, *words)["accuracy"] > 0.8
    assert "Predictions on the test data" in (tmp_path / "run" / "report.html").read_text()
    with pytest.raises(TypeError, match="inside the factory"):  # an error of the user's own code
        main(["train", "--data", f"{HERE}:broken", "--out", str(tmp_path / "run")])
    words = ["attack", "membership", "--data", f"{HERE}:pairs", "--model", f"{HERE}:Both", "--clients", "2"]
    assert main([*words, "--defence", "plain", "--epochs", "1", "--out", str(tmp_path / "a")]) == 2
    assert "expected each record to be a single tensor" in capsys.readouterr().err


STOPPED = shlex.split(format_flags({**SMALL, "data": "digits", "epochs": 4, "layers": 2}))
PER_EPOCH = 2  # rounds


@pytest.fixture
def harmless():
    """A SIGTERM that nobody waits for fails a test, and does not end all of them."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    yield
    signal.signal(signal.SIGTERM, before)


def stop(monkeypatch, words, number, *signals):
    """Train, and send this process signals in a round."""
    left, real = [number], PlainRound.recover

    def recover(own, updates, weights):
        left[0] -= 1
        for each in signals if not left[0] else ():
            os.kill(os.getpid(), each)
        return real(own, updates, weights)

    with monkeypatch.context() as patch:
        patch.setattr(PlainRound, "recover", recover)
        return main(["train", *words])


def rounds_in(folder):
    return [json.loads(line)["round"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("signals", "code"), [((signal.SIGTERM,), 143), ((signal.SIGTERM, signal.SIGTERM), 143), ((signal.SIGINT,), 130)]
)
def test_a_signal_saves_the_round_and_prints_the_command_that_resumes(
    tmp_path, monkeypatch, capsys, signals, code, harmless
):
    folder = tmp_path / "a run"
    before = signal.getsignal(signal.SIGTERM)
    assert stop(monkeypatch, [*STOPPED, "--out", str(folder)], 6, *signals) == code
    assert signal.getsignal(signal.SIGTERM) == before
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fedveil: ")]
    command = shlex.join(["fedveil", "train", "--resume", "--out", str(folder)])
    assert line == f"fedveil: stopped; round 5 is saved; resume with {command}"
    status = read_status(folder)
    assert (status.state, status.message) == ("stopped", f"round 5 is saved; resume with {command}")
    assert checkpoint.load(folder / "checkpoint.pt")["round"] == 5
    assert main(shlex.split(command)[1:]) == 0
    assert rounds_in(folder) == list(range(1, 4 * PER_EPOCH + 1))


def test_the_command_that_resumes_trusts_code_that_the_user_has_named(tmp_path, monkeypatch, capsys, harmless):
    words = ["--data", f"{HERE}:pairs", "--model", f"{HERE}:Both", *LONGER, "--out", str(tmp_path)]
    assert stop(monkeypatch, words, 2, signal.SIGTERM) == 143
    command = capsys.readouterr().err.rpartition("resume with ")[2]
    assert main(shlex.split(command)[1:]) == 0
    assert command.strip().endswith("--trust-code")


def test_a_run_that_is_stopped_before_its_first_round_or_by_a_full_disk_says_so(monkeypatch, capsys):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device", "runs/x")

    monkeypatch.setattr(fedveil.runs.folder, "train", interrupt)
    assert main(["train"]) == 130
    assert capsys.readouterr().err.strip() == "fedveil: stopped; no round is saved; start the run again"
    monkeypatch.setattr(fedveil.runs.folder, "train", full)
    assert main(["train"]) == 2
    assert "runs/x: cannot be used: No space left on device.\n  Fix: choose another" in capsys.readouterr().err


def test_resume_takes_the_configuration_of_the_folder_and_compares_the_flags_that_are_given(tmp_path, capsys):
    fedveil.runs.folder.train(config_of(**SMALL, epochs=1), tmp_path)
    before = json.loads((tmp_path / "config.json").read_text())
    out = ["--resume", "--out", str(tmp_path)]
    assert main(["train", *out]) == 0
    assert json.loads((tmp_path / "config.json").read_text()) == before
    assert main(["train", *out, "--epochs", "3", "--clients", "2"]) == 0
    assert rounds_in(tmp_path) == list(range(1, 3 * PER_EPOCH + 1))
    capsys.readouterr()
    for words, texts in {
        ("--hidden", "5"): ("the existing run has hidden = 4, not 5", "leave out --hidden"),
        ("--epochs", "2"): ("the existing run has 3 epochs, more than 2", "--epochs 3 or more"),
        ("--out", str(tmp_path / "nothing")): ("there is no run to resume",),
    }.items():
        assert main(["train", *out, *words]) == 2
        error = capsys.readouterr().err
        assert all(text in error for text in texts), error
