"""Bytes as a Flower message: one array, which Flower sends in pieces of 5 MiB. A ConfigRecord would travel whole."""

from flwr.app import Array, ArrayRecord, RecordDict

from fedveil.errors import BadArgument

RECORD, ARRAY = "fedveil", "message"


def wrap(data: bytes) -> RecordDict:
    """Bytes as the content of a message."""
    array = Array(dtype="uint8", shape=(len(data),), stype="fedveil", data=data)
    return RecordDict({RECORD: ArrayRecord({ARRAY: array})})


def unwrap(content: RecordDict, kind: str) -> bytes:
    """The inverse of `wrap`."""
    record = content.get(RECORD)
    if not isinstance(record, ArrayRecord) or ARRAY not in record:
        raise BadArgument(kind, "this message is not Fedveil's", "server and client apps must both use fedveil.flower")
    return record[ARRAY].data
