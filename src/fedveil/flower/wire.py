"""What a round looks like as Flower messages: all arrays of a dtype in one, plain values as JSON, nothing pickled.

One array, because Flower sends each as objects of their own, with a request or two for every one of them.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from fedveil.errors import BadArgument
from fedveil.scheme.messages import Arrays

FORMAT = 1
CONFIG, ARRAYS = "fedveil", "fedveil.arrays"
MOST_RECORDS = 2**53


@dataclass(frozen=True, eq=False)
class Ask:
    """What a client is sent in a round.

    Attributes:
        session: of the server's process: after a restart it is another.
        round: from 0.
        token: of the exchange; an answer quotes it.
        kind: of the defence.
        settings: of the defence, for the client's part of it.
        loss: its name.
        loss_settings: see `Loss.settings`.
        whole_shard: all records of the client, or its next batch.
        batch_size: records in a batch.
        seed: of the order of records.
        arrays: of the broadcast.
        values: of the broadcast.
    """

    session: str
    round: int
    token: str
    kind: str
    settings: dict[str, Any]
    loss: str
    loss_settings: dict[str, Any]
    whole_shard: bool
    batch_size: int
    seed: int
    arrays: Arrays
    values: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Answer:
    """What a client sends back.

    Attributes:
        round: the ask's.
        token: the ask's.
        kind: the ask's.
        records: |D_k|, the client's weight.
        arrays: of the update.
        values: of the update.
    """

    round: int
    token: str
    kind: str
    records: int
    arrays: Arrays
    values: dict[str, Any]


def flatten(arrays: Mapping[str, NDArray[Any]]) -> tuple[dict[str, NDArray[Any]], list[list[Any]]]:
    """One flat array for each dtype, and [name, dtype, shape] of all that are in them."""
    by_dtype: dict[str, list[NDArray[Any]]] = {}
    index: list[list[Any]] = []
    for name, array in arrays.items():
        by_dtype.setdefault(array.dtype.name, []).append(array.reshape(-1))
        index.append([name, array.dtype.name, list(array.shape)])
    return {dtype: np.concatenate(parts) for dtype, parts in by_dtype.items()}, index


def unflatten(flat: Mapping[str, NDArray[Any]], index: list[list[Any]]) -> Arrays:
    """The inverse of `flatten`; refuses an index that does not cover its arrays exactly."""
    where, used, found = "arrays", dict.fromkeys(flat, 0), {}
    for name, dtype, shape in index:
        if not isinstance(name, str) or dtype not in flat or not all(type(n) is int and n >= 0 for n in shape):
            raise BadArgument(where, "the index of the arrays is malformed")
        start, stop = used[dtype], used[dtype] + math.prod(shape)
        if stop > len(flat[dtype]) or flat[dtype].dtype.name != dtype or name in found:
            raise BadArgument(where, f"{name[:80]!r} is not in the {dtype} that was sent")
        found[name] = flat[dtype][start:stop].reshape(shape)
        used[dtype] = stop
    if any(used[dtype] != len(array) for dtype, array in flat.items()):
        raise BadArgument(where, "there are more numbers than the index names")
    return found


def _write(kind: str, values: Mapping[str, Any], arrays: Arrays) -> RecordDict:
    flat, index = flatten(arrays)
    text = json.dumps({**values, "index": index})
    config = ConfigRecord({"format": FORMAT, "kind": kind, "values": text})
    return RecordDict({CONFIG: config, ARRAYS: ArrayRecord({name: Array(array) for name, array in flat.items()})})


def _read(kind: str, content: RecordDict, wanted: Mapping[str, type]) -> tuple[dict[str, Any], Arrays]:
    """Values of the wanted types, and arrays; whatever else arrives is refused, and nothing in it is executed."""
    config, arrays = content.get(CONFIG), content.get(ARRAYS)
    if not isinstance(config, ConfigRecord) or not isinstance(arrays, ArrayRecord):
        raise BadArgument(kind, "this message is not Fedveil's", "server and client apps must both use fedveil.flower")
    if config.get("format") != FORMAT or config.get("kind") != kind:
        what = f"it is {config.get('kind')!r} in format {config.get('format')!r}, not {kind!r} in {FORMAT}"
        raise BadArgument(kind, what, "install the same fedveil everywhere")
    try:
        values = json.loads(str(config["values"]))
        flat = {name: array.numpy() for name, array in arrays.items()}
        if any(array.ndim != 1 for array in flat.values()):
            raise ValueError("an array is not flat")
        found = unflatten(flat, values.pop("index"))
    except BadArgument:
        raise
    except Exception as error:  # whatever garbage makes of json, numpy and the index
        raise BadArgument(kind, f"it cannot be read: {type(error).__name__}") from error
    for name, of in wanted.items():
        if type(values.get(name)) is not of:
            raise BadArgument(kind, f"{name} must be {of.__name__}, got {type(values.get(name)).__name__}")
    return values, found


def write_ask(ask: Ask) -> RecordDict:
    """An ask as Flower records."""
    names = [name for name in Ask.__dataclass_fields__ if name != "arrays"]
    return _write("ask", {name: getattr(ask, name) for name in names}, ask.arrays)


def read_ask(content: RecordDict) -> Ask:
    """The inverse of `write_ask`."""
    values, arrays = _read("ask", content, {n: _kind(f.type) for n, f in _fields(Ask)})
    if values["round"] < 0 or values["batch_size"] < 1:
        raise BadArgument("ask", "round must be at least 0 and batch_size at least 1")
    return Ask(**{name: values[name] for name, _ in _fields(Ask)}, arrays=arrays)


def write_answer(answer: Answer) -> RecordDict:
    """An answer as Flower records."""
    names = [name for name in Answer.__dataclass_fields__ if name != "arrays"]
    return _write("answer", {name: getattr(answer, name) for name in names}, answer.arrays)


def read_answer(content: RecordDict) -> Answer:
    """The inverse of `write_answer`."""
    values, arrays = _read("answer", content, {n: _kind(f.type) for n, f in _fields(Answer)})
    if not 1 <= values["records"] <= MOST_RECORDS:
        raise BadArgument("answer", f"records must be from 1 to 2^53, got {values['records']}")
    return Answer(**{name: values[name] for name, _ in _fields(Answer)}, arrays=arrays)


def _fields(message: type) -> list[tuple[str, Any]]:
    return [(n, f) for n, f in message.__dataclass_fields__.items() if n != "arrays"]  # type: ignore[attr-defined]


def _kind(annotation: Any) -> type:
    return getattr(annotation, "__origin__", annotation)  # type: ignore[no-any-return]


def bytes_of(content: RecordDict) -> int:
    """Bytes of a message's arrays and values, as they travel; Flower's own headers come on top."""
    arrays = sum(len(array.data) for record in content.array_records.values() for array in record.values())
    texts = [value for record in content.config_records.values() for value in record.values()]
    return arrays + sum(len(text) if isinstance(text, str) else 8 for text in texts)
