"""CIFAR from the published archive, its folder or images; pickles are never run, and hostile archives are cut off."""

import contextlib
import os
import pickle
import tarfile
import tracemalloc

import numpy as np
import pytest
import torch
from tests.data.making import (
    cifar10_batches,
    cifar_batch,
    class_folders,
    python2_batch,
    refused,
    write_folder,
    write_tar,
    write_zip,
)

from fedveil.data import archives, cifar, load
from fedveil.data.cifar import read_pickle

GIGABYTE = 2**30


@pytest.fixture(params=["tar", "folder", "folder above", "data folder"])
def published(request, tmp_path, monkeypatch):
    """The `path` argument for CIFAR-10 as published."""
    if request.param == "tar":
        return write_tar(tmp_path / "cifar-10-python.tar.gz", cifar10_batches())
    above = tmp_path / "data" / "cifar10"
    inside = write_folder(above / "cifar-10-batches-py", cifar10_batches())
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path / "data"))
    return {"folder": inside, "folder above": above, "data folder": None}[request.param]


def test_the_published_form_is_read_and_kept_in_the_cache(published, monkeypatch):
    found = load("cifar10", path=published)
    assert (found.train.inputs.shape, found.test.inputs.shape) == ((100, 3, 32, 32), (20, 3, 32, 32))
    assert found.classes[0] == "airplane"
    assert found.train.targets.bincount().tolist() == [10] * 10
    half = load("cifar10", path=published, size=16)
    assert half.train.inputs.shape == (100, 3, 16, 16)
    assert torch.allclose(half.test.inputs[3, 1, 4, 5], found.test.inputs[3, 1, 8:10, 10:12].mean(), atol=1e-6)
    assert torch.equal(half.train.targets, found.train.targets)
    monkeypatch.setattr(cifar, "_read_batches", None)
    assert torch.equal(found.train.inputs, load("cifar10", path=published).train.inputs)


def test_pixels_keep_their_position_label_and_scale(tmp_path):
    found = load("cifar10", path=write_tar(tmp_path / "cifar-10-python.tar.gz", cifar10_batches()))
    raw = np.random.default_rng(5).integers(0, 256, (20, 3, 32, 32), dtype=np.uint8)
    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (cifar.CIFAR10.mean, cifar.CIFAR10.deviation))
    expected = (torch.from_numpy(raw) / 255 - mean) / deviation
    for image, label in zip(*found.test, strict=True):
        distances = (expected - image).abs().amax((1, 2, 3))
        assert distances.min() < 1e-5
        assert int(distances.argmin()) % 10 == label


def test_cifar100_reads_the_fine_labels(tmp_path):
    files = {name: cifar_batch(range(100), "fine_labels") for name in ("train", "test")}
    for path in (
        write_tar(tmp_path / "cifar-100-python.tar.gz", files, "cifar-100-python"),
        write_folder(tmp_path / "cifar-100-python", files),
    ):
        assert load("cifar100", path=path).train.targets.bincount().tolist() == [1] * 100


def dump(value, protocol=2):
    return pickle.dumps(value, protocol=protocol)


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (None, ["it is missing or empty"]),
        (cifar_batch([1, 2])[:-500], ["not a CIFAR file"]),
        (
            dump({"data": np.zeros((2, 3072)), "labels": [1, 2]}),
            ["not a C-ordered uint8 array"],
        ),
        (
            dump({"data": np.zeros((2, 3072), "u1", "F"), "labels": [1, 2]}),
            ["not a C-ordered uint8 array"],
        ),
        (
            dump({"data": np.zeros((2, 9), np.uint8), "labels": [0, 1]}),
            ["expected images of 3072 bytes each"],
        ),
        (cifar_batch([1, 2], "fine_labels"), ["expected 2 labels, one per image, got 0"]),
        (cifar_batch([1, 10, 2]), ["row 1: label 10 is out of range for 10 classes"]),
    ],
)
def test_damage_is_named_by_archive_member_and_row(content, texts, tmp_path):
    files = cifar10_batches() | {"data_batch_3": content}
    path = write_tar(tmp_path / "cifar-10-python.tar.gz", {name: own for name, own in files.items() if own is not None})
    with refused(path, "member data_batch_3", *texts, "download the archive again"):
        load("cifar10", path=path)


def test_a_damaged_archive_is_named_and_image_files_must_have_the_known_classes(tmp_path):
    path = write_tar(tmp_path / "cifar-10-python.tar.gz", cifar10_batches())
    for content in (path.read_bytes()[:-5000], b"", b"x" * 99):
        path.write_bytes(content)
        with refused(path, "not a readable tar archive", "download it again"):
            load("cifar10", path=path)
    files = class_folders(cifar.CIFAR10.classes, side=32)
    above = tmp_path / "above"
    above.mkdir()
    write_zip(above / "cifar10_jpg.zip", files)
    for path in (write_folder(tmp_path / "jpg", files), above / "cifar10_jpg.zip", above):
        found = load("cifar10", path=path, train_size=20, test_size=10)
        assert found.train.targets.bincount().tolist() == [2] * 10
        assert found.test.targets.bincount().tolist() == [1] * 10
    with refused("train/ has no images of truck"):
        load("cifar10", path=write_folder(tmp_path / "b", class_folders(cifar.CIFAR10.classes[:9])))


@pytest.mark.parametrize("protocol", ["Python 2", 2, 3, 4])
def test_pixels_and_labels_are_read_from_pickles_of_every_age(protocol):
    pixels = np.arange(300 * 3072, dtype=np.uint8).reshape(300, 3072)
    labels = [row % 100 for row in range(300)]
    content = {"filenames": ["a.png"] * 300, "labels": labels, "data": pixels, "batch_label": "training batch 1 of 5"}
    raw = python2_batch(pixels, labels) if protocol == "Python 2" else dump(content, protocol)
    found, read = read_pickle(raw, "labels")
    assert found == pixels.tobytes()
    assert list(read) == labels


class Hostile:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("code", ["mkdir", "eval"])
def test_a_pickle_is_never_run(protocol, code, tmp_path):
    path = tmp_path / "owned"
    hostile = Hostile(os.mkdir, str(path)) if code == "mkdir" else Hostile(eval, f"__import__('os').mkdir({path!r})")
    for name, content in {"data_batch_1": {"data": hostile}, "data_batch_2": [hostile]}.items():
        home = write_folder(tmp_path / name, cifar10_batches() | {name: dump(content, protocol)})
        with refused(home, f"member {name}: expected images of 3072 bytes each"):
            load("cifar10", path=home)
    assert not path.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02Nr\xff\xff\xff\x0f.",  # nine bytes: value 2**28 - 1 of a list
        b"\x80\x05\x96\x00\x00\x00\x00\x04\x00\x00\x00.",  # a bytearray of 16 GB
        b"\x80\x04\x8e\x00\x00\x00\x00\x04\x00\x00\x00.",  # bytes, as many
        b"Np268435455\n.",
        b"\x80\x02U\x06labels" + b"K\x01" * 10**6 + b".",  # a million labels
    ],
)
def test_a_pickle_gets_little_more_memory_than_its_bytes(content):
    tracemalloc.start()
    with contextlib.suppress(ValueError):
        assert not read_pickle(content, "labels")[0]
    assert tracemalloc.get_traced_memory()[1] < 10**7
    tracemalloc.stop()


def test_a_file_that_is_or_claims_to_be_large_is_not_read(tmp_path, monkeypatch):
    assert archives.MAX_BYTES > 170_498_071  # CIFAR-10, and train of CIFAR-100
    assert cifar.MAX_UNPACKED > 2 * 186_000_000
    monkeypatch.setattr(cifar, "MAX_UNPACKED", 10**6)
    path, home = tmp_path / "cifar-10-python.tar", write_folder(tmp_path / "batches", cifar10_batches())
    os.truncate(home / "data_batch_2", 8 * GIGABYTE)  # a sparse file
    with refused("member data_batch_2: cannot be read: it is larger than"):
        load("cifar10", path=home)
    for kind in (tarfile.REGTYPE, tarfile.XHDTYPE):  # a file of 8 GB, and a header of 8 GB
        member = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
        member.type, member.size = kind, 8 * GIGABYTE
        for size in (10**5, GIGABYTE):
            path.write_bytes(member.tobuf())
            os.truncate(path, size)
            tracemalloc.start()
            with refused(path, "not a readable tar archive", "Fix: "):
                load("cifar10", path=path)
            assert tracemalloc.get_traced_memory()[1] < 10**8
            tracemalloc.stop()
    write_tar(tmp_path / "bomb.tar.gz", {"large": bytes(2 * 10**6)} | cifar10_batches())
    with refused("not a readable tar archive: it is larger than 1000000 bytes"):
        load("cifar10", path=tmp_path / "bomb.tar.gz")


@pytest.mark.slow
def test_the_real_cifar10_is_balanced_and_standard(real_data):
    real_data("cifar10")
    found = load("cifar10")
    assert found.train.targets.bincount().tolist() == [5000] * 10
    assert found.test.targets.bincount().tolist() == [1000] * 10
    assert found.train.inputs.mean((0, 2, 3)).abs().max() < 0.01
