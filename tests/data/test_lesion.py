"""HAM10000: no lesion in both parts, and errors that name image or row."""

import pytest
import torch
from tests.data.making import lesion_files, picture, refused, write_folder, write_zip

from fedveil.data import lesion, load


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
    found, small = load("lesion", path=source), load("lesion", path=source, size=32, train_size=20)
    assert len(found.train.inputs) + len(found.test.inputs) == 40
    assert (found.train.inputs.shape[1:], found.outputs, len(found.test.inputs)) == ((3, 64, 64), 7, 8)
    assert small.train.inputs.shape == (20, 3, 32, 32)
    assert torch.equal(small.test.targets, found.test.targets)
    assert {name: len(values) for name, values in small.columns.items()} == dict.fromkeys(lesion.COLUMNS, 20)
    assert set(small.columns["sex"]) == {"male", "female"}


def test_no_lesion_is_in_both_parts_and_targets_and_columns_describe_their_records(tmp_path):
    files = lesion_files(images_each=3)
    for name in files:
        if name.endswith(".jpg"):  # ten times a lesion's number is the grey of its images, of another size
            files[name] = picture((int(name[12:16]) * 10,) * 3, 100, "JPEG")
    header, *rows = files["HAM10000_metadata.csv"].split(b"\n")
    files["HAM10000_metadata.csv"] = b"\n".join([header, *reversed(rows)])  # in another order than the images
    found, numbers = load("lesion", path=write_folder(tmp_path / "lesion", files)), []
    for part in (found.train, found.test):
        red = part.inputs[:, 0].mean((1, 2)) * lesion.DEVIATION[0] + lesion.MEAN[0]
        numbers.append([value // 10 for value in (red * 255).round().int().tolist()])
        assert [number % 7 for number in numbers[-1]] == part.targets.tolist()
    train, test = numbers
    assert len(set(train)) + len(set(test)) == 20
    assert set(train).isdisjoint(test)
    assert found.columns["sex"].tolist() == [("male", "female")[number % 2] for number in train]


def changed(old, new):
    files = lesion_files()
    return files | {"HAM10000_metadata.csv": files["HAM10000_metadata.csv"].replace(old, new)}


@pytest.mark.parametrize(
    ("files", "texts"),
    [
        (lesion_files() | {"images/ISIC_x.jpg": b"?"}, ["member images/ISIC_x.jpg", "does not list 'ISIC_x'"]),
        (lesion_files() | {"images/ISIC_00000.jpg": b"?"}, ["member images/ISIC_00000.jpg: not a readable image"]),
        (changed(b"ISIC_00001,akiec", b"ISIC_00001,wart"), ["line 3, column 'dx': 'wart'", "akiec"]),
        (changed(b"ISIC_00001,", b"ISIC_00000,"), ["line 3, column 'image_id': 'ISIC_00000' is listed twice"]),
        (changed(b"lesion_id", b"id"), ["HAM10000_metadata.csv, line 1: columns are missing: lesion_id"]),
        ({"HAM10000_metadata.csv": lesion_files()["HAM10000_metadata.csv"]}, ["there are no images in it"]),
        ({"images/a.jpg": picture((1, 2, 3))}, ["there is no HAM10000_metadata.csv in it or next to it"]),
        (lesion_files(lesions=1), ["2 images are too few to divide"]),
    ],
)
def test_damage_is_named_by_member_or_line(files, texts, tmp_path):
    path = write_zip(tmp_path / "ham.zip", files)
    with refused(path, *texts):
        load("lesion", path=path)


def test_the_real_lesions_are_loaded(real_data):
    real_data("lesion")
    found = load("lesion")
    train, test = len(found.train.inputs), len(found.test.inputs)
    assert train + test >= 7017
    assert abs(train / (train + test) - 0.8) < 0.01
