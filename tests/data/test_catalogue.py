"""The catalogue: every data set is registered with its files, and unknown names and options are refused."""

import inspect

import pytest
from tests.data.making import class_folders, refused, write_zip

from fedveil.data import available, load
from fedveil.data.catalogue import LOADERS


def test_every_loader_is_in_the_catalogue():
    assert [info.name for info in available()] == sorted(LOADERS)


def test_options_are_keywords_with_types():
    for loader in LOADERS.values():
        for option in inspect.signature(loader).parameters.values():
            assert option.kind is option.KEYWORD_ONLY
            assert option.annotation is not option.empty


@pytest.mark.parametrize(
    ("name", "options", "texts"),
    [
        ("cifar-10", {}, ["load: there is no data set 'cifar-10'", "'cifar10' is the nearest of"]),
        ("zzzz", {}, ["there is no data set 'zzzz'", "one of 'bank'"]),
        ("digits", {"flatt": True}, ["load('digits'): there is no option 'flatt'", "'flat' is the nearest"]),
        ("diabetes", {"flat": True}, ["load('diabetes'): there is no option 'flat'"]),
        ("digits", {"flat": "yes"}, ["flat is 'yes'", "give flat as bool"]),
        ("cifar10", {"train_size": 2.5}, ["train_size is 2.5", "train_size as int or None"]),
        ("digits", {"path": "x"}, ["it comes with the library and takes no path"]),
        ("images", {}, ["load('images'): it needs a path", "load('images', path="]),
        ("images", {"path": "/no/such"}, ["/no/such: there is no such file"]),
        ("csv", {}, ["load('csv'): it needs a path"]),
    ],
)
def test_what_cannot_be_loaded_is_refused(name, options, texts):
    with refused(*texts):
        load(name, **options)


@pytest.mark.parametrize("name", ["bank", "cifar10", "cifar100", "lesion"])
def test_missing_files_are_named_with_their_place(name, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path))
    with refused(tmp_path / name, "no such folder", "put ", f"into {tmp_path / name}", f"`fedveil data get {name}`"):
        load(name)
    (tmp_path / name).mkdir()
    with refused(tmp_path / name, f"no files of '{name}' here", f"`fedveil data get {name}`"):
        load(name)
    with refused(tmp_path / "gone.zip", "there is no such file", "put "):
        load(name, path=tmp_path / "gone.zip")


def test_the_catalogue_says_what_is_there(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path))
    archive = tmp_path / "cifar10" / "cifar10_jpg.zip"
    for path in (archive, tmp_path / "cifar100" / "a.zip", tmp_path / "cifar100" / "b.zip"):
        path.parent.mkdir(exist_ok=True)
        write_zip(path, class_folders())
    found = {info.name: (info.state, info.where) for info in available()}
    assert found["digits"] == ("embedded", None)
    assert found["csv"] == ("yours", None)
    assert found["cifar10"] == ("found", archive)
    assert found["cifar100"] == ("found", tmp_path / "cifar100")
    assert found["bank"] == ("missing", tmp_path / "bank")


def test_every_data_set_names_source_and_licence():
    assert all(info.description and info.source and info.licence for info in available())
