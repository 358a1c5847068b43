"""Downloads that can be resumed and are checked, with the standard library alone."""

import hashlib
import http.client
import urllib.error
import urllib.request
from pathlib import Path

from fedveil.data.records import Progress
from fedveil.errors import BadArgument

_BLOCK = 1 << 18
_TIMEOUT = 30.0
_DONE_ALREADY = 416


def fetch(url: str, target: Path, digest: str | None = None, progress: Progress | None = None) -> Path:
    """Download a file, or go on with an earlier attempt.

    Args:
        url: of the file.
        target: where to put it. Until it is whole and checked it is called `<target>.part`.
        digest: "md5:..." or "sha256:..." of the file.
        progress: called with (done, total) in bytes; total is 0 if the server does not tell.

    Returns:
        `target`.

    Raises:
        BadArgument: there is no connection, it broke, or the file is not the expected one.
    """
    if target.exists():
        if digest and digest_of(target, digest) != digest:
            what = f"there is another file of this name (its checksum is not {digest})"
            raise BadArgument(str(target), what, "move it away and run again")
        return target
    part = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _transfer(url, part, progress)
        if digest and digest_of(part, digest) != digest:
            part.unlink()
            what = f"the download is not the expected file (its checksum is not {digest}), and was not kept"
            raise BadArgument(url, what, f"run again, or put {target.name} into {target.parent} yourself")
        part.replace(target)
    except (OSError, http.client.HTTPException) as error:
        raise _explained(error, url, target) from error
    return target


def _explained(error: Exception, url: str, target: Path) -> BadArgument:
    """What went wrong, and which file to put where."""
    if isinstance(error, urllib.error.HTTPError):
        why = f"the server answered {error.code} {error.reason}"
        error.close()
    elif isinstance(error, urllib.error.URLError):
        why = f"it cannot be reached ({error.reason})"
    else:
        why = f"the download failed ({error})"
    here = f"put {target.name} into {target.parent} yourself"
    return BadArgument(url, why, f"run again (what is there already is kept), or {here}")


def digest_of(path: Path, like: str) -> str:
    """The checksum of a file, in the form of `like`, such as "md5:..."."""
    kind = like.partition(":")[0]
    with path.open("rb") as file:
        return f"{kind}:{hashlib.file_digest(file, kind).hexdigest()}"


def _transfer(url: str, part: Path, progress: Progress | None) -> None:
    """Bring `part` to full length, from where it stands if the server can do that."""
    start = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        answer = urllib.request.urlopen(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        if start and error.code == _DONE_ALREADY:  # nothing is left to send: the checksum decides
            error.close()
            return
        raise
    with answer:
        done = start if _continues(answer, start) else 0
        length = answer.headers.get("Content-Length")
        total = done + int(length) if length and length.isdigit() else 0
        with part.open("ab" if done else "wb") as file:
            while block := answer.read(_BLOCK):
                file.write(block)
                done += len(block)
                if progress:
                    progress(done, total)
    if total and done < total:
        raise ConnectionError(f"it stopped at {done} of {total} bytes")


def _continues(answer: http.client.HTTPResponse, start: int) -> bool:
    """Whether the answer is the rest of the file, and not all of it again."""
    ranged = answer.headers.get("Content-Range", "")
    return start > 0 and answer.status == http.HTTPStatus.PARTIAL_CONTENT and ranged.startswith(f"bytes {start}-")
