"""The catalogue: every data set with its files; unknown names, options and unreadable files are refused."""

import inspect
import os

import pytest
from tests.data.making import class_folders, refused, write_zip

from fedveil.cli import main
from fedveil.data import list_datasets, load
from fedveil.data.catalogue import CATALOGUE, find_loader

TOO_LONG = "x" * 300
FILES = ("bank", "cifar10", "cifar100", "csv", "images", "lesion")


def test_every_data_set_has_a_source_a_licence_and_a_loader_with_typed_options():
    for info in list_datasets():
        assert all((info.description, info.source, info.licence))
        for option in inspect.signature(find_loader(info.name)).parameters.values():
            assert option.kind is option.KEYWORD_ONLY
            assert option.annotation is not option.empty
    assert [info.name for info in list_datasets()] == sorted(CATALOGUE)


@pytest.mark.parametrize(
    ("name", "options", "texts"),
    [
        ("cifar-10", {}, ["load: there is no data set 'cifar-10'", "use 'cifar10'"]),
        ("digits", {"flatt": True}, ["load('digits'): there is no option 'flatt'", "use 'flat'"]),
        ("digits", {"flat": "yes"}, ["flat must be a valid boolean, got 'yes'"]),
        ("cifar10", {"size": 20}, ["size must be 32, 16 or 8, got 20"]),
        ("lesion", {"size": 65}, ["size must be less than or equal to 64, got 65"]),
        ("csv", {"ignore": [3]}, ["ignore must be a valid string, got [3]"]),
        ("digits", {"path": "x"}, ["the data set comes with the library and does not accept a path"]),
        ("images", {}, ["load('images'): the data set needs a path", "load('images', path="]),
        ("csv", {"path": "~nobody-of-this-name/mine.csv"}, ["~nobody-of-this-name/mine.csv: there is no such file"]),
    ],
)
def test_what_cannot_be_loaded_is_refused(name, options, texts):
    with refused(*texts):
        load(name, **options)


@pytest.mark.parametrize("name", ["bank", "cifar10", "cifar100", "lesion"])
def test_missing_files_are_named_with_their_folder(name, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path))
    with refused(tmp_path / name, "no such folder", "put ", f"into {tmp_path / name}", f"`fedveil data get {name}`"):
        load(name)
    (tmp_path / name).mkdir()
    with refused(tmp_path / name, f"it does not contain '{name}'", f"`fedveil data get {name}`"):
        load(name)
    with refused(tmp_path / "gone.zip", "there is no such file", "put "):
        load(name, path=tmp_path / "gone.zip")


def test_the_catalogue_says_what_is_there(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path))
    archive = tmp_path / "cifar10" / "cifar10_jpg.zip"
    for path in (archive, tmp_path / "cifar100" / "a.zip", tmp_path / "cifar100" / "b.zip"):
        path.parent.mkdir(exist_ok=True)
        write_zip(path, class_folders())
    found = {info.name: (info.state, info.where) for info in list_datasets()}
    assert found["digits"] == ("embedded", None)
    assert found["csv"] == ("yours", None)
    assert found["cifar10"] == ("found", archive)
    assert found["cifar100"] == ("found", tmp_path / "cifar100")
    assert found["bank"] == ("missing", tmp_path / "bank")
    with refused(tmp_path, "several archives could contain 'cifar100': a.zip, b.zip", "as path="):
        load("cifar100")


@pytest.mark.parametrize("name", FILES)
def test_a_path_that_cannot_be_opened_is_named(name, tmp_path):
    with refused(tmp_path / TOO_LONG, "cannot be read: File name too long", "Fix: use readable files and folders"):
        load(name, path=tmp_path / TOO_LONG)
    for target in ("gone", "link"):  # a link to nothing, and to itself
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(tmp_path / target)
        with refused(tmp_path / "link", "it is a broken link", "Fix: "):
            load(name, path=tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with refused(path, "cannot be read: it is not a regular file", "Fix: "):
            load(name, path=path, **({"target": "y"} if name == "csv" else {}))


def test_a_data_folder_that_cannot_be_read_is_an_error_without_a_traceback(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path / TOO_LONG))
    assert main(["data", "list"]) == 0
    assert {info.state for info in list_datasets()} == {"embedded", "missing", "yours"}
    assert main(["train", "--data", "bank", "--out", str(tmp_path / "run")]) == 2
    assert "cannot be read: File name too long" in capsys.readouterr().err
