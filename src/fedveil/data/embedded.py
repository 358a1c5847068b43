"""Small data sets that come with scikit-learn and need no download."""

import numpy as np

from fedveil.data.catalogue import PositiveInt, Scaling
from fedveil.data.dataset import Data, part_from_arrays
from fedveil.data.splits import divide
from fedveil.errors import BadArgument
from fedveil.records.encoding import NumberColumn, TableEncoding

DIABETES_MOMENTS = ((50, 1.5, 26, 95, 190, 115, 50, 4, 4.6, 90), (13, 0.5, 4, 14, 35, 30, 13, 1.3, 0.5, 11))
"""Rounded means and standard deviations of the ten measurements in the published data set."""


def digits(*, flat: bool = True, train_size: PositiveInt | None = None, test_size: PositiveInt | None = None) -> Data:
    """Load handwritten digits: 1,797 greyscale images of 8 x 8 pixels in [0, 1], ten classes, split 80:20.

    Args:
        flat: whether inputs have shape (64,) instead of (1, 8, 8).
        train_size: number of training records, instead of 80 %; the remaining records are test records.
        test_size: number of test records to use; all by default.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    inputs = (bunch.images / 16.0).reshape((-1, 64) if flat else (-1, 1, 8, 8))
    targets = bunch.target.astype(np.int64)
    train, test = divide(len(targets), (0.8, 0.2))
    if train_size is not None:
        _check_size("train_size", train_size, len(targets) - 1)
        train, test = np.split(np.concatenate([train, test]), [train_size])
    if test_size is not None:
        test = test[: _check_size("test_size", test_size, len(test))]
    records, scale = part_from_arrays(inputs, targets), None if flat else ((0.0,), (1.0,))
    return Data("digits", records.take(train), records.take(test), classes=tuple("0123456789"), scale=scale)


def _check_size(option: str, size: int, limit: int) -> int:
    if size > limit:
        raise BadArgument("load('digits')", f"{option} must be at most {limit}, got {size}")
    return size


def diabetes(*, scaling: Scaling = "records") -> Data:
    """Load diabetes progression: 442 patients, 10 measurements, standardised, split 80:20.

    Args:
        scaling: standardise with the training "records", or with "public" constants, as differential privacy requires.
    """
    from sklearn.datasets import load_diabetes

    from fedveil.data.tables import standardise

    bunch = load_diabetes(scaled=False)
    inputs, targets = bunch.data, bunch.target
    train, test = divide(len(targets), (0.8, 0.2))
    if scaling == "public":
        mean, deviation = np.array([150.0]), np.array([75.0])
        moments = [np.array(values, dtype=np.float64) for values in DIABETES_MOMENTS]
        inputs, targets = (inputs - DIABETES_MOMENTS[0]) / DIABETES_MOMENTS[1], (targets[:, None] - mean) / deviation
    else:
        inputs, *moments = standardise(inputs, train)
        targets, mean, deviation = standardise(targets[:, None], train)
    columns = zip(bunch.feature_names, *(values.tolist() for values in moments), strict=True)
    encoding = TableEncoding(tuple([NumberColumn(*column) for column in columns]))
    records, scale = part_from_arrays(inputs, targets), (float(mean[0]), float(deviation[0]))
    parts = records.take(train), records.take(test)
    return Data("diabetes", *parts, target_scale=scale, input_encoding=encoding, target="progression")
