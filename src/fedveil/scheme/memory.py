"""What a server keeps for a plan from one round to the next, because making it again would be slow."""

import mmap
import os
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fedveil.graph.plan import Plan

if TYPE_CHECKING:
    from fedveil.scheme.decoys import Fit
    from fedveil.scheme.secret import Kind, Noise

MOST = 2  # pieces to keep: one is in use while the next broadcast is made
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # a forked process keeps what it had: pages are copied when written to


class Rooms:
    """Pieces of memory of equal size for masked models, reused: new pages take longer to get than to write.

    Tensors made from a piece, and their views, hold a reference to it: a piece that only this object refers to is free.
    """

    def __init__(self) -> None:
        self._kept: list[mmap.mmap] = []
        self._lock = threading.Lock()

    def take(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Vectors of these sizes in one piece; their values are arbitrary."""
        total = sum(sizes)
        if device.type != "cpu" or not total:
            flat = torch.empty(total, dtype=dtype, device=device)
        else:
            with self._lock:
                flat = torch.frombuffer(self._free(total * dtype.itemsize), dtype=dtype)
        return list(torch.split_with_sizes(flat, list(sizes)))

    def _free(self, size: int) -> mmap.mmap:
        for number in range(len(self._kept)):
            alone = sys.getrefcount(self._kept[number]) == 2  # the list's and the call's own
            if alone and len(self._kept[number]) == size:
                return self._kept[number]
        memory = mmap.mmap(-1, size, flags=PRIVATE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._kept = [*self._kept, memory][-MOST:]
        return memory


class Cache:
    """Memory for tensors, noise drawn ahead, and fits of decoys. Each noise and each fit is taken from it once."""

    def __init__(self) -> None:
        self.masked, self.unmasked = Rooms(), Rooms()
        self.noise: dict[Kind, list[Noise]] = {}
        self.fits: list[Fit] = []


_CACHES: WeakKeyDictionary[Plan, Cache] = WeakKeyDictionary()  # not an attribute of the plan, which may be pickled
os.register_at_fork(after_in_child=_CACHES.clear)  # so that no two processes use the same noise


def cache_of(plan: Plan) -> Cache:
    """The plan's cache, which lives as long as the plan."""
    return _CACHES.get(plan) or _CACHES.setdefault(plan, Cache())
