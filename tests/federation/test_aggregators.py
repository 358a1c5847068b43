"""Each rule is what its paper says, and a minority of hostile rows moves it only so far."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.federation.aggregators import RULES, distances

NUMBERS = st.integers(0, 10_000)


def rows_of(seed, count, size=5, dtype=torch.float64):
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def apply(name, rows, hostile=1):
    return RULES[name].combine(rows, hostile)


@given(NUMBERS, st.integers(3, 8))
@settings(max_examples=20, deadline=None)
def test_median_and_trimmed_mean_go_coordinate_by_coordinate(seed, count):
    rows = rows_of(seed, count)
    for column in range(rows.shape[1]):
        own = sorted(rows[:, column].tolist())
        assert apply("median", rows)[column] == pytest.approx(float(np.median(own)), rel=1e-12)
        assert apply("trimmed-mean", rows)[column] == pytest.approx(sum(own[1:-1]) / (count - 2), rel=1e-12)


@given(NUMBERS, st.integers(0, 2), st.integers(0, 3))
@settings(max_examples=20, deadline=None)
def test_krum_takes_the_row_with_the_nearest_neighbours(seed, hostile, more):
    rows = rows_of(seed, RULES["krum"].min_rows(hostile) + more)
    away = torch.cdist(rows, rows).square().sort(1).values  # the first is the row itself
    scores = away[:, 1 : len(rows) - hostile - 1].sum(1)
    assert torch.equal(apply("krum", rows, hostile), rows[scores.argmin()])
    chosen = scores.argsort()[: len(rows) - hostile]
    assert torch.allclose(apply("multi-krum", rows, hostile), rows[chosen].mean(0), rtol=1e-12, atol=1e-12)


@given(NUMBERS, st.integers(3, 8))
@settings(max_examples=20, deadline=None)
def test_no_point_near_the_geometric_median_is_nearer_to_the_rows(seed, count):
    rows = rows_of(seed, count)
    found = apply("geometric-median", rows)
    best = float(distances(rows, found).sum())
    steps = rows_of(seed + 1, 50) * 0.05
    assert all(float(distances(rows, found + step).sum()) >= best * (1 - 1e-4) for step in steps)


@pytest.mark.parametrize("name", RULES)
@given(seed=NUMBERS, size=st.sampled_from([1.0, 1e4, 1e15, 1e30]), hostile=st.integers(1, 2))
@settings(max_examples=15, deadline=None)
def test_hostile_rows_move_a_rule_only_so_far(name, seed, size, hostile):
    """By at most a few of the largest distance between honest rows, whatever the size of what is hostile.

    Geometric median: 2 (1 - a) / (1 - 2 a) times the honest rows' largest distance from any point (Lemma 1 of Minsker
    2015), with a = f / n at most 2 / 7 here: 10/3. Centred clipping moves 5 times, by a median distance at most.
    """
    count = RULES["krum"].min_rows(hostile)
    honest = rows_of(seed, count - hostile)
    bad = size * rows_of(seed + 1, hostile)
    found = apply(name, torch.cat([honest, bad]), hostile)
    spread = max(float(torch.linalg.vector_norm(a - b)) for a, b in itertools.product(honest, honest))
    assert float(distances(honest, found).min()) <= 10 * spread
    mean = torch.cat([honest, bad]).mean(0)
    if size >= 1e15:  # the mean goes wherever they like
        assert float(distances(honest, mean).min()) > 1e10 * spread


@pytest.mark.parametrize("name", RULES)
def test_rules_do_not_depend_on_order_nor_all_but_one_on_the_origin(name):
    rows = rows_of(3, 7)
    found = apply(name, rows)
    assert torch.allclose(apply(name, rows[torch.randperm(7)]), found, rtol=1e-9, atol=1e-9)
    if name != "clipped-mean":
        assert torch.allclose(apply(name, rows + 2.5), found + 2.5, rtol=1e-6, atol=1e-6)


@given(NUMBERS, st.integers(3, 8))
@settings(max_examples=20, deadline=None)
def test_the_clipped_mean_is_one_of_rows_as_long_as_the_median_at_most(seed, count):
    rows = rows_of(seed, count)
    lengths = [float(row.norm()) for row in rows]
    middle = sorted(lengths)[(count - 1) // 2]
    by_hand = sum(row * min(1.0, middle / own) for row, own in zip(rows, lengths, strict=True)) / count
    assert torch.allclose(apply("clipped-mean", rows), by_hand, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_equal_rows_and_few_rows(name, count):
    row = rows_of(1, 1, dtype=torch.float32)
    found = apply(name, row.expand(count, -1), 0)
    assert found.dtype == torch.float32
    assert torch.allclose(found, row[0], rtol=1e-6)
    assert torch.isfinite(apply(name, torch.zeros(count, 4), 0)).all()
