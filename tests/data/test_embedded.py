"""Data that comes with the library."""

import torch
from tests.data.making import refused

from fedveil.data import load


def test_digits_are_flat_or_images_in_the_unit_interval():
    flat, square = load("digits"), load("digits", flat=False)
    assert (flat.train.inputs.shape, flat.test.inputs.shape) == ((1438, 64), (359, 64))
    assert square.train.inputs.shape == (1438, 1, 8, 8)
    assert (flat.train.inputs.min(), flat.train.inputs.max()) == (0, 1)
    assert (flat.outputs, flat.validation, flat.train.targets.dtype) == (10, None, torch.int64)
    assert torch.equal(flat.train.inputs, load("digits").train.inputs)


def test_diabetes_is_standardised_on_its_training_part():
    found = load("diabetes")
    for values in (found.train.inputs, found.train.targets):
        torch.testing.assert_close(values.mean(0), torch.zeros(values.shape[1]), atol=1e-5, rtol=0)
        torch.testing.assert_close(values.std(0, correction=0), torch.ones(values.shape[1]))
    assert found.test.inputs.mean(0).abs().max() > 1e-3
    assert repr(found) == "Data('diabetes', train=354, test=88, input (10,), 1 regression targets)"


def test_fewer_digits_train_and_all_others_test():
    whole, few = load("digits"), load("digits", train_size=100)
    assert (len(few.train.inputs), len(few.test.inputs)) == (100, 1697)
    assert torch.equal(few.train.inputs, whole.train.inputs[:100])
    assert torch.equal(load("digits", train_size=100, test_size=50).test.inputs, few.test.inputs[:50])
    for sizes, text in (
        ({"train_size": 1797}, "at most 1796"),
        ({"train_size": 100, "test_size": 1698}, "at most 1697"),
    ):
        with refused(text):
            load("digits", **sizes)
