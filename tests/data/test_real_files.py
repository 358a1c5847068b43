"""The real data sets, where they are at hand."""

import pytest

from fedveil.data import load
from fedveil.data.catalogue import ABOUT
from fedveil.data.download import compute_digest


def test_the_real_bank_has_its_records(real_data):
    folder = real_data("bank")
    found = load("bank", task="classification")
    parts = (found.train, found.validation, found.test)
    assert [len(part.inputs) for part in parts] == [32950, 4119, 4119]
    assert sum(int(part.targets.sum()) for part in parts) == 4640
    digest = ABOUT["bank"].download.digest
    assert compute_digest(folder / "bank-additional-full.csv", digest) == digest


def test_the_real_lesions_are_loaded(real_data):
    real_data("lesion")
    found = load("lesion")
    assert len(found.train.inputs) + len(found.test.inputs) >= 7017
    assert abs(len(found.train.inputs) / (len(found.train.inputs) + len(found.test.inputs)) - 0.8) < 0.01


@pytest.mark.slow
def test_the_real_cifar10_is_balanced_and_standard(real_data):
    real_data("cifar10")
    found = load("cifar10")
    assert found.train.targets.bincount().tolist() == [5000] * 10
    assert found.test.targets.bincount().tolist() == [1000] * 10
    assert found.train.inputs.mean((0, 2, 3)).abs().max() < 0.01
