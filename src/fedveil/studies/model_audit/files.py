"""Read a model's weights and records from files, for the command line."""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedveil.data.catalogue import shorten
from fedveil.data.images import read_class_folders
from fedveil.data.tables import read_table
from fedveil.errors import BadArgument
from fedveil.records.sources import UserRecords

Task = Literal["classification", "regression"]
NESTED = "state_dict"  # key under which Lightning and others store the values in a checkpoint


def load_weights(model: nn.Module, path: Path) -> nn.Module:
    """Load a safetensors or torch file into a model without running code, and put the model in evaluation mode."""
    values = read_values(path)
    try:
        model.load_state_dict(values)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        message = f"its values belong to another model: {lines[min(1, len(lines) - 1)]}"
        raise BadArgument(str(path), message, "pass the model that the values were saved from") from error
    return model.eval()


def read_values(path: Path) -> Mapping[str, Tensor]:
    """Return the values in a file; refuse a file that contains anything but named tensors."""
    if not path.is_file():
        raise BadArgument(str(path), "there is no such file", "pass a .safetensors or .pt file with weights")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise BadArgument(str(path), f"the file is damaged: {error}", "save it again") from error
    try:
        result = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds of errors for files in other formats
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        fix = "save only the state dict: torch.save(model.state_dict(), path)"
        raise BadArgument(str(path), f"cannot be read without running code: {first_line:.200}", fix) from error
    result = result.get(NESTED, result) if isinstance(result, Mapping) else result
    if not isinstance(result, Mapping) or not all(isinstance(value, Tensor) for value in result.values()):
        fix = "save only the state dict: torch.save(model.state_dict(), path)"
        raise BadArgument(str(path), "it does not contain named tensors", fix)
    return result


def read_members_and_others(
    members: Path, others: Path, *, target: str = "", task: Task | None = None, size: int = 32
) -> tuple[UserRecords, UserRecords]:
    """Read the members and the others from two files of the same kind.

    Args:
        members: a CSV file, an .npz file with arrays inputs and targets, or a folder with one subfolder of images per
            class.
        others: a file or folder of the same kind.
        target: the column of a CSV file to predict; by default the last one. All other columns are inputs.
        task: whether targets are classes or numbers; by default, integers are classes.
        size: side length of the images in pixels; pixels are in [0, 1].
    """
    paths = members, others
    if all(path.is_dir() for path in paths):
        member_part, classes = read_class_folders(members, size)
        other_part, _ = read_class_folders(others, size, classes)
        return (member_part.inputs, member_part.targets), (other_part.inputs, other_part.targets)
    files = [read_npz(path) if path.suffix == ".npz" else read_numbers(path, target) for path in paths]
    for path, (_, _, names) in zip(paths, files, strict=True):
        if names != files[0][2]:
            message = f"its columns are {shorten(names, 8)}, but {members} has the columns {shorten(files[0][2], 8)}"
            raise BadArgument(str(path), message, "use files with the same columns in the same order")
    values = np.concatenate([targets.ravel() for _, targets, _ in files])
    are_integers = bool((values == np.rint(values)).all())
    if task == "classification" and not are_integers:
        raise BadArgument(str(members), "a target is not an integer", "number the classes from 0")
    are_classes = are_integers if task is None else task == "classification"
    dtype = np.int64 if are_classes else np.float32
    member_records, other_records = (
        (torch.from_numpy(inputs), torch.from_numpy(targets.astype(dtype))) for inputs, targets, _ in files
    )
    return member_records, other_records


Arrays = tuple["np.ndarray[tuple[int, ...], np.dtype[np.float32]]", "np.ndarray[tuple[int, ...], np.dtype[np.float64]]"]


def read_numbers(path: Path, target: str) -> tuple[*Arrays, tuple[str, ...]]:
    """Return the unscaled inputs and targets of a CSV file of numbers, and the names of its columns."""
    table = read_table(path, None)
    names = tuple(table.columns)
    target = target or names[-1]
    table.require_columns([target])
    inputs = np.stack([table.numbers(name) for name in names if name != target], 1)
    return inputs.astype(np.float32), table.numbers(target), names


def read_npz(path: Path) -> tuple[*Arrays, tuple[str, ...]]:
    """Return the arrays `inputs` and `targets` of an .npz file, and their names."""
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = {"inputs", "targets"} - set(file.files)
            if missing:
                message = f"expected the arrays inputs and targets, got {shorten(file.files, 8)}"
                raise BadArgument(str(path), message, "save it with numpy.savez(path, inputs=inputs, targets=targets)")
            inputs, targets = file["inputs"], file["targets"]
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        if isinstance(error, BadArgument):
            raise
        raise BadArgument(str(path), f"cannot be read: {error}", "use numpy.savez with arrays of numbers") from error
    return inputs.astype(np.float32), targets.astype(np.float64), ("inputs", "targets")
