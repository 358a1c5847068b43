"""One form for everything that travels: safetensors, with plain values as JSON in its head. Nothing is pickled."""

import json
from collections.abc import Mapping
from typing import Any, get_args, get_origin

import torch
from safetensors.torch import load, save
from torch import Tensor

from fedveil.errors import BadArgument

FORMAT = 2
HEAD, LONGEST_ENTRY = 2**16, 2**10  # bytes of a message's values, and of a tensor's name, shape and place
Values = dict[str, Any]
Tensors = dict[str, Tensor]
Packed = tuple[Values, Tensors]


def to_bytes(kind: str, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """A message of some kind: values that JSON can hold, and named tensors in their own dtypes."""
    head = json.dumps({"format": FORMAT, "kind": kind, "values": dict(values)})
    own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}  # none shares memory
    return save(own, {"fedveil": head})


def from_bytes(data: bytes, kind: str, most: int | None = None) -> Packed:
    """The values and tensors of a message of that kind; anything else is refused, and nothing in it is executed.

    Args:
        data: the message.
        kind: what it should be.
        most: tensors that it may hold; more are refused before they are read.
    """
    size = int.from_bytes(data[:8], "little")
    if most is not None and len(data) > size > HEAD + LONGEST_ENTRY * most:
        raise BadArgument(kind, f"its head has {size} bytes, too many for {most} tensors")
    try:
        names = json.loads(data[8 : 8 + size])
        if most is not None and len(names) > most + 1:  # and the values
            raise BadArgument(kind, f"it holds {len(names) - 1} tensors, more than {most}")
        tensors = load(data)  # checks all sizes
        head = json.loads(names["__metadata__"]["fedveil"])
        found = head["kind"], head["format"]
        values = dict(head["values"])
    except BadArgument:
        raise
    except Exception as error:  # whatever garbage makes of safetensors and json
        raise BadArgument(kind, f"it cannot be read: {type(error).__name__}", "send what fedveil wrote") from error
    if found != (kind, FORMAT):
        what = f"it is {found[0]!r} in format {found[1]!r}, not {kind!r} in {FORMAT}"
        raise BadArgument(kind, what, "install the same fedveil everywhere")
    return values, tensors


def kind_of(data: bytes) -> str:
    """The kind of a message, without reading the rest of it; "" if it is none."""
    try:
        size = int.from_bytes(data[:8], "little")
        return str(json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["fedveil"])["kind"])
    except Exception:  # whatever garbage makes of json
        return ""


def layout_of(data: bytes) -> dict[str, Any]:
    """Names, dtypes, shapes and places of a message's tensors; the message was read before."""
    size = int.from_bytes(data[:8], "little")
    return {name: entry for name, entry in json.loads(data[8 : 8 + size]).items() if name != "__metadata__"}


def as_tensor(data: bytes) -> Tensor:
    """Bytes as a tensor, to travel in a message."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def as_bytes(where: str, tensors: Mapping[str, Tensor], name: str) -> bytes:
    """The inverse of `as_tensor`."""
    tensor = tensors.get(name)
    if tensor is None or tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise BadArgument(where, f"{name} must be bytes")
    return tensor.numpy().tobytes()


def checked(where: str, values: Mapping[str, Any], wanted: Mapping[str, Any]) -> Values:
    """The wanted values by name, each of exactly the type that is asked for; further ones are left out.

    >>> checked("answer", {"round": 3, "names": ["a"]}, {"round": int, "names": list[str]})
    {'round': 3, 'names': ['a']}
    """
    for name, kind in wanted.items():
        value, origin, inner = values.get(name), get_origin(kind), get_args(kind)
        if origin is list:
            fits = type(value) is list and all(type(item) in inner for item in value)
        else:
            fits = type(value) in ((origin,) if origin is dict else inner or (kind,))
        if not fits:
            text = kind.__name__ if isinstance(kind, type) and not origin else str(kind)
            raise BadArgument(where, f"{name} must be {text}, got {type(value).__name__}")
    return {name: values[name] for name in wanted}


def under(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """Tensors with a prefix before their names."""
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def those_under(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """The inverse of `under`."""
    start = prefix + "/"
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
