"""Features of patches: they agree with a slow computation, and a mirror image has the same."""

import math

import numpy as np
import torch
from benchmarks import patches


def filters_and_images():
    half = torch.randn(5, 3, patches.SIDE, patches.SIDE, generator=torch.Generator().manual_seed(0)) / 10
    filters = torch.cat([half, half.flip(-1)]).flatten(1).T
    return filters, torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def slow_cells(image, filters):
    """Return the mean response of each side of each filter, per cell of the grid."""
    starts = range(0, 32 - patches.SIDE + 1, patches.STRIDE)
    cells = np.zeros((patches.GRID, patches.GRID, 2, filters.shape[1]))
    edges = [round(cell * len(starts) / patches.GRID) for cell in range(patches.GRID + 1)]
    for row in range(patches.GRID):
        for column in range(patches.GRID):
            for y in starts[edges[row] : edges[row + 1]]:
                for x in starts[edges[column] : edges[column + 1]]:
                    patch = image[:, y : y + patches.SIDE, x : x + patches.SIDE].flatten().double().numpy()
                    patch = (patch - patch.mean()) / math.sqrt(patch.var() + patches.FLOOR)
                    found = patch @ filters.double().numpy()
                    cells[row, column] += np.maximum([found, -found], patches.THRESHOLD) - patches.THRESHOLD
    return cells * (patches.GRID / len(starts)) ** 2


def test_pooled_responses_agree_with_a_slow_computation():
    filters, images = filters_and_images()
    sums, differences = patches._pool(images, filters)
    half = filters.shape[1] // 2
    for image, found_sums, found_differences in zip(images, sums, differences, strict=True):
        cells = slow_cells(image, filters)
        own, mirrored = cells[..., :half], cells[..., half:]
        both, apart = (own + mirrored).reshape(3, 3, -1), (own - mirrored).reshape(3, 3, -1)
        expected = np.stack([(both[:, 0] + both[:, 2]) / math.sqrt(2), both[:, 1]], 1).reshape(6, -1)
        np.testing.assert_allclose(found_sums.numpy(), expected, atol=1e-5)
        np.testing.assert_allclose(found_differences.numpy(), (apart[:, 0] - apart[:, 2]) / math.sqrt(2), atol=1e-5)


def test_an_image_and_its_mirror_image_have_the_same_features():
    filters, images = filters_and_images()
    for found, mirrored in zip(patches._pool(images, filters), patches._pool(images.flip(-1), filters), strict=True):
        torch.testing.assert_close(found, mirrored)


def test_synthetic_images_depend_on_the_seed_alone():
    one, same, other = (patches.dead_leaves(np.random.default_rng(seed), 32, 200) for seed in (0, 0, 1))
    assert one.shape == (3, 32, 32)
    assert (one == same).all()
    assert not (one == other).all()
