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
from fedveil.files import lock_folder, write_atomically
from fedveil.runs.folder import train

HOLD = """
import sys, time
from pathlib import Path
from fedveil.files import lock_folder
with lock_folder(Path(sys.argv[2])):
    print("held", flush=True)
    time.sleep(60)
"""


def holder(folder):
    """A process that works in a folder, once it does."""
    words = [sys.executable, "-c", HOLD, "--password=hunter2", str(folder)]
    found = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert found.stdout.readline() == b"held\n"
    return found


def test_the_second_writer_is_refused_and_a_killed_one_blocks_nobody(tmp_path):
    run, other = lambda: train(config_of(**SMALL, epochs=1), tmp_path), holder(tmp_path)
    text = rf"process {other.pid} on .*, since .*\) is using this folder"
    try:
        for write in (run, *writers(tmp_path)):
            with pytest.raises(BadArgument, match=text) as caught:
                write()
            assert "hunter2" not in str(caught.value)
    finally:
        other.kill()
        other.wait()
        other.stdout.close()
    with lock_folder(tmp_path):
        pass


def writers(folder):
    return [lambda: federation().fit(rounds=1, folder=folder), lambda: federation().save(folder)]


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
    assert "another process is using this folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_lock_is_reentrant_and_sweeps_what_a_killed_process_was_writing(tmp_path):
    (tmp_path / ".checkpoint.pt.0123.part").write_bytes(b"half")
    with lock_folder(tmp_path):
        with lock_folder(tmp_path / "." / "x" / ".."):
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
    assert {"config.json", "metrics.jsonl", "model.safetensors", "report.html", "summary.json"} < set(found)
    assert set(found.values()) == {others}
    clients = folder / "clients"
    assert {mode(path) for path in (clients, *clients.glob("*"))} == {0o700}
    assert {mode(path) for path in clients.glob("*/*")} == {0o600}


def test_a_run_that_ended_before_its_first_round_blocks_nobody(tmp_path, monkeypatch):
    config = config_of(**SMALL, epochs=1)
    with monkeypatch.context() as patch:
        patch.setattr(PlainRound, "recover", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(config, tmp_path)
    assert (tmp_path / "config.json").exists()
    summary = train(config_of(**SMALL, epochs=1, lr=0.01), tmp_path)  # the same flags or others
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == summary.rounds
    with pytest.raises(BadArgument, match="this folder already contains a run"):
        train(config, tmp_path)
    (tmp_path / "checkpoint.pt").unlink()
    (tmp_path / "checkpoint.previous.pt").unlink(missing_ok=True)
    with pytest.raises(BadArgument, match="this folder already contains a run"):  # a model that is done is a run
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
        with pytest.raises(RuntimeError), lock_folder(tmp_path / folder):
            raise RuntimeError
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [".lock"]
    with lock_folder(tmp_path / "c"):
        write_atomically(tmp_path / "c" / "kept", "text")
    assert (tmp_path / "c" / "kept").exists()


@pytest.mark.parametrize("name", [".lock", ".holder"])
@pytest.mark.parametrize("target", ["notes.txt", "nowhere.txt"])
def test_a_link_in_the_place_of_the_lock_or_its_holder_is_refused(tmp_path, name, target):
    notes, folder = tmp_path / "notes.txt", tmp_path / "run"
    notes.write_text("mine")
    folder.mkdir()
    (folder / name).symlink_to(tmp_path / target)
    for write in writers(folder):
        with pytest.raises(
            BadArgument, match=rf"(?s){name}: the lock file must not be a symbolic link.*Fix: remove the link"
        ):
            write()
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["notes.txt"]
    assert notes.read_text() == "mine"
    assert (folder / name).is_symlink()


def test_a_second_name_of_a_file_in_the_place_of_the_holder_is_not_written_to(tmp_path):
    notes, folder = tmp_path / "notes.txt", tmp_path / "run"
    notes.write_text("mine")
    folder.mkdir()
    os.link(notes, folder / ".holder")
    with lock_folder(folder):
        assert str(os.getpid()) in (folder / ".holder").read_text()
    assert notes.read_text() == "mine"
