"""Wavelet scattering of images (Bruna and Mallat 2013): features that are fixed beforehand, so they cost no privacy.

Two scales and eight angles, orders 0 to 2: 81 channels per colour on a grid of a quarter of the image's side, each
group of nine channels normalised within the record, as in Tramèr and Boneh (arXiv 2011.11660). The values agree with
those of the package kymatio to within 0.3 %; that package does not import with current versions of SciPy.
"""

import math
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import group_norm, pad

SCALES, ANGLES, BORDER = 2, 8, 4
GROUP = 9  # channels that are normalised together
CHUNK = 250  # images at a time


def _gabor(size: int, sigma: float, theta: float, frequency: float, slant: float) -> Tensor:
    """Return a Gaussian times a plane wave, summed over periods of the grid."""
    rotation = torch.tensor(
        [[math.cos(theta), -math.sin(theta)], [math.sin(theta), math.cos(theta)]], dtype=torch.float64
    )
    curve = rotation @ torch.diag(torch.tensor([1.0, slant**2], dtype=torch.float64)) @ rotation.T / (2 * sigma**2)
    x, y = torch.meshgrid(*[torch.arange(-2 * size, 3 * size, dtype=torch.float64)] * 2, indexing="ij")
    decay = -(curve[0, 0] * x * x + 2 * curve[0, 1] * x * y + curve[1, 1] * y * y)
    wave = frequency * (x * math.cos(theta) + y * math.sin(theta))
    whole = torch.exp(torch.complex(decay, wave)).view(5, size, 5, size).sum((0, 2))
    return whole * slant / (2 * math.pi * sigma**2)


@cache
def _filters(size: int) -> tuple[Tensor, dict[tuple[int, int], Tensor]]:
    """Return the Fourier transforms of the low-pass filter, and of the wavelets by scale and angle."""
    low = torch.fft.fft2(_gabor(size, 0.8 * 2 ** (SCALES - 1), 0.0, 0.0, 1.0)).real.float()
    wavelets = {}
    for scale in range(SCALES):
        for angle in range(ANGLES):
            theta, sigma = (ANGLES // 2 - 1 - angle) * math.pi / ANGLES, 0.8 * 2**scale
            wave = _gabor(size, sigma, theta, 0.75 * math.pi / 2**scale, 4 / ANGLES)
            envelope = _gabor(size, sigma, theta, 0.0, 4 / ANGLES)
            wave = wave - wave.sum() / envelope.sum() * envelope  # without a mean
            wavelets[scale, angle] = torch.fft.fft2(wave).real.float()
    return low, wavelets


def scatter(images: Tensor) -> Tensor:
    """Return the scattering coefficients, with dims (images, colours x 81, side / 4, side / 4)."""
    low, wavelets = _filters(images.shape[-1] + 2 * BORDER)
    step = 2**SCALES

    def smooth(spectrum: Tensor) -> Tensor:
        whole = torch.fft.ifft2(spectrum * low).real
        return whole[..., BORDER:-BORDER:step, BORDER:-BORDER:step]

    def modulus(spectrum: Tensor, wavelet: Tensor) -> Tensor:
        return torch.fft.fft2(torch.fft.ifft2(spectrum * wavelet).abs())

    spectrum = torch.fft.fft2(pad(images, (BORDER,) * 4, mode="reflect"))
    first = {name: modulus(spectrum, wavelet) for name, wavelet in wavelets.items()}
    second = [modulus(first[0, angle], wavelets[1, other]) for angle in range(ANGLES) for other in range(ANGLES)]
    return torch.stack([smooth(own) for own in (spectrum, *first.values(), *second)], 2).flatten(1, 2)


def features(images: Tensor) -> Tensor:
    """Return one row of normalised coefficients per image."""
    parts = [scatter(part) for part in images.split(CHUNK)]
    return torch.cat([group_norm(part, part.shape[1] // GROUP).flatten(1) for part in parts])
