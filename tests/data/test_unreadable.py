"""What the operating system refuses is an error that names the file; nothing but regular files is read."""

import os

import pytest
import torch
from tests.data.making import (
    bank_row,
    bank_text,
    cifar10_batches,
    class_folders,
    lesion_files,
    picture,
    refused,
    write_folder,
)

from fedveil.cli import main
from fedveil.data import available, get, load

NOT_ROOT = pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
TOO_LONG = "x" * 300
SOURCES = ("bank", "cifar10", "cifar100", "csv", "images", "lesion")


def options(name):
    return {"target": "y"} if name == "csv" else {}


@pytest.mark.parametrize("name", SOURCES)
def test_a_name_that_no_file_can_have_is_refused(name, tmp_path):
    with refused(tmp_path / TOO_LONG, "cannot be read: File name too long", "Fix: use readable files and folders"):
        load(name, path=tmp_path / TOO_LONG, **options(name))


@pytest.mark.parametrize("name", SOURCES)
def test_a_link_that_leads_nowhere_is_refused(name, tmp_path):
    for target in ("gone", "link"):  # a link to nothing, and to itself
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(tmp_path / target)
        with refused(tmp_path / "link", "it is a link to a file that is not there", "Fix: "):
            load(name, path=tmp_path / "link", **options(name))


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "images", "lesion"])
def test_a_pipe_is_no_archive(name, tmp_path):
    os.mkfifo(tmp_path / "pipe.zip")
    with refused(tmp_path / "pipe.zip", "cannot be read: it is not a regular file", "Fix: "):
        load(name, path=tmp_path / "pipe.zip")


@pytest.mark.parametrize("name", ["cifar10", "lesion"])
def test_an_archive_in_the_data_folder_that_leads_nowhere_is_named(name, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path))
    (tmp_path / name).mkdir()
    (tmp_path / name / "some.zip").symlink_to(tmp_path / "gone")
    with refused(tmp_path / name / "some.zip", "cannot be read: No such file or directory", "Fix: "):
        load(name)


def test_a_folder_is_no_table_and_a_user_that_is_not_there_has_no_files(tmp_path):
    with refused(tmp_path, "it is a folder, not a CSV file", "Fix: "):
        load("csv", path=tmp_path, target="y")
    with refused("~nobody-of-this-name/mine.csv: there is no such file", "Fix: "):
        load("csv", path="~nobody-of-this-name/mine.csv", target="y")


def irregular(kind, path):
    """Put something in place of a file that cannot be read like one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path.parent / "gone")


@pytest.mark.parametrize(
    ("kind", "text"), [("pipe", "it is not a regular file"), ("link", "No such file or directory")]
)
class TestWhatIsNoFile:
    def test_in_place_of_an_image_is_named(self, kind, text, tmp_path):
        home = write_folder(tmp_path / "pets", class_folders())
        irregular(kind, home / "train/cat/0.png")
        with refused(home, "member train/cat/0.png: cannot be read:", text, "Fix: replace it or leave it out"):
            load("images", path=home, size=8)

    def test_in_place_of_a_lesion_or_their_table_is_named(self, kind, text, tmp_path):
        home = write_folder(tmp_path / "lesion", lesion_files())
        irregular(kind, home / "images/ISIC_00000.jpg")
        with refused(home, "member images/ISIC_00000.jpg: cannot be read:", text):
            load("lesion", path=home)
        irregular(kind, home / "HAM10000_metadata.csv")
        with refused(home, "member HAM10000_metadata.csv: cannot be read:", text):
            load("lesion", path=home)

    def test_in_place_of_a_batch_is_missing(self, kind, text, tmp_path):
        home = write_folder(tmp_path / "cifar", cifar10_batches())
        irregular(kind, home / "data_batch_3")
        with refused(home, "member data_batch_3: it is missing or empty"):
            load("cifar10", path=home)

    def test_beside_the_images_is_not_read(self, kind, text, tmp_path):
        home = write_folder(tmp_path / "pets", class_folders())
        irregular(kind, home / "notes/readme")
        assert len(load("images", path=home, size=8).train.targets) == 6


def test_a_link_to_an_image_is_read_and_a_change_of_it_noticed(tmp_path):
    home = write_folder(tmp_path / "pets", class_folders())
    (home / "train/cat/0.png").rename(tmp_path / "elsewhere.png")
    (home / "train/cat/0.png").symlink_to(tmp_path / "elsewhere.png")
    first = load("images", path=home, size=8)
    (tmp_path / "elsewhere.png").write_bytes(picture((255, 255, 255), 9))
    assert not torch.equal(first.train.inputs, load("images", path=home, size=8).train.inputs)


def test_file_names_that_are_not_utf_8_are_read(tmp_path):
    home = write_folder(tmp_path / "pets", class_folders())
    os.rename(home / "train/cat/0.png", os.fsencode(home / "train/cat") + b"/\xff.png")
    assert len(load("images", path=home, size=8).train.targets) == 6


@NOT_ROOT
def test_without_permission_nothing_is_left_out_in_silence(tmp_path):
    table = tmp_path / "bank.csv"
    table.write_text(bank_text(bank_row(number) for number in range(20)))
    home = write_folder(tmp_path / "pets", class_folders())
    (home / "train/cat/0.png").chmod(0)
    with refused(home, "member train/cat/0.png: cannot be read: [Errno 13] Permission denied"):
        load("images", path=home, size=8)
    for closed, name, path in (
        (table, "bank", table),
        (home / "train/dog", "images", home),
        (home, "images", home),
        (tmp_path, "bank", table),
    ):
        mode = closed.stat().st_mode
        closed.chmod(0)
        try:
            with refused("cannot be read: Permission denied", "Fix: "):
                load(name, path=path)
        finally:
            closed.chmod(mode)


def test_the_command_line_tells_it_without_a_traceback(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path / TOO_LONG))
    assert main(["data", "list"]) == 0
    assert {info.state for info in available()} == {"embedded", "missing", "yours"}
    assert main(["train", "--data", "bank", "--out", str(tmp_path / "run")]) == 2
    assert "cannot be read: File name too long" in capsys.readouterr().err


def test_what_stands_in_the_way_of_a_download_is_named(tmp_path):
    (tmp_path / "cifar10/cifar-10-python.tar.gz").mkdir(parents=True)
    with refused("cifar-10-python.tar.gz: there is another file of this name", "move it away"):
        get("cifar10", tmp_path)
    (tmp_path / "file").write_text("")
    with refused("the download failed", "Not a directory", f"put cifar-10-python.tar.gz into {tmp_path / 'file'}"):
        get("cifar10", tmp_path / "file")
    with refused("the download failed", "File name too long", "put bank-additional-full.csv into"):
        get("bank", tmp_path / TOO_LONG)
