"""How similar reconstructed images are to the true ones, for pixels in [0, 1]."""

import math

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn import functional as F

SIGMA = 1.5
BRIGHTNESS, CONTRAST = 0.01**2, 0.03**2
MOST = 120.0  # decibels, for images that are equal to the last bit


def mse(found: Tensor, true: Tensor) -> list[float]:
    """Mean squared difference of each image."""
    values: list[float] = (found.double() - true.double()).square().flatten(1).mean(1).tolist()
    return values


def psnr(found: Tensor, true: Tensor) -> list[float]:
    """-10 log10 of the mean squared difference, in decibels; 120 for equal images."""
    return [min(MOST, -10 * math.log10(value)) if value else MOST for value in mse(found, true)]


def ssim(found: Tensor, true: Tensor) -> list[float]:
    """Structural similarity of each image (Wang et al. 2004), averaged over channels and window positions.

    Gaussian windows inside the image, 11 x 11 pixels (7 x 7 for images under 16 pixels), deviation 1.5; constants
    0.01^2 and 0.03^2.
    """
    size = 11 if min(true.shape[-2:]) >= 16 else 7
    a, b = (image.double().flatten(0, 1).unsqueeze(1) for image in (found, true))
    window = _window(size).to(a.device)

    def mean(values: Tensor) -> Tensor:
        return F.conv2d(values, window)

    mean_a, mean_b = mean(a), mean(b)
    var_a, var_b = mean(a * a) - mean_a**2, mean(b * b) - mean_b**2
    both = mean(a * b) - mean_a * mean_b
    top = (2 * mean_a * mean_b + BRIGHTNESS) * (2 * both + CONTRAST)
    bottom = (mean_a**2 + mean_b**2 + BRIGHTNESS) * (var_a + var_b + CONTRAST)
    values: list[float] = (top / bottom).flatten(1).mean(1).reshape(len(true), -1).mean(1).tolist()
    return values


def _window(size: int) -> Tensor:
    """A Gaussian window whose weights add up to 1, (1, 1, size, size)."""
    away = torch.arange(size, dtype=torch.float64) - size // 2
    line = torch.exp(-(away**2) / (2 * SIGMA**2))
    square = torch.outer(line, line)
    return (square / square.sum()).reshape(1, 1, size, size)


def match(found: Tensor, true: Tensor) -> list[int]:
    """The reconstruction of each true image, by least summed squared difference: gradients do not reveal the order."""
    costs = torch.cdist(
        true.double().flatten(1), found.double().flatten(1), compute_mode="donot_use_mm_for_euclid_dist"
    )
    _, places = linear_sum_assignment(costs.square().cpu().numpy())
    return [int(place) for place in places]
