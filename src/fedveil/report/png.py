"""PNG from raw pixels (https://www.w3.org/TR/png-3), without row filters: small pictures do not need them."""

import struct
import zlib

SIGNATURE = b"\x89PNG\r\n\x1a\n"
COLOUR_TYPES = {1: 0, 3: 2}  # by channels: grey, red-green-blue


def _chunk(kind: bytes, body: bytes) -> bytes:
    """A part of the file: length, kind, body, checksum."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def encode(width: int, height: int, channels: int, data: bytes) -> bytes:
    r"""The picture as a PNG file; `data` holds a byte a channel, row by row from the top.

    >>> encode(2, 1, 1, bytes([0, 255]))[:16]
    b'\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR'
    """
    stride = width * channels
    rows = (b"\0" + data[start : start + stride] for start in range(0, height * stride, stride))
    header = struct.pack(">IIBBBBB", width, height, 8, COLOUR_TYPES[channels], 0, 0, 0)
    packed = zlib.compress(b"".join(rows), 9)
    return SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", packed) + _chunk(b"IEND", b"")
