"""Files from elsewhere: none hangs a reader, fills the memory or becomes other numbers than it holds."""

import io
import os
import pickle
import resource
import tarfile
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
from tests.data.making import bank_row, bank_text, cifar10_batches, class_folders, refused, write_folder, write_tar
from tests.data.test_download import files_in, offer, server

from fedveil.data import archives, cifar, get, load
from fedveil.data.catalogue import ABOUT

__all__ = ["server"]
GIGABYTE = 2**30


@pytest.mark.parametrize("name", ["bank", "csv"])
def test_a_pipe_is_no_table(name, tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")
    options = {"target": "y"} if name == "csv" else {}
    for path in (tmp_path / "pipe.csv", "/dev/zero"):
        with refused(path, "cannot be read: it is not a regular file", "Fix: "):
            load(name, path=path, **options)


def test_a_pipe_in_the_cache_is_not_read(tmp_path, cache):
    home = write_folder(tmp_path / "pets", class_folders())
    first = load("images", path=home, size=8)
    (file,) = cache.glob("*.npz")
    file.unlink()
    os.mkfifo(file)
    assert torch.equal(load("images", path=home, size=8).train.inputs, first.train.inputs)


def table(tmp_path, rows):
    path = tmp_path / "mine.csv"
    path.write_text("\n".join(["a,b,y", *rows]))
    return path


@pytest.mark.parametrize("cell", ["1e308", "-1e308", "1e200"])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_number_that_overflows_when_scaled_is_refused_by_line_and_column(tmp_path, cell, task):
    rows = [f"{number},{number % 3},{number % 2}" for number in range(20)]
    path = table(tmp_path, [*rows[:7], f"1,{cell},1", *rows[7:]])
    with refused(path, "line 9, column 'b'", f"{cell!r} is too large to be standardised", "Fix: correct the cell"):
        load("csv", path=path, target="y", task=task)
    path = table(tmp_path, [*rows[:7], f"1,1,{cell}", *rows[7:]])
    if task == "regression":
        with refused(path, "line 9, column 'y'", "is too large to be standardised"):
            load("csv", path=path, target="y", task=task)


@pytest.mark.parametrize("line", range(2, 22))
def test_wherever_it_is_what_is_loaded_is_finite_or_refused(tmp_path, line):
    rows = [f"{number},5,{number % 2}" for number in range(20)]
    rows[line - 2] = "1,1e60,1"  # scaled by itself if it is a test record: beyond float32
    try:
        data = load("csv", path=table(tmp_path, rows), target="y")
        assert data.train.inputs.isfinite().all()
        assert data.test.inputs.isfinite().all()
        assert (data.train.inputs[:, 1] > 1).any()
    except ValueError as error:
        assert f"line {line}, column 'b'" in str(error)  # noqa: PT017


def test_so_it_is_for_the_bank(tmp_path):
    rows = [bank_row(number) for number in range(30)]
    rows[4] = bank_row(4, duration="1e308")
    (tmp_path / "bank.csv").write_text(bank_text(rows))
    with refused("line 6, column 'duration'", "'1e308' is too large to be standardised"):
        load("bank", path=tmp_path / "bank.csv")


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02Nr\xff\xff\xff\x0f.",  # nine bytes: value 2**28 - 1 of a list
        b"\x80\x05\x96\x00\x00\x00\x00\x04\x00\x00\x00.",  # a bytearray of 16 GB
        b"\x80\x04\x8e\x00\x00\x00\x00\x04\x00\x00\x00.",  # bytes, as many
        b"Np268435455\n.",
    ],
)
def test_a_pickle_gets_no_more_memory_than_its_bytes_explain(content):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with refused("here: not a CIFAR file", "Fix: fetch the archive again"):
        cifar.read_pickle("here", content)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB


def test_a_member_that_claims_to_be_large_is_not_read(tmp_path):
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
        member.size = 8 * GIGABYTE
        archive.fileobj.write(member.tobuf())  # Python 3.13 lets no archive claim what it does not hold
        archive.fileobj.write(bytes(10**6))
    with refused("member data_batch_1: it has 8589934592 bytes", "Fix: fetch"):
        load("cifar10", path=tmp_path)
    home = write_folder(tmp_path / "batches", cifar10_batches())
    os.truncate(home / "data_batch_2", 8 * GIGABYTE)
    with refused("member data_batch_2: it has 8589934592 bytes"):
        load("cifar10", path=home)


def test_an_archive_is_not_unpacked_without_end_and_not_beyond_what_is_wanted(tmp_path, monkeypatch):
    batches = cifar10_batches()
    monkeypatch.setattr(cifar, "MOST_UNPACKED", 10**6)
    large = {"large": bytes(2 * 10**6)}
    path = write_tar(tmp_path / "cifar-10-python.tar.gz", batches | large)
    assert len(load("cifar10", path=path).train.targets) == 100
    write_tar(path, large | batches)
    with refused(path, "not a readable tar archive: it has more than 1000000 bytes", "Fix: "):
        load("cifar10", path=path)


def test_a_long_header_of_a_member_is_not_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar, "MOST_UNPACKED", 10**6)
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, GIGABYTE
    path = tmp_path / "cifar-10-python.tar"
    path.write_bytes(header.tobuf())
    os.truncate(path, GIGABYTE)  # a sparse file
    tracemalloc.start()
    with refused(path, "not a readable tar archive"):
        load("cifar10", path=path)
    assert tracemalloc.get_traced_memory()[1] < 10**8
    tracemalloc.stop()


@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_an_image_of_too_many_bytes_is_refused(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MOST_BYTES", 10**5)
    monkeypatch.setattr(archives.read_member, "__defaults__", (10**5,))
    files = class_folders() | {"train/cat/0.png": bytes(10**6)}
    path = write_folder(tmp_path / "pets", files) if kind == "folder" else tmp_path / "pets.zip"
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        assert path.stat().st_size < 10**5
    with refused(path, "member train/cat/0.png: cannot be read: it has more than 100000 bytes", "Fix: replace it"):
        load("images", path=path, size=8)


def test_the_limits_are_beyond_the_published_files():
    assert archives.MOST_BYTES > 155_261_807  # train of CIFAR-100
    assert cifar.MOST_UNPACKED > 2 * 186_000_000
    assert ABOUT["cifar10"].download.most > 170_498_071


@pytest.mark.parametrize("told", [True, False])
def test_a_server_that_sends_too_much_is_cut_off(server, tmp_path, monkeypatch, told):
    offer(monkeypatch, server.url)
    about = ABOUT["cifar10"]
    monkeypatch.setitem(ABOUT, "cifar10", about._replace(download=about.download._replace(most=10**5)))
    if not told:
        monkeypatch.setattr(server.RequestHandlerClass, "send_header", lambda *_: None)
    with refused(server.url, "it sends more than the 100000 bytes that are expected at most", "Fix: put cifar-10"):
        get("cifar10", tmp_path)
    assert files_in(tmp_path) == []


def test_a_pipe_in_place_of_a_part_is_named(server, tmp_path, monkeypatch):
    offer(monkeypatch, server.url)
    (tmp_path / "cifar10").mkdir()
    os.mkfifo(tmp_path / "cifar10" / "cifar-10-python.tar.gz.part")
    with refused(server.url, "it is not a regular file"):
        get("cifar10", tmp_path)


def test_a_bomb_within_a_download_is_not_unpacked(server, tmp_path, monkeypatch):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bank.csv", bytes(10**7))
    server.files["/file"] = buffer.getvalue()
    offer(monkeypatch, server.url, "bank", inside=("bank.csv",), file="bank-additional-full.csv")
    about = ABOUT["bank"]
    monkeypatch.setitem(ABOUT, "bank", about._replace(download=about.download._replace(most=10**6)))
    with refused(server.url, "the download has no readable bank.csv", "Fix: put bank-additional"):
        get("bank", tmp_path)
    assert files_in(tmp_path) == []


def test_honest_batches_pass_the_check_of_memory():
    content = pickle.dumps({"data": np.zeros((3, 3072), np.uint8), "labels": [[n] for n in range(300)]}, protocol=4)
    assert len(cifar.read_pickle("here", content)["labels"]) == 300
