"""The metrics of images, against the same in plain loops."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.attacks.victims import chance

from fedveil.attacks.similarity import match, mse, psnr, ssim, total_variation


def pair(seed, shape):
    return torch.rand(2, *shape, generator=chance(seed))


def slow_ssim(a, b, size):
    """One window after another, as Wang et al. write it."""
    line = np.exp(-((np.arange(size) - size // 2) ** 2) / 4.5)
    weights, found = np.outer(line, line) / line.sum() ** 2, []
    for channel, i, j in itertools.product(range(len(a)), *(range(n - size + 1) for n in a.shape[1:])):
        x, y = (image[channel, i : i + size, j : j + size] for image in (a, b))
        mx, my = (weights * x).sum(), (weights * y).sum()
        vx, vy = (weights * (x - mx) ** 2).sum(), (weights * (y - my) ** 2).sum()
        top = (2 * mx * my + 1e-4) * (2 * (weights * (x - mx) * (y - my)).sum() + 9e-4)
        found.append(top / ((mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4)))
    return sum(found) / len(found)


@given(seed=st.integers(0, 10**6), records=st.integers(1, 3), channels=st.sampled_from([1, 3]))
def test_squared_error_and_psnr_are_what_loops_give(seed, records, channels):
    a, b = pair(seed, (records, channels, 5, 4))
    for number, (error, decibels) in enumerate(zip(mse(a, b), psnr(a, b), strict=True)):
        gaps = [(float(x) - float(y)) ** 2 for x, y in zip(a[number].flatten(), b[number].flatten(), strict=True)]
        assert error == pytest.approx(sum(gaps) / len(gaps), rel=1e-12)
        assert decibels == pytest.approx(10 * math.log10(1 / error), rel=1e-12)


@pytest.mark.parametrize(
    ("level", "settings", "decibels"),
    [(0.1, {}, 20.0), (0, {}, 120.0), (1, {"peak": 10.0}, 20.0), (0, {"maximum": 100.0}, 100.0)],
)
def test_psnr_of_known_images(level, settings, decibels):
    black = torch.zeros(1, 1, 8, 8)
    assert psnr(black + level, black, **settings) == pytest.approx([decibels], rel=1e-6)


@pytest.mark.parametrize(("side", "size"), [(8, 7), (15, 7), (16, 11), (20, 11)])
def test_ssim_is_what_loops_give_and_1_for_equal_images(side, size):
    a, b = pair(side, (2, 3, side, side))
    b = 0.5 * a + 0.5 * b
    slow = [slow_ssim(x.double().numpy(), y.double().numpy(), size) for x, y in zip(a, b, strict=True)]
    assert ssim(a, b) == pytest.approx(slow, rel=1e-9)
    assert ssim(a, a) == pytest.approx([1.0, 1.0], rel=1e-9)


@given(seed=st.integers(0, 10**6), records=st.integers(1, 5))
def test_matching_is_the_best_of_all_orders(seed, records):
    found, true = pair(seed, (records, 1, 3, 3))

    def cost(order):
        return sum(mse(found[list(order)], true))

    best = min(cost(order) for order in itertools.permutations(range(records)))
    assert cost(match(found, true)) == pytest.approx(best, rel=1e-12)


def test_total_variation_is_the_mean_step_across_plus_the_mean_step_down():
    image = torch.tensor([[[[0.0, 1.0, 1.0], [0.0, 0.0, 2.0]]]])
    assert float(total_variation(image)) == pytest.approx((1 + 0 + 0 + 2) / 4 + (0 + 1 + 1) / 3)
    both = torch.cat([image, torch.zeros_like(image)])
    assert total_variation(both, (1, 2, 3)).tolist() == [float(total_variation(image)), 0.0]
