"""Checkpoints of a run: written atomically, without secrets (a resumed round draws new noise).

A file is a mark, the SHA-256 of everything behind it, the run and the round that it belongs to, and what torch writes.
Nothing is parsed before the checksum was compared.
"""

import contextlib
import hashlib
import io
import logging
import os
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor

from fedveil.errors import BadArgument
from fedveil.federation.finite import find_non_finite, find_non_finite_state, select_floats
from fedveil.files import OWNER, part_of, refusals, write_whole

LOG = logging.getLogger("fedveil")
CPU = torch.device("cpu")
FORMAT = 2
MARK, ZIP = b"FEDVEIL3", b"PK\x03\x04"
DIGEST = hashlib.sha256().digest_size
BELONGS = struct.Struct("<16sQ")
START = len(MARK) + DIGEST
INTERVAL_SECONDS = 60.0  # the maximum between two checkpoints, but for the length of a round
LAST, PREVIOUS = "checkpoint.pt", "checkpoint.previous.pt"
MODEL, BEST = "model.safetensors", "best.safetensors"  # the values of the last and of the best model
ROUND = "round"  # of the run, in their metadata


class Belongs(NamedTuple):
    """The run, by 16 random bytes, and the round of a state."""

    run: bytes = bytes(16)
    round: int = 0


NOBODY = Belongs()


class Damaged(BadArgument):
    """A checkpoint that is not what was written."""


def save(path: Path, state: dict[str, Any], belongs: Belongs = NOBODY) -> None:
    """Write a state so that a reader finds the old one or the new one, never a part of it; for its owner alone."""
    memory = io.BytesIO()
    memory.write(bytes(START) + BELONGS.pack(*belongs))
    torch.save({"format": FORMAT, **state}, memory)
    content = memory.getbuffer()
    content[:START] = MARK + hashlib.sha256(content[START:]).digest()
    write_whole(path, lambda file: file.write(content), OWNER)


def save_values(path: Path, state: Mapping[str, Tensor], number: int) -> None:
    """Write a model's values and the run's round as safetensors; values that it uses twice are written twice."""
    values = {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
    write_whole(path, save_tensors(values, {ROUND: str(number)}))


def round_of_values(path: Path) -> int:
    """The run's round when these values were written; -1 if an earlier version wrote them."""
    with safe_open(path, "pt") as file:
        found = (file.metadata() or {}).get(ROUND, "")
    return int(found) if found.isdecimal() else -1


def read(path: Path, device: torch.device = CPU) -> tuple[Belongs | None, dict[str, Any]]:
    """A state and whom it belongs to, None if an earlier version wrote it; nothing in it is executed."""
    content = _read(path)
    found = _check(path, content)
    try:
        body = io.BytesIO(content[START + BELONGS.size :] if found else content)
        state: dict[str, Any] = torch.load(body, map_location=device, weights_only=True)
        version = state.get("format")
    except Exception as error:
        raise Damaged(str(path), f"the checkpoint cannot be read: {error}", "start the run anew") from error
    if version != FORMAT:
        raise BadArgument(str(path), f"the checkpoint has format {version!r}, not {FORMAT}")
    return found, state


def load(path: Path, device: torch.device = CPU, belongs: Belongs | None = None) -> dict[str, Any]:
    """A state, if it belongs there."""
    found, state = read(path, device)
    if belongs and found and found != belongs:
        raise Damaged(str(path), "it belongs to another run or round", "restore it from a copy, or start the run anew")
    return state


def check_model(path: Path, state: Mapping[str, Any]) -> None:
    """Refuse the state of a model that has diverged, which earlier versions wrote."""
    name = find_non_finite(select_floats(state["model"])) or find_non_finite_state(state["optimizer"])
    if name is not None:
        what = f"the checkpoint is of a run that diverged: {name} holds NaN or infinity"
        raise Damaged(str(path), what, "start the run again with a lower learning rate")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise BadArgument(str(path), "there is no checkpoint here", "start the run without resume") from None
    except OSError as error:
        raise Damaged(str(path), f"the checkpoint cannot be read: {error.strerror}", "its permissions") from error


def _check(path: Path, content: bytes) -> Belongs | None:
    """Whom a state belongs to; one without a checksum, by an earlier version, belongs to nobody."""
    if content[: len(ZIP)] == ZIP:  # no damage makes these four bytes of our mark
        _check_parts(path, content)
        return None
    body = memoryview(content)[START:]
    whole = content[: len(MARK)] == MARK and len(body) > BELONGS.size
    if not whole or hashlib.sha256(body).digest() != content[len(MARK) : START]:
        what = "the checkpoint cannot be read: it is damaged, its checksum differs"
        raise Damaged(str(path), what, "restore it from a copy, or start the run anew")
    return Belongs(*BELONGS.unpack_from(body))


def _check_parts(path: Path, content: bytes) -> None:
    """Compare the CRC-32 of every part of a zip file, which torch writes and does not compare."""
    broken: object
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as parts:
            broken = parts.testzip()
    except Exception as error:  # whatever damage makes of zipfile
        broken = error
    if broken is not None:
        what = f"the checkpoint cannot be read: it is damaged ({broken})"
        raise Damaged(str(path), what, "restore it from a copy, or start the run anew")


def owner(path: Path) -> Belongs | None:
    """Whom a good checkpoint belongs to; None if there is none, or of an earlier version."""
    try:
        return _check(path, _read(path))
    except BadArgument:
        return None


def digest_of(path: Path) -> str:
    """Return the SHA-256 in the header of a checkpoint, or of the whole file if an earlier version wrote it."""
    try:
        with path.open("rb") as file:
            start = file.read(START)
            if start[: len(MARK)] == MARK:
                return f"sha256:{start[len(MARK) :].hex()}"
            file.seek(0)
            return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    except OSError:
        return "there is none"


def header(path: Path) -> Belongs | None:
    """Whom a checkpoint says it belongs to, read without its checksum; None if it says nothing."""
    try:
        with path.open("rb") as file:
            content = file.read(START + BELONGS.size)
    except OSError:
        return None
    good = content[: len(MARK)] == MARK and len(content) == START + BELONGS.size
    return Belongs(*BELONGS.unpack_from(content, START)) if good else None


def save_last(
    folder: Path, state: dict[str, Any], belongs: Belongs, *, bad: bool = False, counts: bool = False
) -> set[int]:
    """Write a run's checkpoint; returns the rounds of those that are there now: this one and the last good one.

    At every moment there is a good one. The older one is that of the same run, never of another, and of an earlier
    round, unless each state `counts`. `bad` says that the last one on disk is not good, although its checksum may be
    right.
    """
    last, previous = folder / LAST, folder / PREVIOUS
    older = None if bad else owner(last)
    with refusals(folder):
        if older and older.run == belongs.run and (counts or older.round != belongs.round):
            _put_beside(last, previous)
        else:
            older = owner(previous)
        save(last, state, belongs)
        if older and older.run == belongs.run:
            return {belongs.round, older.round}
        previous.unlink(missing_ok=True)
    return {belongs.round}


def _put_beside(last: Path, previous: Path) -> None:
    """Let the file have a second name; `last` is there all the time."""
    half = part_of(previous)
    try:
        os.link(last, half)
    except OSError:  # a file system without links
        write_whole(previous, last.read_bytes(), OWNER)
        return
    os.replace(half, previous)
    with contextlib.suppress(FileNotFoundError):  # two names of one file: nothing was replaced
        half.unlink()


def found_in(folder: Path) -> list[Path]:
    """The checkpoints to go on from, the last one first."""
    return [path for path in (folder / LAST, folder / PREVIOUS) if path.exists()]


def save_for(path: Path, asked: str, state: dict[str, Any]) -> None:
    """Write a state, and what it was asked for."""
    save(path, {"asked": asked, **state})


def load_for(path: Path, asked: str, device: torch.device) -> dict[str, Any] | None:
    """The state on disk if it is the one asked for, and as it was written, else None."""
    if not path.exists():
        return None
    try:
        state = load(path, device)
    except Damaged as error:
        LOG.warning("%s; it is made anew", error)
        return None
    return state if state["asked"] == asked else None
