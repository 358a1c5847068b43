"""Encode and decode messages as safetensors, with plain values as JSON in the header. Nothing is pickled."""

import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_origin

import torch
from safetensors.torch import load, save
from torch import Tensor

from fedveil.errors import BadArgument

FORMAT = 2
MAX_HEADER, MAX_ENTRY = 2**16, 2**10  # maximum sizes in bytes of a message's values, and of one tensor's entry
MAX_TEXT = 2**10  # maximum number of characters in a string
MAX_NESTED = 2**14  # maximum number of lists and dicts in the values: enough for a roster of 10,000 members
MAX_DIGITS = 20  # maximum number of digits of an integer: enough for 64 bits
HEAD_PATTERN = re.compile(rb'\{"__metadata__":\{"fedveil":"\{\\"format\\": \d+, \\"kind\\": \\"(\w+)\\"')
Values = dict[str, Any]
Tensors = dict[str, Tensor]
Packed = tuple[Values, Tensors]


def to_bytes(kind: str, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """Encode a message that consists of JSON values and named tensors."""
    metadata = json.dumps({"format": FORMAT, "kind": kind, "values": dict(values)})
    # safetensors refuses tensors that share memory
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    return save(copies, {"fedveil": metadata})


def from_bytes(data: bytes, kind: str, max_tensors: int | None = None, max_header: int = MAX_HEADER) -> Packed:
    """Decode a message of the given kind and refuse anything else. Decoding never executes code.

    Args:
        data: the message.
        kind: the expected kind.
        max_tensors: maximum number of tensors, or None for a trusted message. Messages with more tensors, too large a
            header or integers of more than 20 digits are refused before their tensors are decoded.
        max_header: maximum number of bytes for the values, if `max_tensors` is given.
    """
    size = int.from_bytes(data[:8], "little")
    if max_tensors is not None and len(data) > size > max_header + MAX_ENTRY * max_tensors:
        raise BadArgument(kind, f"the header has {size} bytes, too many for {max_tensors} tensors")
    try:
        if size > len(data) - 8:
            raise ValueError
        header = data[8 : 8 + size]
        # each tensor's entry contains 3 lists and dicts
        if max_tensors is not None and header.count(b"[") + header.count(b"{") > MAX_NESTED + 3 * max_tensors:
            raise BadArgument(kind, f"the header has too many lists and dicts for {max_tensors} tensors")
        entries = json.loads(header)
        if max_tensors is not None and len(entries) > max_tensors + 1:  # one of the entries is for the values
            raise BadArgument(
                kind, f"the message has {len(entries) - 1} tensors, more than the maximum of {max_tensors}"
            )
        text = entries["__metadata__"]["fedveil"]
        fields = json.loads(text) if max_tensors is None else _BOUNDED_DECODER.decode(text)
        decoded = load(data)  # checks all sizes, but returns tensors in arbitrary order
        tensors = {name: decoded[name] for name in entries if name in decoded}
        result = fields["kind"], fields["format"]
        values = dict(fields["values"])
    except BadArgument:
        raise
    except Exception as error:  # safetensors and json raise many exception types for invalid data
        message = f"the message cannot be read: {type(error).__name__}"
        raise BadArgument(kind, message, "send a message that Fedveil encoded") from error
    if result != (kind, FORMAT):
        actual_kind, actual_format = (str(value)[:20] for value in result)
        message = f"expected {kind!r} in format {FORMAT}, got {actual_kind!a} in format {actual_format}"
        raise BadArgument(kind, message, "install the same version of Fedveil everywhere")
    return values, tensors


def _parse_integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError
    return int(text)


_BOUNDED_DECODER = json.JSONDecoder(parse_int=_parse_integer)


def read_kind(data: bytes) -> str:
    """Return the kind of a message from its first bytes, or "" if the data are not a message."""
    result = HEAD_PATTERN.match(data, 8, 8 + MAX_ENTRY)
    return result[1].decode() if result else ""


def read_layout(data: bytes) -> dict[str, Any]:
    """Return the names, dtypes, shapes and offsets of the tensors in a message that has already been decoded."""
    size = int.from_bytes(data[:8], "little")
    return {name: entry for name, entry in json.loads(data[8 : 8 + size]).items() if name != "__metadata__"}


def as_tensor(data: bytes) -> Tensor:
    """Return bytes as a tensor that can be sent in a message."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def as_bytes(where: str, tensors: Mapping[str, Tensor], name: str) -> bytes:
    """Return the bytes in the tensor called `name`; the inverse of `as_tensor`."""
    tensor = tensors.get(name)
    if tensor is None or tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise BadArgument(where, f"{name} must be bytes")
    return tensor.numpy().tobytes()


def check_fields(where: str, values: Mapping[str, Any], expected: Mapping[str, Any]) -> Values:
    """Return the expected values by name; refuse values of the wrong type and strings that are too long.

    >>> check_fields("answer", {"round": 3, "names": ["a"]}, {"round": int, "names": list[str]})
    {'round': 3, 'names': ['a']}
    """
    for name, expected_type in expected.items():
        value, origin, item_types = values.get(name), get_origin(expected_type), get_args(expected_type)
        if origin is list:
            is_valid = type(value) is list and all(type(item) in item_types for item in value)
        else:
            is_valid = type(value) in ((origin,) if origin is dict else item_types or (expected_type,))
        if not is_valid or name not in values:
            type_name = expected_type.__name__ if isinstance(expected_type, type) and not origin else str(expected_type)
            raise BadArgument(where, f"{name} must be {type_name}, got {type(value).__name__}")
        items = value if isinstance(value, list) else [value]
        if any(type(item) is str and len(item) > MAX_TEXT for item in items):
            raise BadArgument(where, f"{name} has more than {MAX_TEXT} characters")
    return {name: values[name] for name in expected}


T = TypeVar("T")


def add_prefix(prefix: str, tensors: Mapping[str, T]) -> dict[str, T]:
    """Put a prefix and a slash in front of each name."""
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def strip_prefix(prefix: str, tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the tensors whose names start with the prefix, and strip it; the inverse of `add_prefix`."""
    full_prefix = prefix + "/"
    return {name.removeprefix(full_prefix): tensor for name, tensor in tensors.items() if name.startswith(full_prefix)}
