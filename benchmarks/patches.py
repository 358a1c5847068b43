"""Features of small images that are fixed before any private image is seen, so that they cost no privacy.

Filters are random patches, as in Coates and Ng ("The importance of encoding versus training with sparse coding and
vector quantization", ICML 2011): each patch of an image is standardised and whitened, compared with every filter,
thresholded on both sides, and pooled over a grid. The filters, and the statistics of all whitening, come from synthetic
images only: dead leaves, opaque shapes of random size and colour that cover one another (Lee, Mumford and Huang 2001).
The features of an image and of its mirror image are the same.
"""

import itertools
import math
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SIDE, STRIDE, GRID = 6, 2, 3  # of a patch, between patches, and cells of pooling per side
FILTERS = 800  # and as many mirrored ones
FLOOR, RIDGE = 0.3, 0.1  # added to the variance within a patch, and to the variances of directions of patches
THRESHOLD = 0.25
CHANNELS, WIDTH = 500, 4000  # principal components kept per cell and parity, and in all
POWER = 0.8  # 0: components keep their variance, 1: they are whitened
IMAGES, SOME, CANVASES, PATCHES = 10_000, 2000, 250, 40_000  # synthetic; SOME images decide the channels
CHUNK = 50  # images at a time


class Bank(NamedTuple):
    """Filters, with their mirror images in the second half, and the projections that follow them."""

    filters: Tensor
    even: Tensor
    odd: Tensor
    mean: Tensor
    basis: Tensor


def dead_leaves(generator: np.random.Generator, side: int = 128, leaves: int = 3000) -> np.ndarray:
    """Return an image of dead leaves, rendered at twice the size and averaged; values are about standard normal."""
    size = 2 * side
    image = np.empty((size, size, 3), np.float32)
    image[:] = generator.normal(size=3)
    radii = generator.uniform(size**-2.0, 0.25, size=leaves) ** -0.5  # density proportional to 1 / radius^3
    for radius in radii:
        x, y = generator.random(2) * size
        angle, stretch, disc = generator.random() * math.pi, math.exp(generator.normal() / 2), generator.integers(2)
        reach = radius * max(stretch, 1 / stretch) * 1.5 + 1
        left, top = (max(0, int(centre - reach)) for centre in (x, y))
        right, bottom = (min(size, int(centre + reach + 1)) for centre in (x, y))
        across, down = np.arange(left, right) - x, (np.arange(top, bottom) - y)[:, None]
        along = (across * math.cos(angle) + down * math.sin(angle)) * stretch
        aside = (down * math.cos(angle) - across * math.sin(angle)) / stretch
        inside = along**2 + aside**2 < radius**2 if disc else np.maximum(abs(along), abs(aside)) < 0.9 * radius
        image[top:bottom, left:right][inside] = generator.normal() + 0.35 * generator.normal(size=3)
    return image.reshape(side, 2, side, 2, 3).mean((1, 3)).transpose(2, 0, 1)


def _standardise(patches: Tensor) -> Tensor:
    """Subtract the mean of each row, and divide by its deviation."""
    centred = patches - patches.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + FLOOR).rsqrt()


def _principal(samples: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return the largest variances of samples with mean 0, and their directions as columns."""
    variances, directions = torch.linalg.eigh(samples.T @ samples / len(samples))
    return variances.flip(0)[:most], directions.flip(1)[:, :most].contiguous()


def _choose_filters(canvases: Tensor, generator: np.random.Generator) -> Tensor:
    """Return whitened random patches as columns, which apply to standardised patches."""
    places = generator.integers((len(canvases), *(s - SIDE + 1 for s in canvases.shape[2:])), size=(PATCHES, 3))
    patches = torch.stack([canvases[image, :, y : y + SIDE, x : x + SIDE] for image, y, x in places])
    rows = _standardise(torch.cat([patches, patches.flip(-1)]).flatten(1))
    variances, directions = torch.linalg.eigh((rows.T @ rows / len(rows)).double())
    whiten = ((directions * (variances + RIDGE).rsqrt()) @ directions.T).float()
    chosen = patches[patches.flatten(1).std(1) > 0.1][:FILTERS]
    rows = _standardise(torch.cat([chosen, chosen.flip(-1)]).flatten(1)) @ whiten
    filters = whiten @ torch.nn.functional.normalize(rows).T
    return filters - filters.mean(0)


def _pool(images: Tensor, filters: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the grid's cells contain of each pair of a filter and its mirror image, as sums and as differences.

    Only combinations of cells that do not change when the image is mirrored are kept: of sums the left column plus the
    right one, and the middle one; of differences the left column minus the right one.
    """
    patches = images.unfold(2, SIDE, STRIDE).unfold(3, SIDE, STRIDE).permute(0, 2, 3, 1, 4, 5)
    count, steps = len(images), patches.shape[1]
    found = (_standardise(patches.reshape(count, steps**2, -1)) @ filters).view(count, steps**2, 2, -1)
    found = torch.cat([(found - THRESHOLD).relu_(), (-THRESHOLD - found).relu_()], -1).flatten(2)
    edges = [round(cell * steps / GRID) for cell in range(GRID + 1)]
    within = torch.zeros(GRID, steps)
    for cell, (first, end) in enumerate(itertools.pairwise(edges)):
        within[cell, first:end] = GRID / steps
    cells = (torch.kron(within, within) @ found).view(count, GRID, GRID, 2, -1)
    own, mirrored = cells.unbind(3)
    sums, differences = own + mirrored, own - mirrored
    sums = torch.stack([(sums[:, :, 0] + sums[:, :, 2]) / math.sqrt(2), sums[:, :, 1]], 2)
    return sums.flatten(1, 2), (differences[:, :, 0] - differences[:, :, 2]) / math.sqrt(2)


def _describe(images: Tensor, filters: Tensor, even: Tensor, odd: Tensor) -> Tensor:
    """Return one row of pooled and projected responses per image."""
    rows = []
    for part in images.split(CHUNK):
        sums, differences = _pool(part, filters)
        rows.append(torch.cat([(sums @ even).flatten(1), (differences @ odd).flatten(1)], 1))
    return torch.cat(rows)


@cache
def bank() -> Bank:
    """Draw synthetic images, and from them filters and projections."""
    generator = np.random.default_rng(0)
    canvases = torch.from_numpy(np.stack([dead_leaves(generator) for _ in range(CANVASES)]))
    filters = _choose_filters(canvases, generator)
    places = generator.integers(canvases.shape[-1] - 32 + 1, size=(IMAGES, 2))
    images = torch.stack([canvases[n % CANVASES, :, y : y + 32, x : x + 32] for n, (y, x) in enumerate(places)])
    images = images.clamp_(-2, 2)  # about the range of standardised pixels
    pooled = [_pool(part, filters) for part in images[:SOME].split(CHUNK)]
    samples = [torch.cat(parts).flatten(0, 1) for parts in zip(*pooled, strict=True)]
    even, odd = (_principal(part - part.mean(0), CHANNELS)[1] for part in samples)
    rows = _describe(images, filters, even, odd)
    mean = rows.mean(0)
    variances, basis = _principal(rows - mean, WIDTH)
    return Bank(filters, even, odd, mean, basis * variances.clamp(min=1e-7) ** (-POWER / 2))


def features(images: Tensor) -> Tensor:
    """Return one row per image."""
    own = bank()
    parts = [_describe(part, own.filters, own.even, own.odd).sub_(own.mean) @ own.basis for part in images.split(1000)]
    return torch.cat(parts)
