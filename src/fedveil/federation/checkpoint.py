"""Checkpoint files: written atomically, with a checksum, and without secrets (a resumed round draws new noise).

A file consists of a magic number, the SHA-256 of everything after it, the run and the round that it belongs to, and the
output of torch.save. Nothing is parsed before the checksum has been compared.
"""

import contextlib
import hashlib
import io
import logging
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor

from fedveil.defences.state import State
from fedveil.errors import BadArgument
from fedveil.files import OWNER, convert_os_errors, make_folder, temporary_name, write_atomically

LOG = logging.getLogger("fedveil")
CPU = torch.device("cpu")
FORMAT = 3
MAGIC = b"FEDVEIL3"
DIGEST = hashlib.sha256().digest_size
TAG = struct.Struct("<16sQ")
START = len(MAGIC) + DIGEST
INTERVAL_SECONDS = 60.0  # maximum time between two checkpoints, not counting the round in progress
LAST, PREVIOUS = "checkpoint.pt", "checkpoint.previous.pt"
MODEL, BEST = "model.safetensors", "best.safetensors"  # values of the last and of the best model
ROUND = "round"  # key of the round in the metadata of these files
RESTORE = "restore it from a copy, or start the run again"
Content = dict[str, Any]  # type: ignore[explicit-any]  # what torch.load returns: plain values and tensors


class StateTag(NamedTuple):
    """The run that a state belongs to, as 16 random bytes, and its round."""

    run: bytes = bytes(16)
    round: int = 0


NO_RUN = StateTag()


class Damaged(BadArgument):
    """A checkpoint that cannot be read, or differs from the one that was written."""


def save(path: Path, state: Mapping[str, object], tag: StateTag = NO_RUN) -> None:
    """Write a state atomically, readable by its owner only."""
    memory = io.BytesIO()
    memory.write(bytes(START) + TAG.pack(*tag))
    torch.save({"format": FORMAT, **state}, memory)
    content = memory.getbuffer()
    content[:START] = MAGIC + hashlib.sha256(content[START:]).digest()
    write_atomically(path, lambda file: file.write(content), OWNER)


def save_values(path: Path, state: Mapping[str, Tensor], number: int) -> None:
    """Write a model's values and the run's round as safetensors; a shared tensor is written once per name."""
    values = {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
    write_atomically(path, save_tensors(values, {ROUND: str(number)}))


def round_of_values(path: Path) -> int:
    """Return the run's round when these values were written; -1 if the file does not contain it."""
    with safe_open(path, "pt") as file:
        found = (file.metadata() or {}).get(ROUND, "")
    return int(found) if found.isdecimal() else -1


def read(path: Path, device: torch.device = CPU) -> tuple[StateTag, Content]:
    """Return a state and its tag; no code in the file is executed."""
    content = _read_bytes(path)
    tag = _verify(path, content)
    try:
        body = io.BytesIO(content[START + TAG.size :])
        state: Content = torch.load(body, map_location=device, weights_only=True)
        version = state.get("format")
    except Exception as error:
        raise Damaged(str(path), f"the checkpoint cannot be read: {error}", "start the run again") from error
    if version != FORMAT:
        what = f"the checkpoint has format {version!r}, but this version of fedveil reads format {FORMAT}"
        raise BadArgument(str(path), what, "resume with the version that wrote it")
    return tag, state


def load(path: Path, device: torch.device = CPU, tag: StateTag | None = None) -> Content:
    """Return a state; if a tag is given, refuse a state of another run or round."""
    found, state = read(path, device)
    if tag is not None and found != tag:
        raise Damaged(str(path), "it belongs to another run or round", RESTORE)
    return state


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise BadArgument(str(path), "there is no checkpoint here", "start the run without resume") from None
    except OSError as error:
        what = f"the checkpoint cannot be read: {error.strerror}"
        raise Damaged(str(path), what, "correct its permissions") from error


def _verify(path: Path, content: bytes) -> StateTag:
    """Compare the checksum; return the tag."""
    body = memoryview(content)[START:]
    complete = content[: len(MAGIC)] == MAGIC and len(body) > TAG.size
    if not complete or hashlib.sha256(body).digest() != content[len(MAGIC) : START]:
        raise Damaged(str(path), "the checkpoint cannot be read: it is damaged (its checksum differs)", RESTORE)
    return StateTag(*TAG.unpack_from(body))


def verified_tag(path: Path) -> StateTag | None:
    """Return the tag of an intact checkpoint; None if there is none."""
    try:
        return _verify(path, _read_bytes(path))
    except BadArgument:
        return None


def find_digest(path: Path) -> str:
    """Return the SHA-256 in the header of a checkpoint."""
    try:
        with path.open("rb") as file:
            return f"sha256:{file.read(START)[len(MAGIC) :].hex()}"
    except OSError:
        return "there is none"


def read_tag(path: Path) -> StateTag | None:
    """Return the tag of a checkpoint without comparing its checksum; None if it cannot be read."""
    try:
        with path.open("rb") as file:
            content = file.read(START + TAG.size)
    except OSError:
        return None
    complete = content[: len(MAGIC)] == MAGIC and len(content) == START + TAG.size
    return StateTag(*TAG.unpack_from(content, START)) if complete else None


def save_last(
    folder: Path, state: Mapping[str, object], tag: StateTag, *, bad: bool = False, durable: bool = False
) -> set[int]:
    """Write a run's checkpoint, and keep the last good one beside it; return the rounds of both.

    A good checkpoint exists at every moment. The older one belongs to the same run and to an earlier round.

    Args:
        folder: the run's folder.
        state: the state to write.
        tag: the state's tag.
        bad: whether the last checkpoint on disk is bad, although its checksum may be correct.
        durable: whether every state counts; the older checkpoint may then be from the same round.
    """
    last, previous = folder / LAST, folder / PREVIOUS
    older = None if bad else verified_tag(last)
    with convert_os_errors(folder):
        if older and older.run == tag.run and (durable or older.round != tag.round):
            _keep_as(last, previous)
        else:
            older = verified_tag(previous)
        save(last, state, tag)
        if older and older.run == tag.run:
            return {tag.round, older.round}
        previous.unlink(missing_ok=True)
    return {tag.round}


def _keep_as(last: Path, previous: Path) -> None:
    """Give the file a second name; `last` exists at all times."""
    half = temporary_name(previous)
    try:
        os.link(last, half)
    except OSError:  # a file system without links
        write_atomically(previous, last.read_bytes(), OWNER)
        return
    os.replace(half, previous)
    with contextlib.suppress(FileNotFoundError):  # if both names referred to one file, nothing was replaced
        half.unlink()


def found_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the last one first."""
    return [path for path in (folder / LAST, folder / PREVIOUS) if path.exists()]


def save_for(path: Path, key: str, state: Mapping[str, object]) -> None:
    """Write a state with the key of the work that produced it."""
    save(path, {"key": key, **state})


def load_for(path: Path, key: str, device: torch.device) -> Content | None:
    """Return the state that `save_for` wrote with this key; None if there is none."""
    if not path.exists():
        return None
    try:
        state = load(path, device)
    except Damaged as error:
        LOG.warning("%s; it is computed again", error)
        return None
    return state if state["key"] == key else None


def load_private(file: Path | None) -> State:
    """Load the defence's state from the client's file; empty if there is none yet."""
    if file is None or not file.exists():
        return {}
    try:
        return load(file)
    except Damaged as error:  # an older state would draw the same noise again
        raise BadArgument(error.where, error.what, "delete it: this client then draws a new private state") from None


def save_private(file: Path, state: State) -> None:
    """Save the defence's state to a file that only its owner can read."""
    make_folder(file.parent, 0o700)
    save(file, state)
