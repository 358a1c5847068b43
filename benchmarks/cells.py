"""Measurements that are kept in files, so that a run that was stopped continues."""

import json
import time
from collections.abc import Callable
from pathlib import Path

Figures = dict[str, object]  # JSON values


def keep(label: str, measure: Callable[[], Figures], folder: Path) -> Figures:
    """Return the figures of a cell; compute them, and add the CPU time in seconds, unless its file has them."""
    path = folder / f"{label}.json"
    if path.exists():
        found: Figures = json.loads(path.read_text())
        return found
    began = time.process_time()
    found = measure()
    found["seconds"] = round(time.process_time() - began, 1)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found))
    part.replace(path)
    return found
