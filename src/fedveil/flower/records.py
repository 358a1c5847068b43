"""Cache a node's records in a file."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch.utils import _pytree as pytree

from fedveil.errors import BadArgument
from fedveil.files import OWNER, make_folder, write_atomically
from fedveil.graph.inputs import Inputs
from fedveil.records.inputs import Batch
from fedveil.records.sources import CONSTANT_TYPES
from fedveil.wire import Packed, from_bytes, to_bytes

KIND = "records"
DIGEST_SIZE = hashlib.sha256().digest_size


def cache_records(path: Path, load_records: Callable[[], Batch]) -> Batch:
    """Load (inputs, targets) from a file, and create the file if it does not exist.

    This saves time, since a SuperNode starts a new process for every message.

    Args:
        path: the file, in a folder on the node. A file that is damaged or was written by another version is replaced.
        load_records: a function that loads the records, which is called if the file cannot be used.
    """
    try:
        values, tensors = from_bytes(_verify_checksum(path.read_bytes()), KIND)
    except (FileNotFoundError, BadArgument):
        inputs, targets = load_records()
        values, tensors = _flatten(inputs)
        data = to_bytes(KIND, values, {**tensors, "targets": targets})
        make_folder(path.parent, 0o700)
        write_atomically(path, hashlib.sha256(data).digest() + data, OWNER)
        return inputs, targets
    constants, structure = values["others"], pytree.treespec_loads(values["form"])
    leaves = [
        constants[str(index)] if str(index) in constants else tensors[f"inputs.{index}"]
        for index in range(structure.num_leaves)
    ]
    return cast(Inputs, pytree.tree_unflatten(leaves, structure)), tensors["targets"]


def _verify_checksum(content: bytes) -> bytes:
    """Verify the checksum at the start of the content; return the content without the checksum."""
    if hashlib.sha256(data := content[DIGEST_SIZE:]).digest() != content[:DIGEST_SIZE]:
        raise BadArgument("cache_records", "the file is damaged: its checksum is wrong")
    return data


def _flatten(inputs: Inputs) -> Packed:
    leaves, structure = pytree.tree_flatten(inputs)
    constants = {index: leaf for index, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
    for leaf in constants.values():
        if not isinstance(leaf, CONSTANT_TYPES):
            message = f"inputs contain a value of type {type(leaf).__name__}, which cannot be written to a file"
            raise BadArgument("cache_records", message, "convert the value to a tensor")
    tensors = {f"inputs.{index}": leaf for index, leaf in enumerate(leaves) if index not in constants}
    return {"form": pytree.treespec_dumps(structure), "others": constants}, tensors
