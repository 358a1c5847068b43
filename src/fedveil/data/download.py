"""Downloads that can be resumed and are verified, with the standard library alone."""

import hashlib
import http.client
import io
import os
import urllib.error
import urllib.request
import zipfile
import zlib
from pathlib import Path

from fedveil.checks import check_choice
from fedveil.data.archives import read_member
from fedveil.data.catalogue import CATALOGUE, Download, data_folder, require_regular
from fedveil.errors import BadArgument
from fedveil.files import write_whole
from fedveil.progress import Progress

_BLOCK = 1 << 18
_TIMEOUT = 30.0


def get(name: str, folder: str | Path | None = None, progress: Progress | None = None) -> Path:
    """Download a data set, so that `load` finds it.

    An interrupted download is resumed; a file with a wrong checksum is not kept.

    Args:
        name: of the data set.
        folder: with one folder per data set inside; $FEDVEIL_DATA by default.
        progress: called with the fraction that has arrived and its size in words.

    Raises:
        BadArgument: it needs no download, cannot be downloaded, or the download failed; says which file to put where.
    """
    entry = CATALOGUE[check_choice("get", "data set", name, CATALOGUE)]
    if not entry.files:
        raise BadArgument("get", f"{name!r} needs no download", f"use fedveil.data.load({name!r})")
    home = (data_folder() if folder is None else Path(os.path.expanduser(folder))) / name
    if entry.download is None:
        fix = f"get it from {entry.source} (its terms must be accepted there) and put {entry.wanted} into {home}"
        raise BadArgument("get", f"{name!r} cannot be downloaded by a program", fix)
    source, target = entry.download, home / entry.download.file
    try:
        if not source.inside or target.exists():
            return _fetch(source, target, source.digest, progress)
        archive = _fetch(source, home / f"{name}-download.zip", None, progress)
        try:
            return _unpack(archive, source, target)
        finally:
            archive.unlink()
    except (OSError, http.client.HTTPException) as error:
        fix = f"run again (the part that arrived is kept), or {_manual_fix(target)}"
        raise BadArgument(source.url, _explain(error), fix) from error


def _manual_fix(target: Path) -> str:
    return f"put {target.name} into {target.parent} yourself"


def _explain(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        error.close()
        return f"the server answered {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return f"it cannot be reached ({error.reason})"
    return f"the download failed ({error})"


def _unpack(archive: Path, source: Download, target: Path) -> Path:
    """Extract one file from a zip, or from zips within it, verify it and write it as a whole."""
    content = archive.read_bytes()
    for member in source.inside:
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as opened:
                content = read_member(opened, member, source.most)
        except (zipfile.BadZipFile, KeyError, zlib.error, RuntimeError, NotImplementedError) as error:
            raise BadArgument(source.url, f"the download has no readable {member}", _manual_fix(target)) from error
    if compute_digest(content, source.digest) != source.digest:
        what = f"{source.file} in the download is not the expected file, and was not kept"
        raise BadArgument(source.url, what, _manual_fix(target))
    return write_whole(target, content)


def _fetch(source: Download, target: Path, digest: str | None, progress: Progress | None) -> Path:
    """Download a file, or resume an earlier attempt; until it is complete and verified it is called `<target>.part`."""
    if target.exists():
        if not target.is_file() or (digest and compute_digest(target, digest) != digest):
            what = f"there is another file of this name (its checksum is not {digest})"
            raise BadArgument(str(target), what, "move it away and run again")
        return target
    part = target.with_name(target.name + ".part")
    target.parent.mkdir(parents=True, exist_ok=True)
    if not _transfer(source, part, progress):
        part.unlink(missing_ok=True)
        what = f"it sends more than the {source.most} bytes that are expected at most, and nothing was kept"
        raise BadArgument(source.url, what, _manual_fix(target))
    if digest and compute_digest(part, digest) != digest:
        part.unlink()
        what = f"the download is not the expected file (its checksum is not {digest}), and was not kept"
        raise BadArgument(source.url, what, f"run again, or {_manual_fix(target)}")
    return part.replace(target)


def compute_digest(content: Path | bytes, like: str) -> str:
    """Return the checksum of a file or of bytes, in the form of `like`, such as "md5:..."."""
    kind = like.partition(":")[0]
    with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as file:
        return f"{kind}:{hashlib.file_digest(file, kind).hexdigest()}"


def _transfer(source: Download, part: Path, progress: Progress | None) -> bool:
    """Complete `part`, from its present length if the server supports that; return False if it sends too much."""
    start = require_regular(part).stat().st_size if part.exists() else 0
    request = urllib.request.Request(source.url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        answer = urllib.request.urlopen(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        if start and error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            error.close()
            return True  # nothing is left to send: the checksum decides
        raise
    with answer:
        resumed = answer.headers.get("Content-Range", "").startswith(f"bytes {start}-")
        done = start if resumed and answer.status == http.HTTPStatus.PARTIAL_CONTENT else 0  # else all of it again
        length = answer.headers.get("Content-Length")
        total = done + int(length[:20]) if length and length.isdecimal() else 0
        if max(total, done) > source.most:
            return False
        with part.open("ab" if done else "wb") as file:
            while block := answer.read(_BLOCK):
                done += len(block)
                if done > source.most:
                    return False
                file.write(block)
                if progress:
                    progress(done / total if total else 0.0, f"{done / 1e6:.1f} MB")
    if total and done < total:
        raise ConnectionError(f"it stopped at {done} of {total} bytes")
    return True
