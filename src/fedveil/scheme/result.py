"""The result of a round."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

Note = str | Sequence[str | int] | Mapping[str, str]


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
