"""HAM10000: no lesion in both parts, and errors that name image or row."""

import pytest
import torch
from tests.data.making import lesion_files, picture, refused, write_folder, write_zip

from fedveil.data import lesion, load
from fedveil.errors import BadArgument


@pytest.fixture(params=["folder", "zip", "table beside the zip", "folder above a zip"])
def source(request, tmp_path):
    files = lesion_files()
    home = tmp_path / "lesion"
    if request.param == "folder":
        return write_folder(home, files)
    home.mkdir()
    if "beside" in request.param:
        (home / "HAM10000_metadata.csv").write_bytes(files.pop("HAM10000_metadata.csv"))
    path = write_zip(home / "ham.zip", files)
    return home if "above" in request.param else path


def test_images_that_are_only_listed_are_left_out(source):
    found = load("lesion", path=source)
    assert len(found.train.inputs) + len(found.test.inputs) == 40
    assert (found.train.inputs.shape[1:], found.outputs) == ((3, 64, 64), 7)
    assert len(found.test.inputs) == 8


def lesion_numbers(part):
    """The red of each image, in 0 to 255."""
    red = part.inputs[:, 0].mean((1, 2)) * lesion.DEVIATION[0] + lesion.MEAN[0]
    return (red * 255).round().int().tolist()


@pytest.fixture
def grey_lesions(tmp_path):
    """Ten times a lesion's number is the grey of its images; the table is in another order than the images."""
    files = lesion_files(images_each=3)
    for name in files:
        if name.endswith(".jpg"):
            files[name] = picture((int(name[12:16]) * 10,) * 3, 64, "JPEG")
    header, *rows = files["HAM10000_metadata.csv"].split(b"\n")
    files["HAM10000_metadata.csv"] = b"\n".join([header, *reversed(rows)])
    return load("lesion", path=write_folder(tmp_path / "lesion", files))


def test_no_lesion_is_in_both_parts(grey_lesions):
    found = grey_lesions
    train, test = lesion_numbers(found.train), lesion_numbers(found.test)
    assert len(set(train)) + len(set(test)) == 20
    assert set(train).isdisjoint(test)
    for part, numbers in ((found.train, train), (found.test, test)):
        assert [number // 10 % 7 for number in numbers] == part.targets.tolist()


def test_columns_describe_the_training_records(grey_lesions):
    sexes = [("male", "female")[number // 10 % 2] for number in lesion_numbers(grey_lesions.train)]
    assert grey_lesions.columns["sex"].tolist() == sexes


def test_columns_follow_a_subset(source):
    found = load("lesion", path=source, train_size=20)
    assert {name: len(values) for name, values in found.columns.items()} == dict.fromkeys(lesion.COLUMNS, 20)
    assert set(found.columns["sex"]) == {"male", "female"}


def test_images_of_another_size_become_64_pixels_wide(tmp_path):
    files = lesion_files()
    files["images/ISIC_00000.jpg"] = picture((0, 0, 0), 100, "JPEG")
    assert load("lesion", path=write_folder(tmp_path / "x", files)).train.inputs.shape[1:] == (3, 64, 64)


def test_smaller_images_are_the_same_records(source):
    small, full = load("lesion", path=source, size=32), load("lesion", path=source)
    assert small.train.inputs.shape[1:] == (3, 32, 32)
    assert torch.equal(small.train.targets, full.train.targets)


@pytest.mark.parametrize("size", [0, 65])
def test_a_size_that_is_none_is_refused(source, size):
    with pytest.raises(BadArgument, match="from 8 to 64"):
        load("lesion", path=source, size=size)


def test_the_division_is_the_same_each_time(source):
    assert torch.equal(load("lesion", path=source).test.inputs, load("lesion", path=source).test.inputs)


def changed(old, new):
    files = lesion_files()
    return files | {"HAM10000_metadata.csv": files["HAM10000_metadata.csv"].replace(old, new)}


@pytest.mark.parametrize(
    ("files", "texts"),
    [
        (lesion_files() | {"images/ISIC_x.jpg": b"?"}, ["member images/ISIC_x.jpg", "no image 'ISIC_x'"]),
        (lesion_files() | {"images/ISIC_00000.jpg": b"?"}, ["member images/ISIC_00000.jpg: not a readable image"]),
        (changed(b"ISIC_00001,akiec", b"ISIC_00001,wart"), ["line 3, column 'dx': 'wart'", "akiec"]),
        (changed(b"ISIC_00001,", b"ISIC_00000,"), ["line 3, column 'image_id': 'ISIC_00000' is listed twice"]),
        (changed(b"lesion_id", b"id"), ["HAM10000_metadata.csv, line 1: no column lesion_id"]),
        ({"HAM10000_metadata.csv": lesion_files()["HAM10000_metadata.csv"]}, ["there are no images in it"]),
        ({"images/a.jpg": picture((1, 2, 3))}, ["there is no HAM10000_metadata.csv in it or beside it"]),
        (lesion_files(lesions=1), ["2 images leave a part empty"]),
    ],
)
def test_damage_is_named_by_member_or_line(files, texts, tmp_path):
    path = write_zip(tmp_path / "ham.zip", files)
    with refused(path, *texts):
        load("lesion", path=path)
