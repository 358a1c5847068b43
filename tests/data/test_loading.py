"""Loading by name: the embedded sets, the registry, and what Data refuses."""

import inspect

import numpy as np
import pytest
import torch
from PIL import Image
from tests.data.making import refused
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from fedveil import data
from fedveil.data import Data, Part, from_datasets, load
from fedveil.data.catalogue import LOADERS


def test_digits_are_flat_or_images_in_the_unit_interval():
    flat, square = load("digits"), load("digits", flat=False)
    assert flat.train.inputs.shape == (1438, 64)
    assert flat.test.inputs.shape == (359, 64)
    assert square.train.inputs.shape == (1438, 1, 8, 8)
    assert (flat.train.inputs.min(), flat.train.inputs.max()) == (0, 1)
    assert (flat.outputs, flat.validation, flat.train.targets.dtype) == (10, None, torch.int64)


def test_diabetes_is_standardised_on_its_training_part():
    found = load("diabetes")
    for values in (found.train.inputs, found.train.targets):
        torch.testing.assert_close(values.mean(0), torch.zeros(values.shape[1]), atol=1e-5, rtol=0)
        torch.testing.assert_close(values.std(0, correction=0), torch.ones(values.shape[1]))
    assert found.test.inputs.mean(0).abs().max() > 1e-3
    assert (found.outputs, found.classes, found.train.targets.shape) == (1, (), (354, 1))


def test_the_same_name_gives_the_same_records():
    assert torch.equal(load("digits").train.inputs, load("digits").train.inputs)


def test_a_repr_says_what_is_there():
    assert repr(load("diabetes")) == "Data('diabetes', train=354, test=88, input (10,), 1 regression targets)"


def test_every_loader_is_in_the_catalogue():
    assert [info.name for info in data.available()] == sorted(LOADERS)


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
        ("digits", {"flat": "yes"}, ["flat is 'yes'", "flat as bool"]),
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


def test_a_data_set_from_torch_datasets():
    numbers = TensorDataset(torch.arange(6.0).reshape(3, 2), torch.tensor([0, 2, 1]))
    found = from_datasets("mine", numbers, numbers)
    assert (found.classes, found.outputs) == (("0", "1", "2"), 3)
    assert found.train.targets.tolist() == [0, 2, 1]
    named = from_datasets("mine", numbers, numbers, classes=["a", "b", "c", "d"])
    assert named.outputs == 4


def test_float_targets_make_a_regression():
    numbers = TensorDataset(torch.zeros(3, 2, dtype=torch.float64), torch.tensor([0.5, 1, 2]))
    found = from_datasets("mine", numbers, numbers)
    assert (found.train.targets.shape, found.train.inputs.dtype, found.outputs) == ((3, 1), torch.float32, 1)


class Items(Dataset):
    def __init__(self, *items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


@pytest.mark.parametrize(
    ("items", "texts"),
    [
        (Stream(), ["mine.train: Stream has no length", "TensorDataset"]),
        (Items(), ["mine.train: it is empty"]),
        (Items(3), ["mine.train[0]: it is int, not (input, target)"]),
        (Items(("image", 1)), ["mine.train[0]: input cannot become a tensor: it is str"]),
        (
            Items((Image.new("L", (2, 2)), 1)),
            ["mine.train[0]: input cannot", "it is PIL.Image", "transforms.ToTensor()"],
        ),
        (Items((np.array(["a"]), 1)), ["mine.train[0]: input cannot become a tensor"]),
        (Items((torch.zeros(2), 0), (torch.zeros(3), 0)), ["mine.train[1]: input is", "(3,)", "item 0", "(2,)"]),
        (Items((torch.zeros(2), 0), (torch.zeros(2), 0.5)), ["mine.train[1]: target is torch.float32"]),
        (Items((torch.tensor([float("nan")]), 0)), ["mine.train[0]: it holds NaN"]),
        (Items((torch.zeros(2), -1)), ["mine.train: a target is -1"]),
        (Items((torch.zeros(3), 0)), ["mine.test: items are ((2,),", "those of train are ((3,),"]),
    ],
)
def test_items_that_are_no_records_are_named(items, texts):
    with refused(*texts):
        from_datasets("mine", items, Items((torch.zeros(2), 0)))


def test_classes_need_whole_number_targets():
    numbers = Items((torch.zeros(2), 0.5))
    with refused("mine.train: classes are named, but targets are not whole numbers"):
        from_datasets("mine", numbers, numbers, classes=["a"])


@pytest.mark.parametrize(
    ("part", "classes", "columns", "texts"),
    [
        (Part(torch.zeros(0, 2), torch.zeros(0, 1)), (), {}, ["x.train: inputs are torch.float32 of shape (0, 2)"]),
        (Part(torch.zeros(3, 2).double(), torch.zeros(3, 1)), (), {}, ["inputs are torch.float64"]),
        (Part(torch.zeros(3, 2), torch.zeros(2, 1)), (), {}, ["targets are torch.float32 of shape (2, 1) for 3"]),
        (Part(torch.zeros(3, 2), torch.zeros(3, 1)), ("a",), {}, ["int64 targets of shape (records,)"]),
        (Part(torch.zeros(3, 2), torch.tensor([0, 1, 5])), ("a", "b"), {}, ["a target is 0 or 5, there are 2"]),
        (Part(torch.zeros(3, 2), torch.zeros(3, 1)), (), {"c": np.zeros(2)}, ["x.columns['c']: 2 values for 3"]),
    ],
)
def test_tensors_that_do_not_belong_together_are_refused(part, classes, columns, texts):
    with refused(*texts):
        Data("x", part, part, classes=classes, columns=columns)
