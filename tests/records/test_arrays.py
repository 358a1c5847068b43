"""Arrays, frames and lists as tensors: every type is converted, or refused with the place and the reason."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

from fedveil.errors import BadArgument
from fedveil.records.arrays import as_tensor


def tensor(value):
    return as_tensor("clients[0]", "inputs", value)


def read_only(array):
    array.flags.writeable = False
    return array


FIELDS = np.array([(1.0, 2), (3.0, 4)], dtype=[("x", "f4"), ("n", "i2")])
CONVERTED = {
    "reversed": (np.arange(3)[::-1], torch.int64, [2, 1, 0]),
    "every second": (np.arange(4.0)[::2], torch.float64, [0, 2]),
    "transposed": (np.arange(4.0).reshape(2, 2).T, torch.float64, [[0, 2], [1, 3]]),
    "a field of records": (FIELDS["x"], torch.float32, [1, 3]),
    "read-only": (read_only(np.arange(3.0)), torch.float64, [0, 1, 2]),
    "big-endian": (np.arange(3, dtype=">i2"), torch.int16, [0, 1, 2]),
    "big-endian float": (np.array([1.5], dtype=">f8"), torch.float64, [1.5]),
    "pixels": (np.array([255], dtype=np.uint8), torch.uint8, [255]),
    "uint16": (np.array([65535], dtype=np.uint16), torch.int32, [65535]),
    "uint32": (np.array([2**32 - 1], dtype=np.uint32), torch.int64, [2**32 - 1]),
    "uint64": (np.array([7], dtype=np.uint64), torch.int64, [7]),
    "float16": (np.array([0.5], dtype=np.float16), torch.float32, [0.5]),
    "long double": (np.array([0.5], dtype=np.longdouble), torch.float64, [0.5]),
    "nothing masked": (np.ma.array([1, 2]), torch.int64, [1, 2]),
    "scalar": (np.float64(0.5), torch.float64, 0.5),
    "True": (True, torch.bool, True),
    "int": (3, torch.int64, 3),
    "float": (0.5, torch.float32, 0.5),
    "list": ([1, 2.5], torch.float32, [1, 2.5]),
    "list of lists": ([[1, 2], [3, 4]], torch.int64, [[1, 2], [3, 4]]),
    "Series": (pd.Series([1.5, 2.5], index=[8, 9])[::-1], torch.float64, [2.5, 1.5]),
    "DataFrame": (pd.DataFrame({"a": [1, 2], "b": [0.5, 1]}), torch.float64, [[1, 0.5], [2, 1]]),
    "whole and bool": (pd.DataFrame({"a": [3, 2], "b": [True, False]}), torch.int64, [[3, 1], [2, 0]]),
    "columns of one name": (pd.DataFrame([[1, 2]], columns=["a", "a"]), torch.int64, [[1, 2]]),
    "Int64": (pd.DataFrame({"a": pd.array([1, 2], dtype="Int64")}), torch.int64, [[1], [2]]),
    "boolean": (pd.Series(pd.array([True, False], dtype="boolean")), torch.bool, [True, False]),
    "Float32": (pd.Series(pd.array([0.5], dtype="Float32")), torch.float32, [0.5]),
    "sparse": (pd.get_dummies(pd.Series(["a", "b"]), sparse=True), torch.bool, [[True, False], [False, True]]),
    "categories of numbers": (pd.Series([5, 7], dtype="category"), torch.int64, [5, 7]),
}


@pytest.mark.parametrize("name", CONVERTED)
def test_numbers_become_a_tensor(name):
    value, dtype, numbers = CONVERTED[name]
    found = tensor(value)
    assert (found.dtype, found.tolist()) == (dtype, numbers)
    found.fill_(0)  # a tensor over memory that must not be written would fail here, or end the process


def test_memory_is_shared_where_torch_can_take_it_and_a_tensor_is_returned_unchanged():
    array = np.zeros(2)
    tensor(array)[0] = 1
    assert array.tolist() == [1, 0]
    fixed = read_only(np.zeros(2))
    tensor(fixed)[0] = 1
    assert fixed.tolist() == [0, 0]

    found = torch.zeros(2, dtype=torch.float16, requires_grad=True)
    assert tensor(found) is found


class Foreign:
    """A frame of another library."""

    def to_numpy(self):
        raise AssertionError


class Sparse:
    """A matrix of scipy."""

    def toarray(self):
        raise AssertionError


REFUSED = {
    "text": (np.array(["red"]), ["the array contains 'red', at [0]", "pandas.get_dummies"]),
    "bytes": (np.array([b"red"]), ["the array contains b'red'"]),
    "dates": (np.array(["2020-01-01"], dtype="M8[D]"), ["the array contains 2020-01-01, at [0]", "days since a"]),
    "records": (FIELDS, ["the array contains (1.0, 2), at [0]"]),
    "None": (np.array([[1, 2], [3, None]]), ["the array contains None, at [1, 1]", "omit these records"]),
    "objects": (np.array([1, "red"], dtype=object), ["the array contains 'red', at [1]"]),
    "numbers as objects": (np.array([1, 2], dtype=object), ["the array has type object", ".astype(float)"]),
    "too large": (np.array([2**63], dtype=np.uint64), ["9223372036854775808 is too large for torch's int64"]),
    "long complex": (np.array([1], dtype=np.clongdouble), ["torch does not support complex"]),
    "masked": (np.ma.array([1, 2], mask=[0, 1]), ["1 values are masked, the first at [1]", ".filled(value)"]),
    "ragged": ([[1, 2], [3]], ["rows differ in length"]),
    "a word": ([[1, 2], [3, "red"]], ["the array contains 'red', at [1, 1]"]),
    "a gap": ([1, None], ["the array contains None, at [1]"]),
    "too large a number": ([1, 2**70], ["the array contains 1180591620717411303424, at [1]", "that fit into int64"]),
    "tensors": ([torch.zeros(2), torch.ones(2)], ["got a list of tensors", "torch.stack"]),
    "arrays": ([np.zeros(2), np.zeros(3)], ["rows differ in length or shape"]),
    "a frame with text": (pd.DataFrame({"a": [1], "b": ["red"]}), ["column 'b' contains 'red', at [0]"]),
    "a frame with gaps": (
        pd.DataFrame({"a": [1.0, 2, 3], "b": [1, None, None]}, index=[7, 8, 9]),
        ["column 'b' has 2 missing values, the first in row 1 (index 8)", "omit these records"],
    ),
    "Int64 with a gap": (pd.Series(pd.array([1, None], dtype="Int64")), ["the Series has 1 missing value", "in row 1"]),
    "words as categories": (pd.DataFrame({"a": pd.Categorical(["red"])}), ["column 'a' contains 'red'"]),
    "days": (pd.DataFrame({"day": pd.to_datetime(["2020-05-01"])}), ["column 'day' contains 2020-05-01T00"]),
    "days of a zone": (
        pd.Series(pd.to_datetime(["2020-05-01"], utc=True)),
        ["contains 2020-05-01 00:00", "days since"],
    ),
    "a column of objects": (pd.DataFrame({"a": [1, 2]}, dtype=object), ["'a' has type object", ".astype(float)"]),
    "no columns": (pd.DataFrame(index=[0, 1]), ["the DataFrame has no columns"]),
    "a frame of another library": (Foreign(), ["Foreign", ".to_numpy()"]),
    "sparse": (Sparse(), ["Sparse", ".toarray()"]),
    "nothing": (None, ["got None", "a tensor, a NumPy array, a pandas DataFrame or Series, or numbers"]),
    "a word alone": ("red", ["got str"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_other_values_are_refused_by_place_and_reason(name):
    value, texts = REFUSED[name]
    with pytest.raises(BadArgument) as caught:
        tensor(value)
    for text in ("clients[0]: inputs cannot be converted to a tensor: ", *texts):
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (pd.DataFrame({"a": [1, None], "b": ["x", "2.5"]}), [[1, math.nan], [math.nan, 2.5]]),
        (pd.Series([1, pd.NA, 3], dtype="Int64"), [1, math.nan, 3]),
        (pd.Series([True, None, "no"]), [1, math.nan, math.nan]),
        (pd.Series(["1", "b"], dtype="category"), [1, math.nan]),
        (pd.Series(pd.to_datetime(["2026-01-01"])), [math.nan]),
        (np.array([[1, "b"]]), [[1, math.nan]]),
        (np.array([1, None, 10**400], dtype=object), [1, math.nan, math.nan]),
        (np.ma.array([1, 2], mask=[False, True]), [1, math.nan]),
    ],
)
def test_gaps_become_nan_if_the_caller_asks_for_it(value, wanted):
    found = as_tensor("clients[0]", "inputs", value, gaps=True)
    assert found.dtype == torch.float64
    assert torch.equal(found.nan_to_num(-1), torch.tensor(wanted, dtype=torch.float64).nan_to_num(-1))
    with pytest.raises(BadArgument, match="cannot be converted"):
        tensor(value)


def test_without_gaps_nothing_changes():
    assert as_tensor("clients[0]", "inputs", pd.Series([1, 2]), gaps=True).dtype == torch.int64
