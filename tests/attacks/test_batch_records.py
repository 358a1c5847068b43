"""Sparse directions in the gradient of a first layer reveal all records of a batch."""

import dataclasses

import pytest
import torch
from tests.attacks.victims import DIGITS, chance
from tests.oracle import built
from torch import nn

from fedveil.attacks import batch_records as batches
from fedveil.attacks.leaked_gradients import Leak, mean_gradients, secure_sum
from fedveil.attacks.likely_outputs import fake_inputs
from fedveil.attacks.observation import DoesNotApply
from fedveil.models import mlp
from fedveil.scheme import find_loss

LOSS = find_loss("squared_error")
OWN = DIGITS.test.inputs[:64]


def leak_of(rows, hidden=100, seed=0, dtype=torch.float32):
    net = built(lambda: mlp(64, 10, hidden=hidden), seed, dtype)
    return Leak(net, mean_gradients(net, LOSS, DIGITS.train.inputs[rows].to(dtype), DIGITS.train.targets[rows]), LOSS)


def distances(found, rows):
    records = DIGITS.train.inputs[rows].double()
    return torch.cdist(records, found, compute_mode="donot_use_mm_for_euclid_dist").amin(1)


@pytest.mark.parametrize("records", [1, 4, 10])
def test_all_records_of_a_batch_are_computed(records):
    rows = torch.arange(records)
    found = batches.records_from_batch(leak_of(rows), "0", records, OWN, chance())
    assert found.inputs.shape == (records, 64)
    assert distances(found.inputs, rows).max() < 0.05  # of 64 pixels; the rounding of float32, amplified
    assert found.agreement.min() >= batches.MIN_AGREEMENT


def test_a_sum_over_clients_is_one_batch():
    rows, net = torch.arange(6), built(lambda: mlp(64, 10, hidden=100))
    inputs, targets = DIGITS.train.inputs[rows].double(), DIGITS.train.targets[rows]
    own = [mean_gradients(net, LOSS, inputs[row : row + 2], targets[row : row + 2]) for row in (0, 2, 4)]
    leak = Leak(net, secure_sum(own, [2, 2, 2]).mean(), LOSS)
    assert distances(batches.records_from_batch(leak, "0", 6, OWN, chance()).inputs, rows).max() < 1e-6


def test_noise_reveals_no_record_and_no_data_are_needed():
    rows, rng = torch.arange(4), chance(1)
    leak = leak_of(rows)
    fakes = fake_inputs(torch.Size((64,)), 200, 0.0, 1.0)
    assert distances(batches.records_from_batch(leak, "0", 4, fakes, chance()).inputs, rows).max() < 0.05
    delta, inputs = torch.randn(100, 4, generator=rng), torch.rand(4, 64, generator=rng)
    dense = {"0.weight": delta @ inputs, "0.bias": delta.sum(1)}  # every unit has a derivative for every record
    found = batches.records_from_batch(dataclasses.replace(leak, gradients=dense), "0", 4, OWN, chance())
    assert not len(found.inputs) or torch.cdist(inputs.double(), found.inputs).min() > 0.5


def test_drawn_units_are_inactive_for_a_plausible_record():
    inactive = torch.rand(7, 30, generator=chance()) < 0.5
    rows = batches.draw_rows(inactive, 5, 200, chance())
    assert all(any(one[own].all() for one in inactive) for own in rows)
    assert all(len(set(own.tolist())) == 5 for own in rows)


def test_null_vectors_are_orthogonal_and_merging_keeps_the_best():
    left = torch.randn(9, 4, generator=chance(), dtype=torch.float64)
    rows = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 6, 7]])
    found = batches.null_vectors(left, rows, chance())
    for vector, own in zip(found[:2], rows, strict=False):
        assert (left[own] @ vector).abs().max() < 1e-12
        assert abs(float(vector.norm()) - 1) < 1e-12
    pool = batches.Directions(torch.eye(3), torch.tensor([[1, 0], [1, 0], [0, 1]]).bool(), torch.tensor([2, 3, 1]))
    merged = batches.merge_pool(pool)
    assert dict(zip(map(tuple, merged.zeros.tolist()), merged.draws.tolist(), strict=True)) == {
        (True, False): 5,
        (False, True): 1,
    }


def test_too_many_records_and_other_networks_are_refused():
    rows = torch.arange(40)
    with pytest.raises(DoesNotApply, match="40 records are too many for"):
        batches.records_from_batch(leak_of(rows, hidden=20), "0", 40, OWN, chance())
    with pytest.raises(DoesNotApply, match="no ReLU follows"):
        batches.check_relu(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()), "0")
    flat = nn.Sequential(nn.Flatten(), mlp(64, 10))
    batches.check_relu(flat, "1.0")
