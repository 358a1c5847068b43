"""Data that comes with the library."""

import pytest
import torch

from fedveil.data import load
from fedveil.errors import BadArgument


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
    assert repr(load("diabetes")) == "Data('diabetes', train=354, test=88, input (10,), 1 regression targets)"


def test_fewer_digits_train_and_all_others_test():
    whole, few = load("digits"), load("digits", train_size=100)
    assert (len(few.train.inputs), len(few.test.inputs)) == (100, 1697)
    assert torch.equal(few.train.inputs, whole.train.inputs[:100])
    with pytest.raises(BadArgument, match="train_size is 1797"):
        load("digits", train_size=1797)
    short = load("digits", train_size=100, test_size=50)
    assert torch.equal(short.test.inputs, few.test.inputs[:50])
    with pytest.raises(BadArgument, match="at most 1697"):
        load("digits", train_size=100, test_size=1698)


def test_images_give_their_pixels_back():
    data = load("digits", flat=False)
    assert torch.equal(data.pixels(data.test.inputs), data.test.inputs)
    assert data.scale == ((0.0,), (1.0,))
    with pytest.raises(BadArgument, match="are not images"):
        load("digits").pixels(data.test.inputs)
