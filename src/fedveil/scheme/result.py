"""The result of a round, for every defence."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from fedveil.errors import UpdateRefused

Note = str | Sequence[str | int] | Mapping[str, str]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Aggregate:
    """The result of a round, for every defence.

    Attributes:
        gradients: by parameter name, for the server's optimizer.
        buffers: by name, to replace the model's: floating-point ones averaged over clients, counters the largest.
        error: estimated relative error that the defence itself adds to the gradient; 0 if it adds none.
        figures: further figures for the round's record; those named "bytes_..." are per client.
        notes: for the round's record, too: faults, clients whose weight was capped, why there is no gradient.
    """

    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    error: float
    figures: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, Note] = field(default_factory=dict)


def recover_each(recover_one: Callable[[T], Aggregate], updates: Sequence[T]) -> list[Aggregate | UpdateRefused]:
    """Recover each update separately; in place of one that is refused, return the error that names its client."""
    found: list[Aggregate | UpdateRefused] = []
    for position, update in enumerate(updates):
        try:
            found.append(recover_one(update))
        except UpdateRefused as error:
            found.append(type(error)(f"client {position}", error.what, error.fix))
    return found
