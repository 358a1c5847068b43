"""What an attacker trains for itself, kept on disk so that a stopped attack goes on."""

from pathlib import Path
from typing import Any

import torch

from fedveil.federation import checkpoint


def keep(path: Path, asked: str, state: dict[str, Any]) -> None:
    """Write a state, and what it was asked for."""
    checkpoint.save(path, {"asked": asked, **state})


def kept(path: Path, asked: str, device: torch.device) -> dict[str, Any] | None:
    """The state on disk if it is the one asked for, else None."""
    if not path.exists():
        return None
    state = checkpoint.load(path, device)
    return state if state["asked"] == asked else None
