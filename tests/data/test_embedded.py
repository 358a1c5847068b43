"""Data that comes with the library."""

import pytest
import torch

from fedveil.data import load
from fedveil.errors import BadArgument


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
    with pytest.raises(BadArgument, match="are no images"):
        load("digits").pixels(data.test.inputs)
