"""Scaling by statistics of the training records alone."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def standardised(values: NDArray[Any], train: NDArray[np.int64]) -> NDArray[np.float64]:
    """Columns with mean 0 and deviation 1 over the training rows; a column that is constant there becomes 0 there."""
    table = np.asarray(values, dtype=np.float64)
    mean, deviation = table[train].mean(0), table[train].std(0)
    flat = deviation <= 1e-12 * np.maximum(1.0, np.abs(mean))
    scaled: NDArray[np.float64] = (table - mean) / np.where(flat, 1.0, deviation)
    return scaled
