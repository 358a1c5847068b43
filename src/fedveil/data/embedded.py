"""Small data sets that come with scikit-learn: no files, no download."""

import numpy as np

from fedveil.data.choices import whole
from fedveil.data.divide import parts
from fedveil.data.records import Data, tensor_part
from fedveil.data.registry import dataset
from fedveil.data.standard import standardised
from fedveil.errors import BadArgument


@dataset("digits")
def digits(*, flat: bool = True, train_size: int | None = None, test_size: int | None = None) -> Data:
    """Handwritten digits: 1,797 grey images of 8 x 8 in [0, 1], ten classes, 80:20.

    Args:
        flat: inputs of shape (64,); else (1, 8, 8).
        train_size: how many records train, in place of 80 %; all others test.
        test_size: how many of those test; all by default.
    """
    from sklearn.datasets import load_digits

    found = load_digits()
    inputs = (found.images / 16.0).reshape((-1, 64) if flat else (-1, 1, 8, 8))
    targets = found.target.astype(np.int64)
    train, test = parts(len(targets), (0.8, 0.2))
    if train_size is not None:
        most = len(targets) - 1
        if whole("load('digits')", "train_size", train_size, 1) > most:
            raise BadArgument("load('digits')", f"train_size is {train_size}", f"at most {most}, so that some test")
        train, test = np.split(np.concatenate([train, test]), [train_size])
    if test_size is not None:
        if whole("load('digits')", "test_size", test_size, 1) > len(test):
            raise BadArgument("load('digits')", f"test_size is {test_size}", f"at most {len(test)}")
        test = test[:test_size]
    return Data(
        "digits",
        tensor_part(inputs[train], targets[train]),
        tensor_part(inputs[test], targets[test]),
        classes=tuple(str(label) for label in range(10)),
        scale=None if flat else ((0.0,), (1.0,)),
    )


@dataset("diabetes")
def diabetes() -> Data:
    """Progression of diabetes: 442 patients, 10 measures, one target; all standardised on the training part, 80:20."""
    from sklearn.datasets import load_diabetes

    inputs, targets = load_diabetes(return_X_y=True, scaled=False)
    train, test = parts(len(targets), (0.8, 0.2))
    inputs, targets = standardised(inputs, train), standardised(targets[:, None], train)
    return Data("diabetes", tensor_part(inputs[train], targets[train]), tensor_part(inputs[test], targets[test]))
