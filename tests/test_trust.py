"""Configuration from elsewhere runs no code, and a file of the working directory hides no module."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.configs import config_of

from fedveil.cli import main
from fedveil.defences import registry
from fedveil.errors import BadArgument
from fedveil.lookup import import_object
from fedveil.runs.folder import open_run, read_config, train

TRAP = """
from pathlib import Path

from torch import nn

from fedveil.data import load
from fedveil.defences import Plain as Defence

(Path(__file__).parent / "sprung").touch()


def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 10))


def data():
    return load("digits", train_size=60, test_size=40)
"""
SMALL = {"defence": "plain", "clients": 2, "train_size": 60, "test_size": 40, "batch_size": 30, "epochs": 1}
FLAGS = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
EVERY = ["model", *(pytest.param(key, marks=pytest.mark.slow) for key in ("data", "defence"))]
KEYS = {"model": "trap:model", "data": "trap:data", "defence": "trap:Defence"}


@pytest.fixture
def sprung(tmp_path, monkeypatch):
    """Whether the code of the working directory has run."""
    home = tmp_path / "here"
    home.mkdir()
    (home / "trap.py").write_text(TRAP)
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setattr(registry, "_RECORDS", dict(registry._RECORDS))
    yield (home / "sprung").exists
    sys.modules.pop("trap", None)


@pytest.fixture
def run(tmp_path):
    """A folder from elsewhere: of a run that was trained, with a configuration that names code."""
    folder = tmp_path / "run"
    train(config_of(**SMALL), folder)

    def make(key):
        sections = json.loads((folder / "config.json").read_text())
        sections[key][key] = KEYS[key]
        if key == "data":
            sections["data"] |= {"train_size": None, "test_size": None}
        (folder / "config.json").write_text(json.dumps(sections))
        return folder

    return make


@pytest.mark.parametrize("key", EVERY)
def test_a_folder_that_names_code_runs_none_of_it(sprung, run, key, tmp_path, capsys):
    folder = run(key)
    for read in (open_run, read_config):
        with pytest.raises(BadArgument, match=rf"config.json: {key} = '{KEYS[key]}' refers to code"):
            read(folder)
    out = ["--out", str(tmp_path / "out")]
    attacks = [["attack", name, "--run", str(folder), *out] for name in ("membership", "gradients")]
    for words in (["audit", str(folder), *out], *(attacks if key == "model" else [])):
        assert main(words) == 2
        assert f"--{key} {KEYS[key]} or --trust-code on the command line" in capsys.readouterr().err
    assert main(["train", *FLAGS, "--out", str(folder), "--resume"]) == 2
    assert f"{key} = '{KEYS[key]}'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert not sprung()


@pytest.mark.parametrize("key", EVERY)
def test_a_file_that_names_code_runs_it_only_if_it_is_asked_to(sprung, key, tmp_path, capsys):
    values = {**SMALL, key: KEYS[key]}
    if key == "data":  # these are options of the library's data sets
        del values["train_size"], values["test_size"]
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items()]
    (tmp_path / "run.toml").write_text("\n".join(lines))
    words = ["train", str(tmp_path / "run.toml"), "--out", str(tmp_path / "out")]
    for more in ([], ["--out", key]):  # a value is not a flag
        assert main([*words, *more]) == 2
        assert f"run.toml: {key} = '{KEYS[key]}' refers to code" in capsys.readouterr().err
    path = ["--data", "csv", "--target", "y", "--path", "trap:data"]  # a path is only a path
    assert main(["train", *path, "--out", str(tmp_path / "o")]) == 2
    assert not sprung()
    assert main([*words, "--trust-code"]) == 0, capsys.readouterr().err
    assert sprung()


def test_naming_the_code_on_the_command_line_is_asking_for_it(sprung, run, tmp_path, capsys):
    (tmp_path / "run.toml").write_text('model = "os:abort"')
    words = ["train", str(tmp_path / "run.toml"), *FLAGS, "--out", str(tmp_path / "out"), "--model", KEYS["model"]]
    assert main(words) == 0, capsys.readouterr().err
    assert sprung()
    assert main([*words, "--resume"]) == 0, capsys.readouterr().err
    folder = tmp_path / "out"
    flags = ["--workers", "1", "--trials", "1", "--shadows", "0", "--no-network", "--no-server"]
    assert main(["audit", str(folder), *flags]) == 2
    assert main(["audit", str(folder), *flags, "--model", "os:abort"]) == 2
    assert "the existing run has model = 'trap:model', not 'os:abort'" in capsys.readouterr().err
    assert main(["audit", str(folder), *flags, "--model", KEYS["model"]]) == 0, capsys.readouterr().err
    assert f"--model {KEYS['model']}" in capsys.readouterr().out  # the command that repeats it
    assert open_run(folder, trust_code=True)[1].round == 1


def test_the_working_directory_is_looked_at_last_and_only_for_code_that_is_named(sprung, capsys):
    here = str(Path.cwd())
    assert main(["schema"]) == 0
    assert here not in sys.path
    for name in ("json", "torch", "fedveil"):
        Path(f"{name}.py").write_text("raise SystemExit(name)")
    import_object("fedveil.defences.plain:Plain", "a defence", "")
    assert here not in sys.path
    assert main(["inspect", "trap:model", "--input", "8,8"]) == 0
    assert sys.path[-1] == here
    assert sys.path.count(here) == 1
    assert import_object("json:dumps", "a function", "") is json.dumps


def test_no_file_of_the_working_directory_is_imported_by_a_command(tmp_path):
    found = subprocess.run([sys.executable, "-Ic", "import runpy, sys; print(*sys.modules)"], capture_output=True)
    first = {name.partition(".")[0] for name in found.stdout.decode().split()}  # what Python imports before us, for -m
    trap = f"open({str(tmp_path / 'sprung')!r}, 'a').write(__name__)"
    for name in {*sys.stdlib_module_names, "torch", "numpy", "tyro", "pydantic", "filelock", "tqdm"} - first:
        (tmp_path / f"{name}.py").write_text(trap)
    assert (tmp_path / "typing.py").exists()
    script = str(Path(sys.executable).parent / "fedveil")
    for words in ([sys.executable, "-m", "fedveil", "schema"], [script, "schema"]):
        assert subprocess.run(words, cwd=tmp_path, capture_output=True, check=True).stdout
    assert not (tmp_path / "sprung").exists()
