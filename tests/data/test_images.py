"""Image folders and zips: classes, sizes, the cache, and errors that name the file."""

import os
import sys
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image
from tests.data.making import class_folders, picture, refused, write_folder, write_zip

from fedveil.data import archives, images, load


@pytest.fixture(params=["folder", "zip", "zip with a top folder"])
def source(request, tmp_path):
    files = class_folders() | {"README.txt": b"not an image", "train/.DS_Store": b"", "__MACOSX/train/cat/x": b"?"}
    if request.param == "folder":
        return write_folder(tmp_path / "pets", files)
    top = "pets-master/" if "top" in request.param else ""
    return write_zip(tmp_path / "pets.zip", {top + name: content for name, content in files.items()})


def test_folders_are_classes_and_channels_are_standardised_on_the_training_part(source):
    found = load("images", path=source, size=8)
    assert (found.name, found.classes, found.outputs) == ("pets", ("cat", "dog"), 2)
    assert (found.train.inputs.shape, found.test.inputs.shape) == ((6, 3, 8, 8), (4, 3, 8, 8))
    assert found.train.targets.bincount().tolist() == [3, 3]
    assert torch.equal(found.train.inputs[:, 0, 0, 0] > 0, found.train.targets == 1)  # red is the class
    torch.testing.assert_close(found.train.inputs.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    deviations = found.train.inputs.std((0, 2, 3), correction=0)
    torch.testing.assert_close(deviations, torch.tensor([1.0, 1.0, 0.0]))  # blue is the same in all, and stays 0
    for size in (5, 9):
        assert load("images", path=source, size=size).train.inputs.shape == (6, 3, size, size)


def test_a_channel_that_is_the_same_in_all_training_images_is_only_shifted(tmp_path):
    blue = 13  # the sum of these, divided again, is not the same number
    files = {f"train/{label}/{n}.png": picture((9 * n, n, blue)) for label in ("cat", "dog") for n in range(3)}
    files |= {f"test/{label}/0.png": picture((0, 0, 255)) for label in ("cat", "dog")}
    found = load("images", path=write_folder(tmp_path / "pets", files), size=8)
    assert found.scale[1][2] == 1
    torch.testing.assert_close(found.test.inputs[:, 2], torch.full((2, 8, 8), (255 - blue) / 255))


def test_images_stand_upright_and_grey_and_transparent_ones_become_colour(tmp_path, monkeypatch):
    home = write_folder(tmp_path / "pets", class_folders(train=1))
    drawing = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(drawing).save(home / "train/cat/0.png")
    found = load("images", path=home, size=8)
    ranks = found.train.inputs[found.train.targets == 0][0].flatten(1).argsort(dim=1, stable=True)
    assert torch.equal(ranks, torch.from_numpy(drawing).permute(2, 0, 1).flatten(1).argsort(dim=1, stable=True))
    os.rename(home / "train/cat/0.png", os.fsencode(home / "train/cat") + b"/\xff.png")  # a name that is not UTF-8
    Image.new("L", (8, 8), 7).save(home / "train/cat/grey.png")
    Image.new("RGBA", (8, 8), (1, 2, 3, 4)).save(home / "train/cat/clear.png")
    assert len(load("images", path=home, size=8).train.inputs) == 4
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with refused("reading image files needs Pillow", "pip install 'fedveil[images]'"):
        load("images", path=home, size=9)


def test_subsets_keep_the_shares_of_classes_and_grow(tmp_path):
    home = write_folder(tmp_path / "pets", class_folders(train=20))
    small, large = (load("images", path=home, size=8, train_size=size, test_size=2) for size in (10, 21))
    assert small.train.targets.bincount().tolist() == [5, 5]
    assert sorted(large.train.targets.bincount().tolist()) == [10, 11]
    assert small.test.targets.bincount().tolist() == [1, 1]
    assert load("images", path=home, size=8, train_size=1).train.targets.tolist() == [0]
    with refused("data set 'pets': train_size is 41, but there are only 40 records"):
        load("images", path=home, size=8, train_size=41)


@pytest.mark.parametrize("kind", ["folder", "link", "zip"])
def test_images_are_decoded_once_and_again_if_they_change(kind, tmp_path, monkeypatch):
    path, white = write_folder(tmp_path / "pets", class_folders()), picture((255, 255, 255), 9)
    image = path / "train/cat/0.png"
    if kind == "zip":
        path = write_zip(tmp_path / "pets.zip", class_folders())
    elif kind == "link":
        image.rename(tmp_path / "elsewhere.png")
        image.symlink_to(tmp_path / "elsewhere.png")
    first = load("images", path=path, size=8)
    with monkeypatch.context() as patch:
        patch.setattr(images, "_decode_all", None)
        assert torch.equal(first.train.inputs, load("images", path=path, size=8).train.inputs)
    if kind == "zip":
        write_zip(path, class_folders() | {"train/cat/0.png": white})
    else:
        image.write_bytes(white)
    assert load("images", path=path, size=8).train.inputs[:, 1].max() > 2


@pytest.mark.parametrize("damage", [lambda b: b[:-100], lambda b: b"", lambda b: b[:600] + b"\x7f" * 40 + b[640:]])
def test_a_damaged_cache_is_built_again(damage, cache, tmp_path):
    source = write_folder(tmp_path / "pets", class_folders())
    first = load("images", path=source, size=8)
    (path,) = cache.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert torch.equal(first.train.inputs, load("images", path=source, size=8).train.inputs)
    path.unlink()
    os.mkfifo(path)  # reading it would never end
    assert torch.equal(first.train.inputs, load("images", path=source, size=8).train.inputs)


def test_a_cache_that_cannot_be_written_does_no_harm_and_none_is_written_in_part(source, cache, tmp_path, monkeypatch):
    def full(file, **_):
        file.write(b"half")
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", full)
        assert len(load("images", path=source, size=8).train.inputs) == 6
    assert list(cache.iterdir()) == []
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDVEIL_CACHE", str(tmp_path / "file" / "below"))
    assert len(load("images", path=source, size=8).train.inputs) == 6


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"train/cat/9.png": b"not an image"}, ["member train/cat/9.png: not a readable image", "Fix: replace it"]),
        ({"train/cat/9.png": b""}, ["member train/cat/9.png: the file is empty"]),
        ({"train/9.png": picture((1, 2, 3))}, ["member train/9.png: an image must be in the folder of its class"]),
        ({"test/fish/9.png": picture((1, 2, 3))}, ["test/ has unknown classes: fish", "cat, dog"]),
        ({"train/cat/0.png": bytes(10**6)}, ["member train/cat/0.png: cannot be read: it is larger than 100000 bytes"]),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_bad_files_are_named(changes, texts, packed, tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MAX_BYTES", 10**5)
    monkeypatch.setattr(archives.read_member, "__defaults__", (10**5,))
    path, files = tmp_path / "pets.zip", class_folders() | changes
    path = write_zip(path, files, zipfile.ZIP_DEFLATED) if packed else write_folder(tmp_path / "pets", files)
    with refused(path, *texts):
        load("images", path=path, size=8)


def pets(cats=10, dogs=5, top=""):
    """Names and bytes of <class>/<n>.png, the class in red."""
    counts = {"cat": cats, "dog": dogs}
    return {
        f"{top}{label}/{number}.png": picture((100 * index, 9 * number, 0))
        for index, (label, count) in enumerate(counts.items())
        for number in range(count)
    }


@pytest.mark.parametrize("top", ["", "pets-main/", "data/raw/", "train/", "pets-main/train/"])
@pytest.mark.parametrize("packed", [False, True])
def test_images_that_are_not_divided_are_divided_within_each_class(top, packed, tmp_path):
    files = pets(top=top) | {f"{top.replace('train/', '')}README.txt": b"no image"}
    path = write_zip(tmp_path / "pets.zip", files) if packed else write_folder(tmp_path / "pets", files)
    found = load("images", path=path, size=8)
    assert found.classes == ("cat", "dog")
    assert (found.train.targets.bincount().tolist(), found.test.targets.bincount().tolist()) == ([8, 4], [2, 1])
    assert found.notes == ("divided at random within each class: 12 images for training, 3 for testing",)
    every = torch.cat([found.pixels(part.inputs)[:, :2, 0, 0] for part in (found.train, found.test)])
    labels = torch.cat([found.train.targets, found.test.targets])[:, None]
    seen = torch.cat([labels, (255 * every).round().long()], 1)
    assert sorted(seen.tolist()) == [*([0, 0, 9 * n] for n in range(10)), *([1, 100, 9 * n] for n in range(5))]


def test_the_seed_and_the_share_decide_which_images_test(tmp_path):
    home = write_folder(tmp_path / "pets", pets())
    tests = [load("images", path=home, size=8, seed=seed).test.inputs for seed in (0, 0, 1)]
    assert torch.equal(tests[0], tests[1])
    assert not torch.equal(tests[0].sort(0).values, tests[2].sort(0).values)
    assert load("images", path=home, size=8, test_share=0.4).test.targets.bincount().tolist() == [4, 2]
    assert load("images", path=home, size=8, test_share=0.999).train.targets.bincount().tolist() == [1, 1]
    found = load("images", path=write_folder(tmp_path / "more", pets(4, 1)), size=8)  # a class of one image trains
    assert (found.train.targets.bincount().tolist(), found.test.targets.tolist()) == ([3, 1], [0])


def test_a_note_says_what_is_left_out(tmp_path):
    home = write_folder(tmp_path / "pets", class_folders() | {"val/cat/0.png": picture((1, 1, 1))})
    assert "left out 1 file, such as val/cat/0.png" in load("images", path=home, size=8).notes[0]
    home = write_folder(tmp_path / "more", pets() | {"cat/a.txt": b"", "dog/b.heic": b"", "README.md": b""})
    assert load("images", path=home, size=8).notes[1].startswith("left out 2 files, such as cat/a.txt: ")


LAYOUT_FIX = "use <class>/<image> with at least two classes, or train/<class>/<image> and test/<class>/<image>"


@pytest.mark.parametrize(
    ("files", "options", "texts"),
    [
        ({f"test/{name}": own for name, own in pets().items()}, {}, ["there are no images in train/", "train/<cl"]),
        ({"README.md": b"", "cat/a.txt": b""}, {}, ["there are no images in it (.jpg, .jpeg, .png", LAYOUT_FIX]),
        ({"a.png": picture((1, 1, 1))}, {}, ["member a.png: an image must be in the folder of its class", LAYOUT_FIX]),
        (pets(dogs=0), {}, ["all images are in one folder, cat, so there is only one class", LAYOUT_FIX]),
        (pets() | pets(top="more/"), {}, ["member more/cat/0.png", "all class folders must have the same parent"]),
        (pets() | {"train/0.png": picture((1, 1, 1))}, {}, ["member train/0.png", "if train or test is a class here"]),
        (pets(1, 1), {}, ["each of the 2 classes has only one image, so there are none to test on"]),
        (class_folders(), {"test_share": 0.2}, ["it is already divided into train/ and test/"]),
    ],
)
def test_folders_of_no_known_form_are_refused(files, options, texts, tmp_path):
    home = write_folder(tmp_path / "pets", files)
    home.mkdir(exist_ok=True)
    with refused(home, *texts):
        load("images", path=home, size=8, **options)


@pytest.mark.parametrize(
    ("damage", "texts"),
    [
        (lambda b: b"", ["the file is empty", "download it again"]),
        (lambda b: b[:-200], ["not a readable zip file", "download it again"]),
        (lambda b: b[:80] + bytes([b[80] ^ 255]) + b[81:], ["member train/cat/0.png: cannot be read: Bad CRC-32"]),
    ],
)
def test_a_damaged_zip_is_named(damage, texts, tmp_path):
    path = write_zip(tmp_path / "pets.zip", class_folders())
    path.write_bytes(damage(path.read_bytes()))
    with refused(path, *texts):
        load("images", path=path)


def test_what_is_not_a_file_is_named_where_it_would_be_read(tmp_path):
    home = write_folder(tmp_path / "pets", class_folders() | {"notes/readme": b""})
    os.mkfifo(home / "notes/pipe")
    assert len(load("images", path=home, size=8).train.targets) == 6
    image = home / "train/cat/0.png"
    image.unlink()
    os.mkfifo(image)
    with refused(home, "member train/cat/0.png: cannot be read:", "it is not a regular file", "Fix: replace it"):
        load("images", path=home, size=8)
    image.unlink()
    image.symlink_to(home / "gone")
    with refused(home, "member train/cat/0.png: cannot be read:", "No such file or directory"):
        load("images", path=home, size=8)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_without_permission_nothing_is_left_out_silently(tmp_path):
    home = write_folder(tmp_path / "pets", class_folders())
    (home / "train/cat/0.png").chmod(0)
    with refused(home, "member train/cat/0.png: cannot be read: [Errno 13] Permission denied"):
        load("images", path=home, size=8)
    for closed in (home / "train/dog", home):
        mode = closed.stat().st_mode
        closed.chmod(0)
        try:
            with refused("cannot be read: Permission denied", "Fix: "):
                load("images", path=home)
        finally:
            closed.chmod(mode)
