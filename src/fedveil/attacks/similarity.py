"""Similarity of reconstructed images to the originals, for pixels in [0, 1]."""

import math
from functools import partial

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn import functional as F

SIGMA = 1.5
BRIGHTNESS, CONTRAST = 0.01**2, 0.03**2


def mse(reconstructed: Tensor, original: Tensor) -> list[float]:
    """Return the mean squared error of each image."""
    values: list[float] = (reconstructed.double() - original.double()).square().flatten(1).mean(1).tolist()
    return values


def psnr(reconstructed: Tensor, original: Tensor, *, peak: float = 1.0, maximum: float = 120.0) -> list[float]:
    """Return 10 log10(peak^2 / MSE) of each image in decibels, at most `maximum`; `peak` is the pixels' range."""
    peak_level = 20 * math.log10(peak)
    return [
        min(maximum, peak_level - 10 * math.log10(error)) if error else maximum
        for error in mse(reconstructed, original)
    ]


def total_variation(images: Tensor, dim: tuple[int, ...] | None = None) -> Tensor:
    """Return the total variation: the sum of the mean absolute differences of horizontal and of vertical neighbours.

    The means are taken over the dimensions in `dim`, or over all dimensions if it is None.
    """
    return images.diff(dim=-1).abs().mean(dim) + images.diff(dim=-2).abs().mean(dim)


def ssim(reconstructed: Tensor, original: Tensor) -> list[float]:
    """Return the structural similarity of each image (Wang et al. 2004), averaged over channels and window positions.

    The Gaussian windows lie inside the image. They have 11 x 11 pixels (7 x 7 if a side of the image is shorter than 16
    pixels) and standard deviation 1.5. The constants are 0.01^2 and 0.03^2.
    """
    size = 11 if min(original.shape[-2:]) >= 16 else 7
    a, b = (image.double().flatten(0, 1).unsqueeze(1) for image in (reconstructed, original))
    offsets = torch.arange(size, dtype=torch.float64, device=a.device) - size // 2
    kernel = torch.exp(-(offsets**2) / (2 * SIGMA**2))
    window = torch.outer(kernel, kernel).expand(1, 1, size, size)
    window = window / window.sum()
    mean = partial(F.conv2d, weight=window)
    mean_a, mean_b = mean(a), mean(b)
    var_a, var_b = mean(a * a) - mean_a**2, mean(b * b) - mean_b**2
    covariance = mean(a * b) - mean_a * mean_b
    numerator = (2 * mean_a * mean_b + BRIGHTNESS) * (2 * covariance + CONTRAST)
    denominator = (mean_a**2 + mean_b**2 + BRIGHTNESS) * (var_a + var_b + CONTRAST)
    values: list[float] = (numerator / denominator).flatten(1).mean(1).reshape(len(original), -1).mean(1).tolist()
    return values


def match(reconstructed: Tensor, original: Tensor) -> list[int]:
    """Assign a reconstruction to each original so that the total squared error is minimal, and return the indices.

    A gradient does not reveal the order of a batch; `reconstructed[match(reconstructed, original)]` is in the order of
    `original`.
    """
    rows, columns = (images.double().flatten(1) for images in (original, reconstructed))
    costs = torch.cdist(rows, columns, compute_mode="donot_use_mm_for_euclid_dist").square()
    indices: list[int] = linear_sum_assignment(costs.cpu().numpy())[1].tolist()
    return indices
