"""What a run needs to go on: written whole or not at all, and without secrets (a resumed round draws a new one)."""

import os
from pathlib import Path
from typing import Any

import torch

from fedveil.errors import BadArgument

FORMAT = 2


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint so that a reader finds the old one or the new one, never a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".part")
    with half.open("wb") as file:
        torch.save({"format": FORMAT, **state}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(half, path)


def load(path: Path, device: torch.device) -> dict[str, Any]:
    """Read a checkpoint; nothing in it is executed."""
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise BadArgument(str(path), "there is no checkpoint here", "start the run without resume") from None
    except Exception as error:
        raise BadArgument(str(path), f"the checkpoint cannot be read: {error}", "start the run anew") from error
    if state.get("format") != FORMAT:
        raise BadArgument(str(path), f"the checkpoint has format {state.get('format')!r}, not {FORMAT}")
    return state
