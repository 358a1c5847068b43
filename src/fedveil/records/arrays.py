"""Convert NumPy arrays, pandas frames and lists of numbers to tensors."""

import sys
from typing import TYPE_CHECKING, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.errors import BadArgument

if TYPE_CHECKING:
    from pandas import DataFrame, Series

Array = NDArray[np.generic]
FORMS = "a tensor, a NumPy array, a pandas DataFrame or Series, or numbers"
ABSENT_FIX = "omit these records, or fill in a number such as the column's mean"
NUMERIC_FIX = (
    "use numbers: pandas.get_dummies for inputs, pandas.factorize for classes, days since a fixed date for dates"
)
FIX_INT64 = "use integers that fit into int64"
_WIDER_TYPES = {"f2": "f4", "f16": "f8", "u2": "i4", "u4": "i8", "u8": "i8"}  # types that torch supports poorly
_NUMBERS = bool | int | float | np.number | np.bool_


class _NotNumericError(Exception):
    """A value is not numeric; the arguments are the reason and a fix."""


def as_tensor(where: str, kind: str, value: object, *, gaps: bool = False) -> Tensor:
    """Convert numbers in any common form to a tensor.

    Args:
        where: the beginning of error messages: the owner of the value, such as "client 0".
        kind: the role of the value, such as "inputs" or "targets".
        value: a tensor, a NumPy array or scalar, a pandas DataFrame (a column per feature) or Series, a number, or a
            list of numbers, nested or not.
        gaps: whether to replace everything in an array or frame that is not a number with NaN, instead of raising an
            error.

    Returns:
        The tensor. A tensor is returned unchanged. Integers stay integers, and bools stay bool. float16 becomes
        float32, unsigned integers wider than a byte become signed integers that can represent them, and Python floats
        get torch's default dtype. A DataFrame gets a dtype that can represent all its columns. The tensor shares memory
        with an array that torch can use directly, but read-only, reversed or otherwise strided arrays are copied.
        Therefore, open a file that is larger than memory with ``numpy.load(file, mmap_mode="c")``, not with "r".

    Raises:
        BadArgument: the value has an unsupported form, contains text, dates or objects, or is a frame with missing
            values.

    Example:
        >>> as_tensor("client 0", "inputs", np.arange(3)[::-1])
        tensor([2, 1, 0])
    """
    if isinstance(value, Tensor):
        return value
    try:
        tensor = _from_array(_read_array(value))
    except _NotNumericError as error:
        if gaps and (isinstance(value, np.ndarray) or is_frame(value) or is_series(value)):
            return torch.from_numpy(_fill_gaps(value))
        reason, fix = error.args
        raise BadArgument(where, f"{kind} cannot be converted to a tensor: {reason}", fix) from error.__cause__
    is_python_number = isinstance(value, int | float | list | tuple) and not isinstance(value, np.generic)
    return tensor.to(torch.get_default_dtype()) if is_python_number and tensor.is_floating_point() else tensor


def is_frame(value: object) -> TypeGuard["DataFrame"]:
    """Return whether a value is a pandas DataFrame, without importing pandas."""
    return "pandas" in sys.modules and isinstance(value, sys.modules["pandas"].DataFrame)


def is_series(value: object) -> TypeGuard["Series"]:
    """Return whether a value is a pandas Series, without importing pandas."""
    return "pandas" in sys.modules and isinstance(value, sys.modules["pandas"].Series)


def _read_array(value: object) -> Array:
    """Return numbers in any form as an array."""
    if isinstance(value, np.ndarray | np.generic):
        return np.asanyarray(value)
    if is_frame(value):
        columns = [_read_column(f"column {name!r}", column) for name, column in value.items()]
        if not columns:
            raise _NotNumericError("the DataFrame has no columns", "use a DataFrame with a column per feature")
        return np.stack(columns, 1)
    if is_series(value):
        return _read_column("the Series", value)
    if isinstance(value, bool | int | float | list | tuple):
        return _read_numbers(value)
    image = type(value).__module__.startswith("PIL.")
    fix = "give the dataset a transform that returns tensors, such as torchvision.transforms.ToTensor()"
    raise _NotNumericError(
        f"got {_name_type(value)}", fix if image else f"use {FORMS}, or try .to_numpy() or .toarray()"
    )


def _fill_gaps(value: object) -> NDArray[np.float64]:
    """Return an array or frame as float64, with NaN for everything that is not a number."""
    masked = np.ma.getmaskarray(value) if isinstance(value, np.ma.MaskedArray) else False
    cells = np.asarray(value, dtype=object)
    numbers = [_as_number(item) for item in cells.flat]
    return np.where(masked, np.nan, np.array(numbers, dtype=np.float64).reshape(cells.shape))


def _as_number(item: object) -> float:
    try:
        return float(item)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return float("nan")


def _name_type(value: object) -> str:
    kind = type(value)
    package = kind.__module__.partition(".")[0]
    return "None" if value is None else kind.__name__ if package == "builtins" else f"{package}.{kind.__name__}"


def _read_numbers(value: object) -> Array:
    """Return a Python number, or nested lists of numbers, as an array."""
    if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
        raise _NotNumericError(f"got a {type(value).__name__} of tensors", "stack them with torch.stack")
    try:
        array = np.asarray(value)
    except ValueError:
        raise _NotNumericError("rows differ in length or shape", "use rows of the same shape") from None
    # a single string turns all values into strings
    return np.asarray(value, dtype=object) if array.dtype.kind in "SU" else array


def _read_column(name: str, series: "Series") -> Array:
    """Return the values of a column as an array; refuse values that are missing or not numeric."""
    missing = np.flatnonzero(series.isna().to_numpy())
    if len(missing):
        row, label = int(missing[0]), series.index[missing[0]]
        first_row = f"row {row}" + ("" if label == row else f" (index {label})")
        reason = f"{name} has {len(missing)} missing value{'s' * (len(missing) > 1)}, the first in {first_row}"
        raise _NotNumericError(reason, ABSENT_FIX)
    array: Array = series.to_numpy(dtype=getattr(series.dtype, "numpy_dtype", None))  # for nullable types such as Int64
    _check_numeric(name, array)
    return array


def _check_numeric(name: str, array: Array) -> None:
    """Refuse text, dates and objects; the error contains the first value that is not a number."""
    if array.dtype.kind in "biufc":
        return
    for index, item in np.ndenumerate(array):
        if not isinstance(item, _NUMBERS) or (isinstance(item, int) and abs(item) >= 2**63):
            shown = repr(str(item)) if isinstance(item, str) else str(item)
            position = f", at {list(index)}" if index else ""
            fix = ABSENT_FIX if item is None else FIX_INT64 if isinstance(item, int) else NUMERIC_FIX
            raise _NotNumericError(f"{name} contains {shown:.40}{position}", fix)
    raise _NotNumericError(f"{name} has type {array.dtype}", "convert it: .astype(float)")


def _from_array(array: Array) -> Tensor:
    """Return an array as a tensor, which shares the array's memory if that is safe."""
    if isinstance(array, np.ma.MaskedArray):
        masked = np.argwhere(np.ma.getmaskarray(array)).tolist()
        if masked:
            reason = f"{len(masked)} values are masked, the first at {masked[0]}"
            raise _NotNumericError(reason, "call .filled(value), or omit these records")
        array = np.asarray(array)
    _check_numeric("the array", array)
    dtype = array.dtype.newbyteorder("=")
    if dtype == np.uint64 and array.size and (largest := array.max()) > np.iinfo(np.int64).max:
        raise _NotNumericError(f"{largest} is too large for torch's int64", "use smaller integers")
    dtype = np.dtype(_WIDER_TYPES.get(dtype.str[1:], dtype))
    array = array.astype(dtype, order="C", copy=not (array.flags.writeable and array.flags.c_contiguous))
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise _NotNumericError(f"torch does not support {array.dtype}", "use another dtype, such as float32") from error
