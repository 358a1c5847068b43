"""Bytes of messages: every dtype arrives as it was, and nothing else is read as a message."""

import json
import pickle

import pytest
import torch

from fedveil.errors import BadArgument
from fedveil.wire import from_bytes, to_bytes


def test_every_dtype_is_sent_unchanged_and_so_are_tensors_that_share_memory():
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    kinds = (*floats, torch.int64, torch.int32, torch.uint8, torch.bool)
    tensors = {str(kind): torch.arange(6).reshape(2, 3).to(kind) for kind in kinds}
    tensors |= {"none": torch.empty(0, 3), "number": torch.tensor(5.0), "turned": tensors["torch.float32"].T}
    values = {"a": 1, "b": [True, None, "ü"], "c": {"d": 0.1}}
    found = from_bytes(to_bytes("test", values, tensors), "test")
    assert found[0] == values
    assert found[1].keys() == tensors.keys()
    assert all(found[1][name].dtype == t.dtype and torch.equal(found[1][name], t) for name, t in tensors.items())


def bare(head):
    """A safetensors file without tensors, with any head."""
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text


GOOD = to_bytes("test", {"a": 1}, {"x": torch.arange(3.0)})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        pickle.dumps({"x": print}),
        GOOD[:-1],
        GOOD + b"0",
        GOOD.replace(b"F32", b"STR"),
        GOOD.replace(b"[3]", b"[9]"),
        (2**62).to_bytes(8, "little") + GOOD[8:],
        bare({}),
        bare({"__metadata__": {"fedveil": "{"}}),
        bare({"__metadata__": {"fedveil": '{"kind": "test", "format": 2}'}}),
        bare({"__metadata__": {"fedveil": '{"kind": "test", "format": 2, "values": 3}'}}),
        bare({"__metadata__": {"fedveil": "[" * 100_000}}),
    ],
    ids=range(12),
)
def test_bytes_that_are_no_message_are_refused(data):
    with pytest.raises(BadArgument, match="test: the message cannot be read: "):
        from_bytes(data, "test")


def test_a_message_of_another_kind_or_format_is_refused():
    with pytest.raises(BadArgument, match="request: expected 'request' in format 2, got 'test' in format 2"):
        from_bytes(GOOD, "request")
    with pytest.raises(
        BadArgument, match=r"(?s)test: expected .*, got 'test' in format 9.*Fix: install the same version"
    ):
        from_bytes(GOOD.replace(b'format\\": 2', b'format\\": 9'), "test")
