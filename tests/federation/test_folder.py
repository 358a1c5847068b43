"""A run folder has one writer, is read by those who may, and is a run from its first checkpoint on."""

import fcntl
import json
import os
import stat
import subprocess
import sys

import pytest
from tests.configs import config_of
from tests.small import SMALL, federation

from fedveil.cli import main
from fedveil.defences.plain import PlainRound
from fedveil.errors import BadArgument
from fedveil.files import write_whole
from fedveil.locks import locked
from fedveil.runs.folder import train

HOLD = """
import sys, time
from pathlib import Path
from fedveil.locks import locked
with locked(Path(sys.argv[2])):
    print("held", flush=True)
    time.sleep(60)
"""


def holder(folder):
    """A process that works in a folder, once it does."""
    words = [sys.executable, "-c", HOLD, "--password=hunter2", str(folder)]
    found = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert found.stdout.readline() == b"held\n"
    return found


def refused_twice(folder, writers):
    """Each writer is refused while another process holds the folder, and not when that was killed."""
    other = holder(folder)
    try:
        for write in writers:
            with pytest.raises(
                BadArgument, match=rf"process {other.pid} on .*, since .*\) is working in this folder"
            ) as e:
                write()
            assert "hunter2" not in str(e.value)
    finally:
        other.kill()
        other.wait()
        other.stdout.close()
    with locked(folder):
        pass


def writers(folder):
    return [lambda: federation().fit(rounds=1, folder=folder), lambda: federation().save(folder)]


def test_the_second_writer_is_refused_and_a_killed_one_blocks_nobody(tmp_path):
    run = lambda: train(config_of(**SMALL, epochs=1), tmp_path)  # noqa: E731
    refused_twice(tmp_path, [run, *writers(tmp_path)])


@pytest.mark.slow
def test_the_second_writer_is_refused_in_thirty_of_thirty_trials(tmp_path):
    for number in range(30):
        refused_twice(tmp_path / str(number), writers(tmp_path / str(number)))


RACE = """
import sys, time
from pathlib import Path
from fedveil.errors import BadArgument
from fedveil.locks import locked
print("ready", flush=True)
sys.stdin.readline()
try:
    with locked(Path(sys.argv[1])):
        print("in", flush=True)
        sys.stdin.readline()
except BadArgument:
    print("refused", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("trials", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_of_two_that_start_together_one_is_refused(tmp_path, trials):
    for number in range(trials):
        words = [sys.executable, "-c", RACE, str(tmp_path / str(number))]
        pipe = subprocess.PIPE
        with (
            subprocess.Popen(words, stdin=pipe, stdout=pipe) as a,
            subprocess.Popen(words, stdin=pipe, stdout=pipe) as b,
        ):
            for line in (b"ready\n", None):
                said = [each.stdout.readline() for each in (a, b)]
                assert line is None or said == [line] * 2
                for each in (a, b):
                    each.stdin.write(b"go\n")
                    each.stdin.flush()
            assert sorted(said) == [b"in\n", b"refused\n"]


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--epochs", "1"],
        ["compare", "--defences", "plain", "--seeds", "1", "--epochs", "1"],
        ["attack", "membership", "--defence", "plain", "--epochs", "1"],
        ["audit", "--data", "digits", "--defence", "plain", "--epochs", "1"],
        ["audit", "--harden"],
        ["demo"],
        ["reproduce", "table1"],
    ],
    ids=lambda words: "-".join(words[:2]),
)
def test_every_command_that_writes_a_folder_takes_its_lock(tmp_path, words, capsys):
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main([*words, "--out", str(tmp_path)]) == 2
    assert "another process is working in this folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_lock_is_reentrant_and_sweeps_what_a_killed_process_was_writing(tmp_path):
    (tmp_path / ".checkpoint.pt.0123.part").write_bytes(b"half")
    with locked(tmp_path):
        with locked(tmp_path / "." / "x" / ".."):
            assert sorted(path.name for path in tmp_path.iterdir()) == [".holder", ".lock"]
        assert json.loads((tmp_path / ".holder").read_text())["pid"] == os.getpid()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("umask", "others"), [(0o002, 0o664), (0o077, 0o600)])
def test_states_are_for_their_owner_and_the_umask_decides_about_the_rest(tmp_path, umask, others):
    folder, before = tmp_path / "run", os.umask(umask)
    try:
        train(config_of(**SMALL | {"defence": "ppdl"}, epochs=2, ppdl="noise"), folder)
    finally:
        os.umask(before)
    found = {path.name: mode(path) for path in folder.iterdir() if path.is_file()}
    assert found.pop("checkpoint.pt") == found.pop("checkpoint.previous.pt") == 0o600
    assert found.pop(".lock")
    assert set(found) == {
        *("config.json", "metrics.jsonl", "model.safetensors", "best.safetensors", "model.json", "report.html"),
        "summary.json",
    }
    assert set(found.values()) == {others}
    clients = folder / "clients"
    assert {mode(path) for path in (clients, *clients.glob("*"))} == {0o700}
    assert {mode(path) for path in clients.glob("*/*")} == {0o600}


def interrupt(*_):
    raise KeyboardInterrupt


def test_a_run_that_ended_before_its_first_round_blocks_nobody(tmp_path, monkeypatch):
    config = config_of(**SMALL, epochs=1)
    with monkeypatch.context() as patch:
        patch.setattr(PlainRound, "recover", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path)
    assert (tmp_path / "config.json").exists()
    summary = train(config_of(**SMALL, epochs=1, lr=0.01), tmp_path)  # the same flags or others
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == summary.rounds
    with pytest.raises(BadArgument, match="there is a run in this folder"):
        train(config, tmp_path)
    (tmp_path / "checkpoint.pt").unlink()
    (tmp_path / "checkpoint.previous.pt").unlink(missing_ok=True)
    with pytest.raises(BadArgument, match="there is a run in this folder"):  # a model that is done is a run
        train(config, tmp_path)


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--data", "digits", "--model", "cnn", "--defence", "nothing"],
        ["attack", "gradients", "--data", "diabetes", "--defence", "plain"],
        ["compare", "--data", "csv", "--path", "nowhere.csv", "--target", "y"],
    ],
    ids=lambda words: words[0],
)
def test_a_command_that_is_refused_leaves_no_folder(tmp_path, words, capsys):
    assert main([*words, "--out", str(tmp_path / "a" / "b"), "--epochs", "1"]) == 2, capsys.readouterr()
    assert list(tmp_path.iterdir()) == []


def test_folders_that_were_there_before_stay(tmp_path):
    (tmp_path / "a").mkdir()
    for folder in ("a", "a/b"):
        with pytest.raises(RuntimeError), locked(tmp_path / folder):
            raise RuntimeError
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [".lock"]
    with locked(tmp_path / "c"):
        write_whole(tmp_path / "c" / "kept", "text")
    assert (tmp_path / "c" / "kept").exists()
