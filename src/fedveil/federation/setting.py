"""The settings that should be the same when a run is resumed; records are compared by a checksum."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedveil.records.shards import MemoryShards, Shards

Setting = Mapping[str, object]  # by its name in messages
CHUNK = 2**20  # values that are hashed at once
CHECKSUM = 8  # bytes: enough to notice a change
RECORDS = "records"


def checksum_records(shards: Shards, key: bytes) -> str | None:
    """Return a short keyed checksum of all clients' records; None if they are read batch by batch."""
    if not isinstance(shards, MemoryShards):
        return None
    found = hashlib.blake2b(key=key, digest_size=CHECKSUM)
    for leaf in [*pytree.tree_leaves(shards.inputs), shards.targets]:
        if not isinstance(leaf, Tensor):
            found.update(repr(leaf).encode())
            continue
        found.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
        for values in torch.split(leaf.detach().reshape(-1), CHUNK):
            found.update(values.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def list_changes(before: Setting, now: Setting) -> list[str]:
    """Return the names of what differs between two settings, as far as both know it."""
    known = [name for name in before if before[name] is not None and now.get(name) is not None]
    return [name for name in known if before[name] != now[name]]
