"""The result of a round, which has the same type for every defence."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from fedveil.errors import UpdateRefused

Note = str | Sequence[str | int] | Mapping[str, str]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Aggregate:
    """The result of a round.

    Attributes:
        gradients: gradients by parameter name, for the server's optimizer.
        buffers: new values of the model's buffers, by name: the mean over clients for floating-point buffers, the
            maximum for counters.
        error: estimated relative error that the defence adds to the gradient; 0 if it adds none.
        figures: additional numbers for the round's record; those named "bytes_..." are per client.
        notes: text for the round's record: faults, clients with a capped weight, or the reason for a missing gradient.
    """

    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    error: float
    figures: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, Note] = field(default_factory=dict)


def recover_each(recover_one: Callable[[T], Aggregate], updates: Sequence[T]) -> list[Aggregate | UpdateRefused]:
    """Recover the gradient from each update separately; for a refused update, return an error that names the client."""
    result: list[Aggregate | UpdateRefused] = []
    for position, update in enumerate(updates):
        try:
            result.append(recover_one(update))
        except UpdateRefused as error:
            result.append(type(error)(f"client {position}", error.what, error.fix))
    return result
