"""Sizes that no machine has the memory for are refused, with how much they need."""

import pytest
from tests.data.making import class_folders, write_folder

from fedveil.cli import main

IMAGES = ["train", "--data", "images", "--path", "pets", "--model", "cnn", "--size"]
INSPECT = ["inspect", "fedveil.models:lenet", "--input"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([*IMAGES, "2000000"], "10 images of 2000000 x 2000000 pixels need 111,758.7 GiB of memory, more than"),
        ([*IMAGES, str(10**30)], "pixels need more memory than this machine has"),
        (["train", "--hidden", str(10**13)], "the parameters of this mlp need 2,384,185.8 GiB of memory"),
        (["train", "--hidden", str(10**30)], "the parameters of this mlp need more memory than this machine has"),
        ([*INSPECT, "3,2000000,2000000"], "of 3,2000000,2000000 need 89,407.0 GiB"),
        ([*INSPECT, "9" * 30], "need more memory than this machine has"),
    ],
)
def test_a_command_says_how_much_memory_is_missing(tmp_path, words, text, monkeypatch, capsys):
    monkeypatch.setenv("FEDVEIL_CACHE", str(tmp_path / "cache"))
    write_folder(tmp_path / "pets", class_folders())
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert text in error
    assert "Fix: choose a smaller" in error or "Fix: use smaller sizes" in error
    assert not (tmp_path / "runs").exists()
