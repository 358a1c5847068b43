"""What a run needs to go on: written whole or not at all, and without secrets (a resumed round draws a new one)."""

from pathlib import Path
from typing import Any

import torch

from fedveil.errors import BadArgument
from fedveil.files import write_whole

FORMAT = 2


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint so that a reader finds the old one or the new one, never a part of it."""
    write_whole(path, lambda file: torch.save({"format": FORMAT, **state}, file))


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


def save_for(path: Path, asked: str, state: dict[str, Any]) -> None:
    """Write a state, and what it was asked for."""
    save(path, {"asked": asked, **state})


def load_for(path: Path, asked: str, device: torch.device) -> dict[str, Any] | None:
    """The state on disk if it is the one asked for, else None."""
    if not path.exists():
        return None
    state = load(path, device)
    return state if state["asked"] == asked else None
