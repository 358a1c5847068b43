"""Arrays that take long to make, kept on disk. A damaged or unwritable cache costs time, never correctness."""

import contextlib
import hashlib
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedveil.data.places import cache_folder

Arrays = Mapping[str, NDArray[Any]]
_VERSION = "1"


def kept(parts: tuple[str, ...], build: Callable[[], Arrays]) -> Arrays:
    """What `build` gives, from the cache if it was built before for the same `parts`."""
    key = hashlib.sha256("\n".join((_VERSION, *parts)).encode()).hexdigest()[:32]
    path = cache_folder() / f"{key}.npz"
    found = _read(path)
    if found is None:
        found = build()
        with contextlib.suppress(OSError):
            _write(path, found)
    return found


def _read(path: Path) -> Arrays | None:
    """The arrays of a cache file; None if it is absent or damaged (zip checksums tell)."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files} or None
    except (OSError, EOFError, ValueError, KeyError, TypeError, NotImplementedError, zipfile.BadZipFile, zlib.error):
        return None


def _write(path: Path, arrays: Arrays) -> None:
    """Write whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
