"""Sizes that no machine has the memory for are refused, with how much they need."""

import pytest
from tests.data.making import class_folders, write_folder

from fedveil.cli import main
from fedveil.data import load
from fedveil.errors import BadArgument


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVEIL_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (2_000_000, "10 images of 2000000 x 2000000 pixels need 111,758.7 GiB of memory, more than there is"),
        (10**30, "pixels need more memory than there is"),
    ],
)
def test_images_are_refused_before_they_are_decoded(tmp_path, size, text):
    home = write_folder(tmp_path / "pets", class_folders())
    with pytest.raises(BadArgument, match=f"(?s){text}.*Fix: choose a smaller size, such as --size 32"):
        load("images", path=home, size=size)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--data", "images", "--path", "pets", "--model", "cnn", "--size", "2000000"], "need 111,758.7 GiB of memory"),
        (["--data", "digits", "--hidden", str(10**13)], "the values of this mlp need 2,384,185.8 GiB of memory"),
        (["--data", "digits", "--hidden", str(10**30)], "the values of this mlp need more memory than there is"),
    ],
    ids=["images", "hidden", "beyond any number"],
)
def test_train_says_how_much_memory_is_missing(tmp_path, words, text, monkeypatch, capsys):
    write_folder(tmp_path / "pets", class_folders())
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words, "--epochs", "1", "--out", "run"]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert "Fix: choose a smaller" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("sizes", "amount"), [("3,2000000,2000000", "89,407.0 GiB of memory, "), ("9" * 30, "")])
def test_inspect_says_how_much_memory_its_input_needs(sizes, amount, capsys):
    assert main(["inspect", "fedveil.models:lenet", "--input", sizes]) == 2
    more = "more than there is" if amount else "more memory than there is"
    assert f"--input: two records of {sizes} need {amount}{more}" in capsys.readouterr().err
