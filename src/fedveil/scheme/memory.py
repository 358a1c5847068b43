"""Memory for masked models, reused once no tensor refers to it.

A masked model is as large as the model and new in every round. Getting new pages from the system would take several
times as long as writing it, so free memory is reused.
"""

import mmap
import sys
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

MOST = 2  # pieces to keep: one is in use while the next broadcast is made


class Rooms:
    """Pieces of memory of equal size.

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
        memory = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._kept = [*self._kept[1 - MOST :], memory] if len(self._kept) >= MOST else [*self._kept, memory]
        return memory
