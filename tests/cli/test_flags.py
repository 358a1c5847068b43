"""Flags, files, defaults and help of the command line: what is described, what is refused and how."""

import errno
import inspect
import json
import re
import subprocess
import sys
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from typing import ClassVar

import pytest

import fedveil.cli.studies as commands
import fedveil.runs.folder
from fedveil.cli import main
from fedveil.cli.attacks import ATTACKS, attack_names
from fedveil.cli.commands import COMMANDS
from fedveil.cli.training import TrainCommand
from fedveil.data.catalogue import LOADERS
from fedveil.defences import Plain
from fedveil.runs.build import build_defence, load_data
from fedveil.runs.choices import ONLY, Choices
from fedveil.runs.config import HOME, SECTIONS, Config, configure
from fedveil.runs.losses import choose_loss
from fedveil.studies.attack import AttackStudy, option
from fedveil.studies.jobs import Result
from fedveil.studies.study import Shown

GUESS_NAME = "tests.cli.test_flags:GUESS"


@dataclass(frozen=True)
class Options:
    """A guess."""

    guesses: int = option(2, "how often it guesses")


@dataclass(frozen=True)
class Guessed(Result):
    defence: str
    guesses: int
    clients: int


@dataclass(frozen=True)
class GuessOnce:
    defence: str
    guesses: int
    clients: int

    def __call__(self, progress, done):
        return Guessed(self.defence, self.guesses, self.clients)


class Guess(AttackStudy):
    name, summary = "guess", "what a guess gives"
    options, result, trains = Options, Guessed, False
    defaults: ClassVar = {"data": "cifar10", "train_size": 100, "clients": 3}

    def attack(self, asked, defence, folder):
        return GuessOnce(defence, asked.options.guesses, asked.config.data.clients)

    def present(self, asked, results):
        rows = [[name, str(found.guesses), str(found.clients)] for name, found in results.items()]
        return Shown("Guess", "Guessed.", ["defence", "guesses", "clients"], rows, "A note.", [])


GUESS = Guess()


def printed_help(capsys, *words, flag="--help"):
    assert main([*words, flag]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def entries(text):
    """The flags of a help, each with what stands beside it."""
    lines = [line.strip("│ ").rstrip() for line in text.splitlines()]
    found = []
    for line in lines:
        if re.match(r"--[a-z]", line):
            found.append(line)
        elif re.match(r"[─╭╰-]", line) or not line:
            found.append("")
        elif found and found[-1]:
            found[-1] += f" {line}"
    return [entry for entry in found if entry.startswith("--")]


@pytest.mark.parametrize(
    "words",
    [*([name] for name in COMMANDS if name != "attack"), *(["attack", name] for name in [*ATTACKS, GUESS_NAME])],
)
def test_every_flag_is_described_with_its_default(words, capsys):
    text = printed_help(capsys, *words, flag="--help-all")
    assert f"Example: fedveil {words[0]} " in text
    for entry in entries(text):
        shape = re.match(r"(--[\w-]+,? ?)+([A-Z]+ |\{.*?\} |\[STR \[STR \.\.\.\]\] |\[NAME=\]\S+ )?(.*)", entry)
        described, _, hint = shape[3].rpartition("(")
        assert len(described.split()) > 1, entry
        assert re.match(r"default: ?.*\)|repeatable\)|required", hint), entry


def test_flags_stand_in_groups_with_the_defaults_of_the_attack(capsys):
    text = printed_help(capsys, "attack", GUESS_NAME)
    for group in ("data", "model", "defence", "training", "privacy"):
        assert f" {group} options " in text
    assert any(re.search(r"^--guesses INT\s+how often it guesses \(default: 2\)", entry) for entry in entries(text))
    assert any(re.search(r"^--clients INT.*\(default: 3\)", entry) for entry in entries(text))


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["attack", "--help"], ["schema"], ["--version"]])
def test_help_imports_nothing_heavy(words):
    code = (
        "import sys; from fedveil.cli import main; status = main(sys.argv[1:]);"
        "sys.exit(status or sorted({'torch', 'flwr', 'scipy', 'sklearn', 'cryptography'} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_help_names_every_command_and_attack(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(re.search(rf"^  {name} +\w", text, re.MULTILINE) for name in COMMANDS)
    assert "fedveil completion bash" in text
    assert all(f"  {name}" in printed_help(capsys, "attack") for name in attack_names())
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == text


def test_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == version("fedveil")


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["trian"], ["there is no command 'trian'", "'train' is the nearest"]),
        (["attack", "membershp"], ["there is no attack 'membershp'", "'membership' is the nearest"]),
        (["attack"], ["there is no attack ''", "'membership'"]),
        (["attack", "builtins:dict"], ["builtins:dict", "not an attack"]),
        (["train", "--decoyz", "3"], ["--decoyz", "--decoys"]),
        (["train", "--lr", "-1"], ["--lr: must be greater than 0, got -1.0"]),
        (["train", "--batch-size", "0"], ["--batch-size: must be greater than or equal to 1, got 0"]),
        (["train", "--epochs", "x"], ["--epochs", "INT", "'x'"]),
        (["train", "--decoys", "x"], ["--decoys", "INT", "'x'"]),
        (["train", "--loss", "foo"], ["--loss", "foo", "cross_entropy"]),
        (["train", "--sigma", "1"], ["--sigma does not apply to --defence veil", "it is for ppdl"]),
        (["train", "--model", "cnn", "--layers", "2"], ["--layers does not apply to --model cnn", "it is for mlp"]),
        (["train", "--defence", "plain", "--groups", "2"], ["--groups does not apply to --defence plain"]),
        (
            ["attack", GUESS_NAME, "--defence", "plain,dbcl", "--sigma", "1"],
            ["--sigma does not apply to"],
        ),
        (["train", "--dp-clip", "1"], ["fedveil train", "dp_clip without dp_noise", "--dp-clip 1 --dp-noise 1"]),
        (["train", "nowhere.toml"], ["nowhere.toml: cannot be read"]),
        (["inspect", "tests.cli.test_inspect:small"], ["--input: no input is given"]),
        (["reproduce"], ["nothing is named", "table1"]),
        (["compare", "--defences", "plain,viel"], ["there is no defence 'viel'", "'veil' is the nearest"]),
        (["compare", "--seeds", "0"], ["--seeds", "must be a whole number of at least 1, got 0"]),
        (["audit", "--harden", "--seeds", "0"], ["--seeds must be a whole number of at least 1, got 0"]),
        (["attack", GUESS_NAME, "--defence", "plian"], ["there is no defence 'plian'", "'plain' is the nearest"]),
        (["attack", GUESS_NAME, "--defence", "plain", "--workers", "0"], ["--workers must be a whole number"]),
        (["attack", GUESS_NAME, "--defence", "plain", "--run", "here"], ["a run has its own defence"]),
        (["data", "gte"], ["gte", "list", "get"]),
        (["completion", "csh"], ["csh", "bash", "zsh"]),
    ],
)
def test_misuse_is_refused_with_the_flag_and_what_is_allowed(words, texts, capsys):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    flat = " ".join(captured.err.replace("│", " ").split())
    assert all(text in flat for text in texts), captured.err


TOML = '[data]\nname = "bank"\nclients = 7\n[training]\nlr = 0.5\nepochs = 20\n[defence]\nname = "dbcl"\n'


def test_flags_override_the_file_and_its_values_are_the_defaults_of_the_help(tmp_path, capsys):
    (tmp_path / "run.toml").write_text(TOML)
    path = str(tmp_path / "run.toml")
    config = TrainCommand.parse("fedveil train", ["--lr", "0.25", path, "--sketch", "3"]).config
    assert config.changes() == {"data": "bank", "clients": 7, "lr": 0.25, "defence": "dbcl", "sketch": 3}
    text = printed_help(capsys, "train", path)
    assert any(re.search(r"^--clients .*\(default: 7\)", entry) for entry in entries(text))
    (tmp_path / "run.toml").write_text("[data]\nclient = 7\n")
    assert main(["train", path]) == 2
    assert "did you mean 'clients'" in capsys.readouterr().err


def asked(*words):
    return commands.AttackCommand.parse("fedveil attack", [GUESS_NAME, *words])


def test_an_attack_starts_from_its_own_defaults_then_the_file_then_flags(tmp_path):
    (tmp_path / "run.toml").write_text(TOML)
    plain = asked()
    assert (plain.config.data.name, plain.config.data.train_size, plain.config.data.clients) == ("cifar10", 100, 3)
    assert plain.defences == ("plain", "veil", "ppdl", "dbcl", "spn")
    command = asked(str(tmp_path / "run.toml"), "--epochs", "4")
    mixed = command.config
    assert (mixed.data.name, mixed.data.clients, mixed.training.epochs, command.defence) == ("bank", 7, 4, "all")
    assert mixed.data.train_size is None  # sizes for one data set mean nothing to another
    assert asked("--data", "digits").config.data.train_size is None
    assert asked("--data", "digits", "--train-size", "9").config.data.train_size == 9
    assert asked(str(tmp_path / "run.toml"), "--data", "cifar10").config.data.train_size == 100


def test_an_own_attack_runs_and_its_repeat_command_asks_for_the_same(tmp_path, capsys):
    folder = tmp_path / "my results"
    defences = "plain,tests.cli.test_flags:Own"
    words = ["attack", GUESS_NAME, "--defence", defences, "--guesses", "5", "--out", str(folder)]
    assert main([*words, "--workers", "1"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^plain +5 +3$", out, re.MULTILINE)
    assert f"report: {folder / 'report.html'}" in out
    repeat = re.search(r"^repeat: (.*)", out, re.MULTILINE)[1]
    assert f"--guesses 5 --out '{folder}'" in repeat
    assert f"--data cifar10 --train-size 100 --clients 3 --loss cross_entropy --defence {defences}" in repeat
    assert json.loads((folder / "results.json").read_text())["command"] == repeat
    assert main([*words, "--workers", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0] == {"defence": "plain", "guesses": "5", "clients": "3"}


def test_an_audit_without_a_federation_is_that_of_the_suite(tmp_path):
    def suite(*words):
        return commands.AuditCommand.parse("fedveil audit", words).is_suite

    assert suite()
    assert suite("--defence", "plain", "--trials", "1", "--out", "x")
    assert not suite("--data", "digits")
    assert not suite("--no-permute")
    assert not suite("--clients=3")
    assert not suite(str(tmp_path))
    assert not suite("--run", str(tmp_path))


def interrupt(*arguments, **options):
    raise KeyboardInterrupt


def test_ctrl_c_is_one_line_that_says_how_to_go_on(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(fedveil.runs.folder, "train", interrupt)
    assert main(["train"]) == 130
    said = capsys.readouterr().err.strip()
    assert said == "fedveil: stopped; no round was complete; run the same command again"
    monkeypatch.setattr(fedveil.studies.study, "gather", interrupt)
    assert main(["attack", GUESS_NAME, "--out", str(tmp_path)]) == 130
    captured = capsys.readouterr()
    assert captured.err.strip() == "fedveil: stopped; run the same command again to continue"
    assert captured.out == ""


def test_what_cannot_be_written_is_an_error_with_where_and_fix(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        for words in (["train", "--epochs", "1", "--train-size", "50"], ["attack", GUESS_NAME, "--workers", "1"]):
            assert main([*words, "--out", str(out)]) == 2
            captured = capsys.readouterr()
            assert captured.out == ""
            assert re.match(
                rf"fedveil: {tmp_path}/file\S*: cannot be written: .*\n  Fix: .*another folder", captured.err
            )

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device", "runs/x")

    monkeypatch.setattr(fedveil.runs.folder, "train", full)
    assert main(["train"]) == 2
    assert (
        "runs/x: cannot be used: No space left on device.\n  Fix: choose another folder, free"
        in capsys.readouterr().err
    )


def test_the_schema_is_that_of_the_configuration(capsys):
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == Config.model_json_schema()


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_commands_attacks_and_flags(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for word in [*COMMANDS, *ATTACKS, "--min-coverage", "--shadows", "--trials"])


def test_the_exhibits_of_the_help_are_those_that_there_are():
    from fedveil.studies.paper.reproduce import EXHIBITS

    assert re.findall(r"(?:table|fig)\d", commands.EXHIBITS) == list(EXHIBITS)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ("--local-epochs", "3"),
            "there is no --local-epochs: clients send gradients of a perturbed model.*\n.*--whole-shard",
        ),
        (
            ("--data", "csv", "--ignore", "a", "--ignore", "b"),
            "--ignore is given twice.\n  Fix: use --ignore FIRST SECOND",
        ),
    ],
)
def test_flags_that_would_mislead_are_refused(words, text, capsys):
    assert main(["train", *words]) == 2
    assert re.search(text, capsys.readouterr().err)


def test_help_fits_on_two_screens_and_shows_what_applies(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    text = printed_help(capsys, "train")
    assert len(text.splitlines()) <= 2 * 50
    assert "--sigma" not in text
    assert "--aggregator" not in text
    assert "--sigma" in printed_help(capsys, "train", "--defence", "ppdl")
    everything = " ".join(printed_help(capsys, "train", flag="--help-all").replace("│", " ").split())
    assert all(f"--{key.replace('_', '-')}" in everything for key in HOME)
    assert "ppdl: standard deviation of the noise" in everything


def test_names_of_flags_are_unique():
    keys = [key for section in SECTIONS.values() for key in section.model_fields if key != "name"]
    assert len({*keys, *SECTIONS}) == len(keys) + len(SECTIONS)
    for start in (
        TrainCommand(),
        commands.CompareCommand(),
        *commands.AttackCommand.starts().values(),
        *commands.AuditCommand.starts().values(),
    ):
        own = [field.name for field in fields(start) if field.name not in ("defence", "config")]
        options = [field.name for field in fields(start.attack)] if hasattr(start, "attack") else []
        assert len({*own, *options, *HOME}) == len(own) + len(options) + len(HOME)


def test_keys_of_data_sets_are_the_options_of_their_loaders():
    for name, loader in LOADERS.items():
        options = {*inspect.signature(loader).parameters} & HOME.keys()
        choices = Choices(name, "mlp", ("veil",))
        assert {key for key, names in ONLY.items() if HOME[key] == "data" and names and choices.accepts(key)} == (
            options - {"seed"}
        )


@dataclass(frozen=True)
class OwnSettings:
    strength: float = field(default=0.5, metadata={"help": "how strong it is"})
    mode: str = field(default="fast", metadata={"help": "how it works"})


class Own(Plain):
    Settings = OwnSettings

    def __init__(self, strength=0.5, mode="fast"):
        super().__init__()
        self.strength, self.mode = strength, mode


def test_a_settings_class_of_another_package_has_flags(capsys):
    words = ["--defence", "tests.cli.test_flags:Own"]
    text = printed_help(capsys, "train", *words)
    assert re.search(r"--strength FLOAT +how strong it is \(default: 0.5\)", text)
    config = TrainCommand.parse("fedveil train", [*words, "--strength", "0.25"]).config
    assert config.defence.settings == ("strength=0.25",)
    defence = build_defence(config)
    assert (defence.strength, defence.mode) == (0.25, "fast")
    assert TrainCommand.parse("fedveil train", [*words, "--mode", "slow"]).config.defence.settings == ("mode=slow",)


def test_a_file_with_a_key_of_another_choice_is_refused(tmp_path, capsys):
    (tmp_path / "run.toml").write_text('[defence]\ndefence = "ppdl"\nsigma = 0.1\ngroups = 3\n')
    assert main(["train", str(tmp_path / "run.toml")]) == 2
    assert "--groups does not apply to --defence ppdl" in capsys.readouterr().err
    (tmp_path / "run.toml").write_text('[defence]\ndefence = "ppdl"\nsigma = 0.1\n')
    assert TrainCommand.parse("fedveil train", [str(tmp_path / "run.toml"), "--defence", "plain"]).defences == (
        "plain",
    )


@pytest.mark.parametrize(
    ("values", "loss"),
    [
        ({"data": "digits"}, "cross_entropy"),
        ({"data": "diabetes"}, "squared_error"),
        ({"data": "bank"}, "squared_error"),
        ({"data": "bank", "task": "classification"}, "cross_entropy"),
        ({"data": "csv", "task": "regression"}, "squared_error"),
        ({"data": "csv"}, None),
        ({"data": "my.package:data"}, None),
    ],
)
def test_the_default_loss_needs_no_records_where_the_task_is_known(values, loss):
    config = choose_loss(configure(values))
    assert config.training.loss == loss
    if values in ({"data": "digits"}, {"data": "diabetes"}):
        assert choose_loss(configure(values), load_data(config)) == config
