"""A server's state in memory, so that a round that is interrupted half-way can be undone."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fedveil.federation.stored import Stored


def copy_state(value: Any) -> Any:
    """A copy that shares no tensor, list or dict with the original."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: copy_state(own) for key, own in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(copy_state, value))
    return value


class Snapshot:
    """Parameters, buffers, optimiser, schedule, round and records of a server.

    The defence's state is not restored: a round whose noise was drawn counts for privacy even if it is undone.
    """

    def __init__(self, server: "Stored") -> None:
        self.begun = False  # to be restored
        self.round, self.count, self._best = server.round, len(server.history.records), server.best
        self._record = dict(server.history.records[-1]) if self.count else {}
        changing = [value for value in server.model.parameters() if value.requires_grad]
        self._tensors = [(value, value.detach().clone()) for value in (*changing, *server.model.buffers())]
        self._optimizer = copy_state(server.optimizer.state_dict())
        self._schedule = copy_state(server.schedule.state_dict()) if server.schedule else None

    def restore(self, server: "Stored") -> None:
        """Put everything back; may be called again if it is interrupted."""
        self.begun = True
        with torch.no_grad():
            for tensor, value in self._tensors:
                tensor.copy_(value)
        server.optimizer.load_state_dict(copy_state(self._optimizer))
        if server.schedule and self._schedule is not None:
            server.schedule.load_state_dict(copy_state(self._schedule))
        server.round, server.best = self.round, self._best
        del server.history.records[self.count :]
        if self.count:
            server.history.records[-1] = dict(self._record)
