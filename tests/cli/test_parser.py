"""Flags, files, defaults and help of the command line: what is described, what is refused and how."""

import inspect
import json
import re
import subprocess
import sys
from dataclasses import fields
from importlib.metadata import version

import pytest

import fedveil.cli.studies as commands
from fedveil.cli import main
from fedveil.cli.commands import ATTACKS, COMMANDS, attack_names
from fedveil.cli.training import TrainCommand
from fedveil.data.catalogue import CATALOGUE, find_loader
from fedveil.runs.build import build_defence
from fedveil.runs.choices import APPLIES_TO, Choices
from fedveil.runs.settings import SECTION_OF, SECTIONS, Config

GUESS, OWN = "tests.cli.guessing:GUESS", "tests.cli.guessing:Own"


def printed_help(capsys, *words, flag="--help"):
    assert main([*words, flag]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def entries(text):
    """The flags of a help, each with the text beside it."""
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


def parse(*words):
    return TrainCommand.parse("fedveil train", words)


@pytest.mark.parametrize(
    "words", [*([name] for name in COMMANDS if name != "attack"), *(["attack", name] for name in [*ATTACKS, GUESS])]
)
def test_every_flag_is_described_with_its_default(words, capsys):
    text = printed_help(capsys, *words, flag="--help-all")
    assert f"Example: fedveil {words[0]} " in text
    for entry in entries(text):
        shape = re.match(r"(--[\w-]+,? ?)+([A-Z]+ |\{.*?\} |\[STR \[STR \.\.\.\]\] |\[NAME=\]\S+ )?(.*)", entry)
        assert len(shape[3].partition("(default")[0].split()) > 1, entry
        assert words[0] in ("attack", "audit") or "default: None" not in entry


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0),
        (["train", "--help"], 0),
        (["attack", "--help"], 0),
        (["schema"], 0),
        (["--version"], 0),
        (["data", "list"], 0),
        (["train", "gone.toml"], 2),
        (["train", "--data", "csv", "--path", "gone.csv", "--target", "y"], 2),
        (["train", "--data", "nothing"], 2),
        (["train", "--model", "nothing"], 2),
        (["train", "--defence", "nothing"], 2),
    ],
)
def test_help_and_mistakes_import_nothing_heavy(words, code):
    program = (
        "import sys; from fedveil.cli import main; status = main(sys.argv[1:]);"
        "print(status, *{'torch', 'flwr', 'scipy', 'sklearn', 'cryptography'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == f"{code}", done.stderr
    assert bool(done.stderr) == bool(code)


def test_help_names_every_command_and_attack(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(re.search(rf"^  {name} +\w", text, re.MULTILINE) for name in COMMANDS)
    assert all(f"  {name}" in printed_help(capsys, "attack") for name in attack_names())
    assert main([]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", text)
    assert main(["--version"]) == main(["schema"]) == 0
    first, _, rest = capsys.readouterr().out.partition("\n")
    assert (first, json.loads(rest)) == (version("fedveil"), Config.model_json_schema())


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["trian"], ["there is no command 'trian'", "use 'train'"]),
        (["attack", "membershp"], ["there is no attack 'membershp'", "use 'membership'"]),
        (["attack", "builtins:dict"], ["builtins:dict", "expected an attack"]),
        (["train", "--decoyz", "3"], ["Unrecognized options: --decoyz", "--decoys"]),
        (["train", "--lr", "-1"], ["--lr: must be greater than 0, got -1.0"]),
        (["train", "--epochs", "x"], ["--epochs", "INT", "'x'"]),
        (["train", "--data", "csv", "--ignore", "a", "--ignore", "b"], ["--ignore is given twice", "FIRST SECOND"]),
        (["train", "--local-epochs", "5"], ["to --defence veil, whose clients send gradients", "only to plain, ppdl"]),
        (["train", "--sigma", "1"], ["--sigma does not apply to --defence veil", "it applies only to ppdl"]),
        (["train", "--data", "digits", "--ignore", "x"], ["--ignore does not apply to --data digits"]),
        (
            ["train", "--model", "cnn", "--layers", "2"],
            ["--layers does not apply to --model cnn", "it applies only to mlp"],
        ),
        (["train", "--model", "resnet21"], ["there is no model 'resnet21'", "'resnet20'"]),
        (["attack", GUESS, "--defence", "plain,dbcl", "--sigma", "1"], ["--sigma does not apply to"]),
        (["train", "--clip", "2"], ["fedveil train", "clip has no effect without epsilon or noise", "--epsilon 3"]),
        (["train", "gone.toml"], ["gone.toml: cannot be read", "Fix: pass the path of a readable TOML file"]),
        (["train", "mine.csv", "--target", "y"], ["mine.csv: this is a table", "--data csv --path mine.csv"]),
        (["train", "--data", "mine.csv", "--target", "y"], ["is a file or folder", "--data csv --path mine.csv"]),
        (["train", "--data", "."], ["is a file or folder", "--data images --path ."]),
        (["train", "quoted.toml"], ["lr must be a valid number, got '0.001'", "Fix: write lr without quotes"]),
        (["train", "other.toml"], ["--groups does not apply to --defence ppdl"]),
        (["train", "."], ["this is a folder, not a file", "--resume to continue it"]),
        (["train", "--split", "column"], ["Fix: use 'iid' or 'dirichlet': 'digits' has no columns"]),
        (["inspect", "tests.cli.test_inspection:small"], ["--input: no input is given"]),
        (["reproduce"], ["no table or figure is specified", "table1"]),
        (["compare", "--defences", "plain,viel"], ["there is no defence 'viel'", "use 'veil'"]),
        (["attack", GUESS, "--defence", "plain", "--workers", "0"], ["--workers", "at least 1, got 0"]),
        (["attack", GUESS, "--defence", "plain", "--run", "here"], ["the defence of a run cannot be changed"]),
        (["data", "gte"], ["gte", "list", "get"]),
        (["data", "get"], ["no data set is specified"]),
    ],
)
def test_misuse_is_refused_with_the_flag_and_what_is_allowed(words, texts, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quoted.toml").write_text('[training]\nlr = "0.001"\n')
    (tmp_path / "other.toml").write_text('[defence]\ndefence = "ppdl"\nsigma = 0.1\ngroups = 3\n')
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    flat = " ".join(captured.err.replace("│", " ").split())
    assert all(text in flat for text in texts), captured.err


TOML = '[data]\nname = "bank"\nclients = 7\n[training]\nlr = 0.5\nepochs = 20\n[defence]\nname = "ppdl"\nsigma = 0.1\n'


def test_flags_override_the_file_and_its_values_are_the_defaults_of_the_help(tmp_path, capsys, monkeypatch):
    path = str(tmp_path / "run.toml")
    (tmp_path / "run.toml").write_text(TOML)
    monkeypatch.setattr("fedveil.cli.training.check_names", lambda config: None)  # no bank is needed
    config = parse("--lr", "0.25", path, "--fraction", "0.5").config
    own = {"data": "bank", "clients": 7, "defence": "ppdl", "sigma": 0.1}
    assert config.changed_values() == {**own, "lr": 0.25, "fraction": 0.5}
    assert parse(path, "--defence", "plain").defences == ("plain",)  # the file's sigma is for its own defence
    text = printed_help(capsys, "train", path)
    assert any(re.search(r"^--clients .*\(default: 7\)", entry) for entry in entries(text))


def test_an_attack_starts_from_its_own_defaults_then_the_file_then_flags(tmp_path):
    def asked(*words):
        return commands.AttackCommand.parse("fedveil attack", [GUESS, *words])

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


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_commands_attacks_and_flags(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for word in [*COMMANDS, *ATTACKS, "--min-coverage", "--shadows", "--trials"])


def test_help_fits_on_two_screens_and_shows_what_applies(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    text = printed_help(capsys, "train")
    assert len(text.splitlines()) <= 95  # 89 in a terminal, which has boxes
    assert "--sigma" not in text
    assert "--aggregator" not in text
    assert "--sigma" in printed_help(capsys, "train", "--defence", "ppdl")
    everything = " ".join(printed_help(capsys, "train", flag="--help-all").replace("│", " ").split())
    assert all(f"--{key.replace('_', '-')}" in everything for key in SECTION_OF)
    assert "ppdl: standard deviation of the noise" in everything


def test_names_of_flags_are_unique_and_keys_of_data_sets_are_the_options_of_their_loaders():
    assert sum(len(section.model_fields) for section in SECTIONS.values()) == len(SECTION_OF)
    attacks, audits = commands.AttackCommand.variants(), commands.AuditCommand.variants()
    for start in (TrainCommand(), commands.CompareCommand(), *attacks.values(), *audits.values()):
        own = [field.name for field in fields(start) if field.name not in ("defence", "config")]
        options = [field.name for field in fields(start.attack)] if hasattr(start, "attack") else []
        assert len({*own, *options, *SECTION_OF}) == len(own) + len(options) + len(SECTION_OF)
    for name in CATALOGUE:
        options = {*inspect.signature(find_loader(name)).parameters} & SECTION_OF.keys() - {"seed"}
        choices = Choices(name, "mlp", ("veil",))
        own = {key for key, names in APPLIES_TO.items() if SECTION_OF[key] == "data" and names and choices.accepts(key)}
        assert own == options


def test_a_settings_class_of_another_package_has_flags(capsys, tmp_path):
    words = ["--defence", OWN]
    text = printed_help(capsys, "train", *words)
    assert re.search(r"--strength FLOAT +how strong it is \(default: 0.5\)", text)
    config = parse(*words, "--strength", "0.25").config
    assert config.defence.settings == ("strength=0.25",)
    defence = build_defence(config)
    assert (defence.strength, defence.pace) == (0.25, "fast")
    (tmp_path / "run.toml").write_text('[defence]\nsettings = ["strength=0.75"]\n')
    config = parse(str(tmp_path / "run.toml"), *words, "--pace", "slow").config
    assert (build_defence(config).strength, build_defence(config).pace) == (0.75, "slow")
