"""CIFAR from the published archive, its folder or images; hostile pickles do nothing."""

import os
import pickle

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

from fedveil.data import cifar, load
from fedveil.data.cifar import read_pickle
from fedveil.errors import BadArgument


@pytest.fixture(params=["tar", "folder", "folder above", "data folder"])
def published(request, tmp_path, monkeypatch):
    """The `path` argument for CIFAR-10 as published."""
    if request.param == "tar":
        return write_tar(tmp_path / "cifar-10-python.tar.gz", cifar10_batches())
    above = tmp_path / "data" / "cifar10"
    inside = write_folder(above / "cifar-10-batches-py", cifar10_batches())
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path / "data"))
    return {"folder": inside, "folder above": above, "data folder": None}[request.param]


def test_the_published_form_is_read(published):
    found = load("cifar10", path=published)
    assert (found.train.inputs.shape, found.test.inputs.shape) == ((100, 3, 32, 32), (20, 3, 32, 32))
    assert found.classes[0] == "airplane"
    assert found.train.targets.bincount().tolist() == [10] * 10


def test_pixels_keep_their_place_label_and_scale(tmp_path):
    found = load("cifar10", path=write_tar(tmp_path / "cifar-10-python.tar.gz", cifar10_batches()))
    raw = np.random.default_rng(5).integers(0, 256, (20, 3, 32, 32), dtype=np.uint8)
    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (cifar.TEN.mean, cifar.TEN.deviation))
    expected = (torch.from_numpy(raw) / 255 - mean) / deviation
    for image, label in zip(*found.test, strict=True):
        distances = (expected - image).abs().amax((1, 2, 3))
        assert distances.min() < 1e-5
        assert int(distances.argmin()) % 10 == label


def test_smaller_images_are_means_of_neighbours(published):
    full, half = load("cifar10", path=published), load("cifar10", path=published, size=16)
    assert half.train.inputs.shape == (100, 3, 16, 16)
    assert torch.allclose(half.test.inputs[3, 1, 4, 5], full.test.inputs[3, 1, 8:10, 10:12].mean(), atol=1e-6)
    assert torch.equal(half.train.targets, full.train.targets)
    with pytest.raises(BadArgument, match="use one of 32, 16, 8"):
        load("cifar10", path=published, size=20)


def test_batches_are_kept_in_the_cache(published, monkeypatch):
    first = load("cifar10", path=published)
    monkeypatch.setattr(cifar, "_read_batches", None)
    assert torch.equal(first.train.inputs, load("cifar10", path=published).train.inputs)


def test_cifar100_reads_the_fine_labels(tmp_path):
    files = {name: cifar_batch(range(100), "fine_labels") for name in ("train", "test")}
    path = write_tar(tmp_path / "cifar-100-python.tar.gz", files, "cifar-100-python")
    assert load("cifar100", path=path).train.targets.bincount().tolist() == [1] * 100
    folder = write_folder(tmp_path / "cifar-100-python", files)
    assert len(load("cifar100", path=folder).test.inputs) == 100


def test_cifar_as_image_files(tmp_path):
    files = class_folders(cifar.TEN.classes, side=32)
    above = tmp_path / "above"
    above.mkdir()
    write_zip(above / "cifar10_jpg.zip", files)
    for path in (write_folder(tmp_path / "jpg", files), above / "cifar10_jpg.zip", above):
        found = load("cifar10", path=path, train_size=20, test_size=10)
        assert found.train.targets.bincount().tolist() == [2] * 10
        assert found.test.targets.bincount().tolist() == [1] * 10


def test_image_folders_must_have_the_known_classes(tmp_path):
    with refused("train/ has unknown classes: lorry", "airplane"):
        load("cifar10", path=write_folder(tmp_path / "a", class_folders((*cifar.TEN.classes[:9], "lorry"))))
    with refused("train/ has no images of truck"):
        load("cifar10", path=write_folder(tmp_path / "b", class_folders(cifar.TEN.classes[:9])))


def test_several_archives_are_refused(tmp_path):
    for name in ("a.zip", "b.zip"):
        write_zip(tmp_path / name, class_folders())
    with refused(tmp_path, "several archives could be 'cifar10': a.zip, b.zip", "with path="):
        load("cifar10", path=tmp_path)


def replaced(name, content):
    files = cifar10_batches()
    files.pop(name)
    return files | ({name: content} if content is not None else {})


def no_images():
    return pickle.dumps({"data": np.zeros((2, 9), np.uint8), "labels": [0, 1]}, protocol=2)


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (None, ["it is missing or empty"]),
        (b"", ["it is missing or empty"]),
        (cifar_batch([1, 2])[:-500], ["not a CIFAR file"]),
        (b"garbage", ["not a CIFAR file"]),
        (pickle.dumps([1, 2], protocol=2), ["it holds list, not a dictionary"]),
        (pickle.dumps({"data": np.zeros((2, 3072))}, protocol=2), ["not a CIFAR file: an array is not of bytes"]),
        (pickle.dumps({"labels": [1]}, protocol=2), ["it has no images of 3072 bytes"]),
        (no_images(), ["it has no images of 3072 bytes"]),
        (cifar_batch([1, 2], "fine_labels"), ["no labels for 2 images"]),
        (cifar_batch([1, 10, 2]), ["row 1: label 10 is not one of 10 classes"]),
    ],
)
def test_damage_is_named_by_archive_member_and_row(content, texts, tmp_path):
    path = write_tar(tmp_path / "cifar-10-python.tar.gz", replaced("data_batch_3", content))
    with refused(path, "member data_batch_3", *texts, "fetch the archive again"):
        load("cifar10", path=path)


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"x" * 99])
def test_a_damaged_archive_is_named(damage, tmp_path):
    path = write_tar(tmp_path / "cifar-10-python.tar.gz", cifar10_batches())
    path.write_bytes(damage(path.read_bytes()))
    with refused(path, "not a readable tar archive", "fetch it again"):
        load("cifar10", path=path)


def test_a_pickle_of_python_2_is_read():
    pixels = np.arange(2 * 3072, dtype=np.uint8).reshape(2, 3072)
    found = read_pickle("here", python2_batch(pixels, [3, 4]))
    assert np.array_equal(found["data"], pixels)
    assert found["labels"] == [3, 4]


class Hostile:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "call",
    [
        lambda path: Hostile(os.mkdir, str(path)),
        lambda path: Hostile(eval, f"__import__('os').mkdir({str(path)!r})"),
        lambda path: Hostile(getattr, os, "mkdir"),
        lambda path: Hostile(np.load, str(path)),
    ],
)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_hostile_pickle_is_refused_and_does_nothing(call, protocol, tmp_path):
    path = tmp_path / "owned"
    hostile = call(path)
    if hostile.call[0] is getattr:
        content = b"\x80\x02cbuiltins\ngetattr\n."
    else:
        content = pickle.dumps({"data": hostile}, protocol=protocol)
    with refused("here: not a CIFAR file: it asks for", "which no CIFAR file needs"):
        read_pickle("here", content)
    assert not path.exists()


def test_words_of_a_pickle_may_not_be_reached_by_dots():
    with refused("it asks for numpy.ndarray.tofile"):
        read_pickle("here", b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93.")


def test_unusual_encodings_are_refused():
    with refused("an unusual encoding"):
        read_pickle("here", b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00rot13\x86R.")
