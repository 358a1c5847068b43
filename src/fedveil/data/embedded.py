"""Small data sets that come with scikit-learn: no files, no download."""

import numpy as np

from fedveil.checks import whole
from fedveil.data.catalogue import About, dataset
from fedveil.data.records import Data, tensor_part
from fedveil.data.splits import parts
from fedveil.data.tables import moments, standardised
from fedveil.errors import BadArgument


@dataset("digits", About("1,797 handwritten digits of 8 x 8", "Alpaydin, Kaynak 1998; scikit-learn", "CC BY 4.0"))
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
    records, scale = tensor_part(inputs, targets), None if flat else ((0.0,), (1.0,))
    return Data("digits", records.take(train), records.take(test), classes=tuple("0123456789"), scale=scale)


@dataset(
    "diabetes",
    About("442 patients, 10 measures, progression of diabetes", "Efron et al. 2004; scikit-learn", "none stated"),
)
def diabetes() -> Data:
    """Progression of diabetes: 442 patients, 10 measures, one target; all standardised on the training part, 80:20."""
    from sklearn.datasets import load_diabetes

    inputs, targets = load_diabetes(return_X_y=True, scaled=False)
    train, test = parts(len(targets), (0.8, 0.2))
    records = tensor_part(standardised(inputs, train), standardised(targets[:, None], train))
    mean, deviation = moments(targets[:, None], train)
    scale = float(mean[0]), float(deviation[0])
    return Data("diabetes", records.take(train), records.take(test), target_scale=scale)
