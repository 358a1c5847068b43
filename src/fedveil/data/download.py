"""Download data sets and verify their checksums, using only the standard library."""

import hashlib
import http.client
import io
import os
import urllib.request
import zipfile
from pathlib import Path

from fedveil.checks import check_choice
from fedveil.data.archives import READ_ERRORS, read_member
from fedveil.data.catalogue import CATALOGUE, Download, data_folder
from fedveil.errors import BadArgument
from fedveil.files import write_atomically
from fedveil.progress import Progress

_BLOCK = 1 << 18
_TIMEOUT = 30.0


def get(name: str, folder: str | Path | None = None, progress: Progress | None = None) -> Path:
    """Download a data set to the folder where `load` looks for it. A file with a wrong checksum is discarded.

    Args:
        name: name of the data set.
        folder: folder with one subfolder per data set; $FEDVEIL_DATA by default.
        progress: function to call with the fraction downloaded so far and a text with the number of megabytes.

    Raises:
        BadArgument: the data set needs no download, cannot be downloaded automatically, or the download failed; the
            message names the file and the folder to put it into.
    """
    entry = CATALOGUE[check_choice("get", "data set", name, CATALOGUE)]
    if not entry.files:
        raise BadArgument("get", f"{name!r} does not need to be downloaded", f"use fedveil.data.load({name!r})")
    destination = (data_folder() if folder is None else Path(os.path.expanduser(folder))) / name
    if entry.download is None:
        fix = f"download it from {entry.source} (you must accept the terms) "
        fix += f"and put {entry.expected_files} into {destination}"
        raise BadArgument("get", f"{name!r} cannot be downloaded automatically", fix)
    source, target = entry.download, destination / entry.download.file
    fix = f"run the command again, or put {target.name} into {destination} yourself"
    try:
        if target.exists():
            if not target.is_file() or compute_digest(target, source.digest) != source.digest:
                message = f"a different file with this name exists (its checksum is not {source.digest})"
                raise BadArgument(str(target), message, "move it elsewhere, and run the command again")
            return target
        content = _unpack(_receive(source, progress), source)
    except (http.client.HTTPException, KeyError, *READ_ERRORS) as error:
        raise BadArgument(source.url, f"the download failed: {error}", fix) from error
    if compute_digest(content, source.digest) != source.digest:
        message = f"the download is not the expected file (its checksum is not {source.digest}) and was discarded"
        raise BadArgument(source.url, message, fix)
    return write_atomically(target, content)


def _receive(source: Download, progress: Progress | None) -> bytes:
    """Return the bytes that the server sends; raise OSError if there are too many."""
    content = bytearray()
    with urllib.request.urlopen(source.url, timeout=_TIMEOUT) as response:
        total = response.length or 0
        while block := response.read(_BLOCK):
            content += block
            if max(total, len(content)) > source.max_bytes:
                raise OSError(f"the file is larger than the maximum of {source.max_bytes} bytes")
            if progress:
                progress(len(content) / total if total else 0.0, f"{len(content) / 1e6:.1f} MB")
    if len(content) < total:
        raise ConnectionError(f"the connection was closed after {len(content)} of {total} bytes")
    return bytes(content)


def _unpack(content: bytes, source: Download) -> bytes:
    """Return the file, extracted from nested zip files if necessary."""
    for member in source.members:
        with zipfile.ZipFile(io.BytesIO(content)) as zip_file:
            content = read_member(zip_file, member, source.max_bytes)
    return content


def compute_digest(content: Path | bytes, expected: str) -> str:
    """Compute the checksum of a file or of bytes, with the same algorithm as `expected`, such as "md5:..."."""
    algorithm = expected.partition(":")[0]
    with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as file:
        return f"{algorithm}:{hashlib.file_digest(file, algorithm).hexdigest()}"
