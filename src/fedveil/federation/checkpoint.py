"""Checkpoint files, which are written atomically, have a checksum and contain no secrets.

A file consists of a magic number, the SHA-256 digest of the rest of the file, the run and round of the state, and
the output of torch.save. The checksum is verified before anything is parsed. A resumed round draws new noise.
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

from fedveil.defences.interface import State
from fedveil.errors import BadArgument
from fedveil.files import OWNER, convert_os_errors, make_folder, temporary_name, write_atomically

LOG = logging.getLogger("fedveil")
CPU = torch.device("cpu")
FORMAT = 3
MAGIC = b"FEDVEIL3"
DIGEST_SIZE = hashlib.sha256().digest_size
TAG_STRUCT = struct.Struct("<16sQ")
BODY_START = len(MAGIC) + DIGEST_SIZE
INTERVAL_SECONDS = 60.0  # maximum time between checkpoints, not counting the round in progress
LAST, PREVIOUS = "checkpoint.pt", "checkpoint.previous.pt"
MODEL, BEST = "model.safetensors", "best.safetensors"  # values of the last and the best model
ROUND = "round"  # metadata key of the round in these files
RESTORE = "restore the file from a backup, or start the run again"
Content = dict[str, Any]  # type: ignore[explicit-any]  # the result of torch.load: plain values and tensors


class StateTag(NamedTuple):
    """The run (16 random bytes) and the round that a state belongs to."""

    run: bytes = bytes(16)
    round: int = 0


NO_RUN = StateTag()


class DamagedCheckpoint(BadArgument):
    """A checkpoint that cannot be read or used."""


def save(path: Path, state: Mapping[str, object], tag: StateTag = NO_RUN) -> None:
    """Write a state atomically to a file that only its owner can read."""
    stream = io.BytesIO()
    stream.write(bytes(BODY_START) + TAG_STRUCT.pack(*tag))
    torch.save({"format": FORMAT, **state}, stream)
    content = stream.getbuffer()
    content[:BODY_START] = MAGIC + hashlib.sha256(content[BODY_START:]).digest()
    write_atomically(path, lambda file: file.write(content), OWNER)


def save_values(path: Path, state: Mapping[str, Tensor], round_number: int) -> None:
    """Write a model's values and the round to a safetensors file; a shared tensor is written once per name."""
    layout = torch.contiguous_format  # safetensors refuses other layouts, such as channels_last
    values = {name: tensor.detach().cpu().clone(memory_format=layout) for name, tensor in state.items()}
    write_atomically(path, save_tensors(values, {ROUND: str(round_number)}))


def read_round(path: Path) -> int:
    """Return the round in which a model's values were written, or -1 if the file does not state the round."""
    with safe_open(path, "pt") as file:
        result = (file.metadata() or {}).get(ROUND, "")
    return int(result) if result.isdecimal() else -1


def read(path: Path, device: torch.device = CPU) -> tuple[StateTag, Content]:
    """Return the tag and the state in a file, without executing any code in it."""
    content = _read_bytes(path)
    tag = _verify(path, content)
    try:
        body = io.BytesIO(content[BODY_START + TAG_STRUCT.size :])
        state: Content = torch.load(body, map_location=device, weights_only=True)
        version = state.get("format")
    except Exception as error:
        raise DamagedCheckpoint(str(path), f"the checkpoint cannot be read: {error}", "start the run again") from error
    if version != FORMAT:
        message = f"the checkpoint has format {version!r}, but this version of fedveil reads format {FORMAT}"
        raise BadArgument(str(path), message, "resume with the version that wrote it")
    return tag, state


def load(path: Path, device: torch.device = CPU, tag: StateTag | None = None) -> Content:
    """Return the state in a file; if a tag is given, refuse a state from another run or round."""
    actual_tag, state = read(path, device)
    if tag is not None and actual_tag != tag:
        raise DamagedCheckpoint(str(path), "the checkpoint belongs to another run or round", RESTORE)
    return state


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise BadArgument(str(path), "there is no checkpoint at this path", "start the run without resuming") from None
    except OSError as error:
        message = f"the checkpoint cannot be read: {error.strerror}"
        raise DamagedCheckpoint(str(path), message, "correct the permissions of the file") from error


def _verify(path: Path, content: bytes) -> StateTag:
    """Verify the checksum and return the tag."""
    body = memoryview(content)[BODY_START:]
    is_complete = content[: len(MAGIC)] == MAGIC and len(body) > TAG_STRUCT.size
    if not is_complete or hashlib.sha256(body).digest() != content[len(MAGIC) : BODY_START]:
        raise DamagedCheckpoint(
            str(path), "the checkpoint cannot be read: it is damaged (its checksum is wrong)", RESTORE
        )
    return StateTag(*TAG_STRUCT.unpack_from(body))


def verified_tag(path: Path) -> StateTag | None:
    """Return a checkpoint's tag, or None if the checkpoint is missing or damaged."""
    try:
        return _verify(path, _read_bytes(path))
    except BadArgument:
        return None


def read_digest(path: Path) -> str:
    """Return the SHA-256 digest in a checkpoint's header."""
    try:
        with path.open("rb") as file:
            return f"sha256:{file.read(BODY_START)[len(MAGIC) :].hex()}"
    except OSError:
        return "not available"


def read_tag(path: Path) -> StateTag | None:
    """Return a checkpoint's tag without verifying the checksum, or None if the tag cannot be read."""
    try:
        with path.open("rb") as file:
            content = file.read(BODY_START + TAG_STRUCT.size)
    except OSError:
        return None
    is_complete = content[: len(MAGIC)] == MAGIC and len(content) == BODY_START + TAG_STRUCT.size
    return StateTag(*TAG_STRUCT.unpack_from(content, BODY_START)) if is_complete else None


def save_last(
    folder: Path, state: Mapping[str, object], tag: StateTag, *, bad: bool = False, durable: bool = False
) -> set[int]:
    """Write a run's checkpoint and keep the previous good one; return the rounds of both.

    A good checkpoint exists at all times. The previous checkpoint belongs to the same run and, unless `durable`, to an
    earlier round.

    Args:
        folder: the run's folder.
        state: the state to write.
        tag: the state's tag.
        bad: whether to treat the last checkpoint on disk as bad even if its checksum is correct.
        durable: whether to keep the previous checkpoint even if it is from the same round.
    """
    last_path, previous_path = folder / LAST, folder / PREVIOUS
    kept_tag = None if bad else verified_tag(last_path)
    with convert_os_errors(folder):
        if kept_tag and kept_tag.run == tag.run and (durable or kept_tag.round != tag.round):
            _link_previous(last_path, previous_path)
        else:
            kept_tag = verified_tag(previous_path)
        save(last_path, state, tag)
        if kept_tag and kept_tag.run == tag.run:
            return {tag.round, kept_tag.round}
        previous_path.unlink(missing_ok=True)
    return {tag.round}


def _link_previous(last_path: Path, previous_path: Path) -> None:
    """Make `previous_path` a hard link to the file `last_path`, without ever removing `last_path`."""
    temporary_path = temporary_name(previous_path)
    try:
        os.link(last_path, temporary_path)
    except OSError:  # the file system does not support hard links
        write_atomically(previous_path, last_path.read_bytes(), OWNER)
        return
    os.replace(temporary_path, previous_path)
    with contextlib.suppress(FileNotFoundError):  # os.replace does nothing if both are links to the same file
        temporary_path.unlink()


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, latest first."""
    return [path for path in (folder / LAST, folder / PREVIOUS) if path.exists()]


def save_keyed(path: Path, key: str, state: Mapping[str, object]) -> None:
    """Write a state together with a key that identifies the computation."""
    save(path, {"key": key, **state})


def load_keyed(path: Path, key: str, device: torch.device) -> Content | None:
    """Return the state that `save_keyed` wrote with this key, or None if there is no such state."""
    if not path.exists():
        return None
    try:
        state = load(path, device)
    except DamagedCheckpoint as error:
        LOG.warning("%s; computing the state again", error)
        return None
    return state if state["key"] == key else None


def load_private_state(file: Path | None) -> State:
    """Load a client's private state from its file; the state is empty if the file does not exist yet."""
    if file is None or not file.exists():
        return {}
    try:
        return load(file)
    except DamagedCheckpoint as error:  # a client with an older state would repeat its noise
        raise BadArgument(
            error.where, error.what, "delete the file; the client then creates a new private state"
        ) from None


def save_private_state(file: Path, state: State) -> None:
    """Save a client's private state to a file that only its owner can read."""
    make_folder(file.parent, 0o700)
    save(file, state)
