"""Bytes as the content of a Flower message: arrays, because Flower sends them in chunks, unlike a ConfigRecord."""

from flwr.app import Array, ArrayRecord, RecordDict

from fedveil.errors import BadArgument

RECORD, COMMON, OWN = "fedveil", "message", "own"


def _array(data: bytes) -> Array:
    return Array(dtype="uint8", shape=(len(data),), stype="fedveil", data=data)


def wrap(common: bytes, own: bytes = b"") -> RecordDict:
    """Return the content of a message: bytes for every node, which Flower uploads once, and bytes for one node."""
    arrays = {COMMON: _array(common)} | ({OWN: _array(own)} if own else {})
    return RecordDict({RECORD: ArrayRecord(arrays)})


def unwrap(content: RecordDict, kind: str) -> bytes:
    """Return the bytes for every node; `kind` names the message in errors."""
    return _arrays(content, kind)[COMMON].data


def unwrap_own(content: RecordDict, kind: str) -> bytes:
    """Return the bytes for this node alone, or empty bytes."""
    arrays = _arrays(content, kind)
    return arrays[OWN].data if OWN in arrays else b""


def _arrays(content: RecordDict, kind: str) -> ArrayRecord:
    record = content.get(RECORD)
    if not isinstance(record, ArrayRecord) or COMMON not in record:
        what, fix = "this message is not Fedveil's", "use fedveil.flower in both the server's and the client's app"
        raise BadArgument(kind, what, fix)
    return record
