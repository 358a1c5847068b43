"""Pack bytes into Flower messages as arrays, which Flower sends in chunks, unlike a ConfigRecord."""

from flwr.app import Array, ArrayRecord, RecordDict

from fedveil.errors import BadArgument

RECORD, COMMON, EXTRA = "fedveil", "message", "own"


def wrap(common: bytes, extra: bytes = b"") -> RecordDict:
    """Return the content of a message: bytes for every node, which Flower uploads once, and bytes for one node."""
    parts = {COMMON: common} | ({EXTRA: extra} if extra else {})
    arrays = {name: Array("uint8", (len(data),), "fedveil", data) for name, data in parts.items()}
    return RecordDict({RECORD: ArrayRecord(arrays)})


def unwrap(content: RecordDict, kind: str) -> tuple[bytes, bytes]:
    """Return the bytes for every node and the bytes for this node; `kind` is the name of the message in errors."""
    record = content.get(RECORD)
    if not isinstance(record, ArrayRecord) or COMMON not in record:
        message, fix = (
            "this message is not from Fedveil",
            "use fedveil.flower in both the server's and the client's app",
        )
        raise BadArgument(kind, message, fix)
    return record[COMMON].data, record[EXTRA].data if EXTRA in record else b""
