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
    """Load a file of values into a model, in evaluation mode: safetensors, or torch's format without running code."""
    values = read_values(path)
    try:
        model.load_state_dict(values)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        what = f"its values belong to another model: {lines[min(1, len(lines) - 1)]}"
        raise BadArgument(str(path), what, "pass the model that they were saved from") from error
    return model.eval()


def read_values(path: Path) -> Mapping[str, Tensor]:
    """Return the values in a file; refuse a file that contains anything but tensors by name."""
    if not path.is_file():
        raise BadArgument(str(path), "there is no such file", "pass a file of weights, .safetensors or .pt")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise BadArgument(str(path), f"is damaged: {error}", "save it again") from error
    try:
        result = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds of errors for files that are not its own
        first = (str(error).splitlines() or [type(error).__name__])[0]
        fix = "save the values only: torch.save(model.state_dict(), path)"
        raise BadArgument(str(path), f"cannot be read without running code: {first:.200}", fix) from error
    result = result.get(NESTED, result) if isinstance(result, Mapping) else result
    if not isinstance(result, Mapping) or not all(isinstance(value, Tensor) for value in result.values()):
        fix = "save the values only: torch.save(model.state_dict(), path)"
        raise BadArgument(str(path), "it does not contain tensors by name", fix)
    return result


def read_both(
    members: Path, others: Path, *, target: str = "", task: Task | None = None, size: int = 32
) -> tuple[UserRecords, UserRecords]:
    """Read the members and the others from two files of the same kind.

    Args:
        members: a CSV file, an .npz file with arrays inputs and targets, or a folder with a folder of images per class.
        others: a file or folder of the same kind.
        target: the column of a CSV file to predict; by default the last one. All other columns are inputs.
        task: whether targets are classes; by default, integers are.
        size: side of the images in pixels; pixels are in [0, 1].
    """
    paths = members, others
    if all(path.is_dir() for path in paths):
        first, classes = read_class_folders(members, size)
        second, _ = read_class_folders(others, size, classes)
        return (first.inputs, first.targets), (second.inputs, second.targets)
    both = [read_npz(path) if path.suffix == ".npz" else read_numbers(path, target) for path in paths]
    for path, (_, _, names) in zip(paths, both, strict=True):
        if names != both[0][2]:
            what = f"its columns are {shorten(names, 8)}, but those of {members} are {shorten(both[0][2], 8)}"
            raise BadArgument(str(path), what, "use files with the same columns in the same order")
    values = np.concatenate([targets.ravel() for _, targets, _ in both])
    whole = bool((values == np.rint(values)).all())
    if task == "classification" and not whole:
        raise BadArgument(str(members), "a target is not an integer", "number the classes from 0")
    classes_given = whole if task is None else task == "classification"
    kind = np.int64 if classes_given else np.float32
    (one, two) = ((torch.from_numpy(inputs), torch.from_numpy(targets.astype(kind))) for inputs, targets, _ in both)
    return one, two


Arrays = tuple["np.ndarray[tuple[int, ...], np.dtype[np.float32]]", "np.ndarray[tuple[int, ...], np.dtype[np.float64]]"]


def read_numbers(path: Path, target: str) -> tuple[*Arrays, tuple[str, ...]]:
    """Return the inputs and targets of a CSV file of numbers, as they are, and its columns."""
    table = read_table(path, None)
    names = tuple(table.columns)
    target = target or names[-1]
    table.require_columns([target])
    inputs = np.stack([table.numbers(name) for name in names if name != target], 1)
    return inputs.astype(np.float32), table.numbers(target), names


def read_npz(path: Path) -> tuple[*Arrays, tuple[str, ...]]:
    """Return the arrays inputs and targets of an .npz file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = {"inputs", "targets"} - set(file.files)
            if missing:
                what = f"it has the arrays {shorten(file.files, 8)}"
                raise BadArgument(str(path), what, "save it with numpy.savez(path, inputs=inputs, targets=targets)")
            inputs, targets = file["inputs"], file["targets"]
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        if isinstance(error, BadArgument):
            raise
        raise BadArgument(str(path), f"cannot be read: {error}", "use numpy.savez with arrays of numbers") from error
    return inputs.astype(np.float32), targets.astype(np.float64), ("inputs", "targets")
