"""A grid of small pictures as PNG (https://www.w3.org/TR/png-3), enlarged by whole factors: pixels stay square."""

import base64
import struct
import zlib

from markupsafe import Markup

from fedveil.report.sections import Picture, Pictures
from fedveil.report.style import fill

SIGNATURE = b"\x89PNG\r\n\x1a\n"
GREY, RED_GREEN_BLUE = 0, 2  # PNG's types of colour
WIDE, NARROW = 96, 64  # about how many pixels of the screen the longer side takes, on a desktop and on a phone


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def encode(picture: Picture) -> bytes:
    r"""The picture as a PNG file, without row filters: small pictures do not need them.

    >>> encode(Picture(2, 1, 1, bytes([0, 255])))[:16]
    b'\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR'
    """
    stride = picture.width * picture.channels
    rows = (b"\0" + picture.data[start : start + stride] for start in range(0, len(picture.data), stride))
    colour = GREY if picture.channels == 1 else RED_GREEN_BLUE
    header = struct.pack(">IIBBBBB", picture.width, picture.height, 8, colour, 0, 0, 0)
    packed = zlib.compress(b"".join(rows), 9)
    return SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", packed) + _chunk(b"IEND", b"")


def _source(picture: Picture) -> str:
    return f"data:image/png;base64,{base64.b64encode(encode(picture)).decode()}"


def _display_widths(picture: Picture) -> str:
    """The shown widths as CSS variables: the nearest whole multiples of the picture's own width."""
    side = max(picture.width, picture.height)
    wide, narrow = (picture.width * max(1, round(shown / side)) for shown in (WIDE, NARROW))
    return f"--wide:{wide}px;--narrow:{narrow}px"


def pictures(section: Pictures) -> Markup:
    """The grid, in a box that scrolls by itself."""
    return fill("pictures.html", section=section, source=_source, display_widths=_display_widths)
