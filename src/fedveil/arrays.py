"""Records as users hold them: NumPy arrays, pandas frames and lists as tensors, and which DataLoaders will do."""

import sys
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from fedveil.errors import BadArgument

WANTED = "a tensor, a NumPy array, a pandas DataFrame or Series, or numbers"
FILLED = "leave these records out, or fill in a number such as the column's mean"
CODES = "numbers in their place: pandas.get_dummies for inputs, pandas.factorize for classes"
_WIDER = {"f2": "f4", "u2": "i4", "u4": "i8"}  # types that torch has in part only, and one that holds all their values
_WORDS = {"M": "dates", "m": "time spans", "S": "bytes", "U": "text", "V": "records of several fields"}


def as_tensor(where: str, kind: str, value: object) -> Tensor:
    """Numbers in any usual form as a tensor.

    Args:
        where: the object that messages name first, such as "clients[0]".
        kind: what the value is there, such as "inputs" or "targets".
        value: a tensor, a NumPy array or scalar, a pandas DataFrame (a column per feature) or Series, a number, or a
            list of numbers, nested or not.

    Returns:
        A tensor is returned as it is. Whole numbers stay whole, and True and False stay bool. float16 becomes float32,
        unsigned numbers wider than a byte become signed ones that hold them, Python's floating numbers torch's default
        type. A DataFrame gets the type that holds all its columns. Memory is shared with an array that torch can take
        as it is; one that is read-only, reversed or otherwise strided is copied. A file larger than memory is therefore
        opened with ``numpy.load(file, mmap_mode="c")``, not with "r".

    Raises:
        BadArgument: it is something else, holds text, dates or objects, or a frame has missing values; says where.

    Example:
        >>> as_tensor("clients[0]", "inputs", np.arange(3)[::-1])
        tensor([2, 1, 0])
    """
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return _from_array(where, kind, np.asanyarray(value))
    if is_frame(value):
        return _from_frame(where, kind, value)
    if is_series(value):
        return _from_array(where, kind, _column(where, kind, "it", value))
    if isinstance(value, bool | int | float | list | tuple):
        return _from_numbers(where, kind, value)
    fix = f"{WANTED} (.to_numpy() of this one)" if hasattr(value, "to_numpy") else WANTED
    if hasattr(value, "toarray"):
        fix = ".toarray() of it, which is dense"
    if type(value).__module__.startswith("PIL."):
        fix = "a transform of the dataset that gives tensors, such as torchvision.transforms.ToTensor()"
    raise _refused(where, kind, f"it is {_named(value)}", fix)


def is_frame(value: object) -> bool:
    """Whether a value is a pandas DataFrame; pandas is not imported for it."""
    return "pandas" in sys.modules and isinstance(value, sys.modules["pandas"].DataFrame)


def is_series(value: object) -> bool:
    """Whether a value is a pandas Series."""
    return "pandas" in sys.modules and isinstance(value, sys.modules["pandas"].Series)


def check_loader(where: str, loader: DataLoader[Any]) -> None:
    """Refuse a DataLoader that does not give every record of a Dataset once."""
    sampler = loader.sampler
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        what = f"{type(loader.dataset).__name__} has no length or no items by index"
        raise BadArgument(where, what, "a Dataset with __len__ and __getitem__")
    whole = (
        isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(loader.dataset)
    )
    if loader.batch_size is None or not (whole or type(sampler) is SequentialSampler):
        own = type(sampler if loader.batch_size else loader.batch_sampler or sampler).__name__
        what = f"the DataLoader chooses its records by a {own} of its own, which would be lost"
        raise BadArgument(where, what, "a DataLoader over torch.utils.data.Subset(dataset, indices)")


def _refused(where: str, kind: str, why: str, fix: str) -> BadArgument:
    return BadArgument(where, f"{kind} cannot become a tensor: {why}", fix)


def _named(value: object) -> str:
    kind = type(value)
    home = kind.__module__.partition(".")[0]
    return "None" if value is None else kind.__name__ if home == "builtins" else f"{home}.{kind.__name__}"


def _from_numbers(where: str, kind: str, value: Any) -> Tensor:
    """Python's numbers, in lists or not."""
    if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
        raise _refused(where, kind, f"it is a {type(value).__name__} of tensors", "one tensor: torch.stack")
    try:
        array = np.asarray(value)
    except ValueError:  # rows of different length
        array = np.asarray(None)
    if array.dtype.kind in "SUO":  # one word among numbers makes all of them words
        raise _refused(where, kind, *_odd_in_list(value))
    tensor = _from_array(where, kind, array)
    return tensor.to(torch.get_default_dtype()) if tensor.is_floating_point() else tensor


def _odd_in_list(value: Any, place: str = "") -> tuple[str, str]:
    """Why a list is no array of numbers, and what to do."""
    if not isinstance(value, list | tuple):
        large = isinstance(value, int)
        return f"{place or 'it'} is {value!r:.40}" + (", too large a number" if large else ""), "numbers alone"
    for index, item in enumerate(value):
        if isinstance(item, np.ndarray):
            return "it is a list of arrays that are not alike", "numeric arrays of one shape"
        plain = type(item) is bool or type(item) is float or (isinstance(item, int) and abs(item) < 2**63)
        if not plain and (why := _odd_in_list(item, f"{place}[{index}]"))[0]:
            return why
    lengths = sorted({len(item) for item in value if isinstance(item, list | tuple)})
    if len(lengths) > 1:
        return f"rows have {lengths[0]} to {lengths[-1]} numbers", "rows of one length"
    return "", ""


def _from_array(where: str, kind: str, array: NDArray[Any]) -> Tensor:
    """An array as a tensor, sharing its memory where that is safe."""
    if isinstance(array, np.ma.MaskedArray):
        hidden = np.argwhere(np.ma.getmaskarray(array)).tolist()
        if hidden:
            why = f"{len(hidden)} of its values are masked, the first at {hidden[0]}"
            raise _refused(where, kind, why, ".filled(value), or leave these records out")
        array = np.asarray(array)
    if array.dtype.kind == "O":
        raise _refused(where, kind, *_odd_in_objects(array))
    if array.dtype.kind not in "biufc":
        some = f", such as {array.flat[0].item()!r:.40}" if array.size and array.dtype.kind in "SU" else ""
        fix = CODES if array.dtype.kind in "SU" else "an array of numbers"
        raise _refused(where, kind, f"it holds {_WORDS.get(array.dtype.kind, array.dtype)}{some}", fix)
    kind_of = array.dtype.newbyteorder("=")
    if kind_of == np.uint64:
        if array.size and array.max() > np.iinfo(np.int64).max:
            raise _refused(where, kind, f"{array.max()} is too large for torch's int64", "smaller whole numbers")
        kind_of = np.dtype(np.int64)
    kind_of = np.dtype(_WIDER.get(kind_of.str[1:], kind_of))
    if kind_of.itemsize > 8 and kind_of.kind == "f":
        kind_of = np.dtype(np.float64)
    array = array.astype(kind_of, order="C", copy=not (array.flags.writeable and array.flags.c_contiguous))
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise _refused(where, kind, f"torch has no {array.dtype}", "an array of float32, say") from error


def _odd_in_objects(array: NDArray[Any]) -> tuple[str, str]:
    """What an array of objects holds that is no number."""
    for place, item in np.ndenumerate(array):
        if not isinstance(item, bool | int | float | np.number | np.bool_):
            shown = f"{item!r:.40}" if isinstance(item, str) else _named(item)
            return f"it holds objects, and the one at {list(place)} is {shown}", FILLED if item is None else CODES
    return "it holds numbers as objects", ".astype(numpy.float32)"


def _from_frame(where: str, kind: str, frame: Any) -> Tensor:
    """A frame as (rows, columns)."""
    columns = [_column(where, kind, f"column {name!r}", frame.iloc[:, at]) for at, name in enumerate(frame.columns)]
    if not columns:
        raise _refused(where, kind, "the DataFrame has no columns", "a DataFrame with a column per feature")
    return _from_array(where, kind, np.stack(columns, 1))


def _column(where: str, kind: str, called: str, series: Any) -> NDArray[Any]:
    """The numbers of a column; anything else in it is named."""
    missing = np.flatnonzero(series.isna().to_numpy())
    if len(missing):
        row, label = int(missing[0]), series.index[missing[0]]
        first = f"row {row}" + ("" if label == row else f" (index {label})")
        why = f"{called} has {len(missing)} missing value{'s' * (len(missing) > 1)}, the first in {first}"
        raise _refused(where, kind, why, FILLED)
    plain = getattr(series.dtype, "numpy_dtype", None)  # of types that can say "missing": Int64, boolean, Arrow's
    array: NDArray[Any] = series.to_numpy(dtype=plain) if plain is not None else series.to_numpy()
    if array.dtype.kind in "biufc":
        return array
    dates = series.dtype.kind in "mM"
    numbers = all(isinstance(item, bool | int | float | np.number) for item in array.flat)
    fix = "numbers in their place, such as days since a date" if dates else ".astype(float)" if numbers else CODES
    some = f", such as {str(array.flat[0]) if dates else repr(array.flat[0]):.40}" if array.size else ""
    raise _refused(where, kind, f"{called} has type {series.dtype}{some}", fix)
