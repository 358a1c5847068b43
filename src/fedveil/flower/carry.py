"""Bytes as a Flower message: one array, which Flower sends in pieces of 5 MiB. A ConfigRecord would travel whole."""

from flwr.app import Array, ArrayRecord, RecordDict

from fedveil.errors import BadArgument

RECORD, ARRAY, OWN = "fedveil", "message", "own"


def _array(data: bytes) -> Array:
    return Array(dtype="uint8", shape=(len(data),), stype="fedveil", data=data)


def wrap(data: bytes, own: bytes = b"") -> RecordDict:
    """Bytes as the content of a message, and behind them those for one node alone; Flower sends equal arrays once."""
    arrays = {ARRAY: _array(data)} | ({OWN: _array(own)} if own else {})
    return RecordDict({RECORD: ArrayRecord(arrays)})


def unwrap(content: RecordDict, kind: str) -> bytes:
    """The inverse of `wrap`: what all nodes get."""
    return _arrays(content, kind)[ARRAY].data


def own_of(content: RecordDict, kind: str) -> bytes:
    """What this node alone gets."""
    arrays = _arrays(content, kind)
    return arrays[OWN].data if OWN in arrays else b""


def _arrays(content: RecordDict, kind: str) -> ArrayRecord:
    record = content.get(RECORD)
    if not isinstance(record, ArrayRecord) or ARRAY not in record:
        raise BadArgument(kind, "this message is not Fedveil's", "server and client apps must both use fedveil.flower")
    return record
