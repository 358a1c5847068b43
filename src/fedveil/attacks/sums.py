"""The view of a curious server under secure aggregation: sums over clients, and the differences of such sums.

The sum of one round is the gradient of one large batch, so that every attack on a batch runs on it unchanged. Two sums
of the same model whose members differ by one client differ by that client's update.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.attacks.leaked_gradients import Gradients
from fedveil.errors import BadArgument

WORD = 62  # bits for the sum over all clients
SPARE = 8  # bits above the largest magnitude
MAX_BITS = 1000  # larger powers of two overflow float64


@dataclass(frozen=True, eq=False)
class Sum:
    """The opened sums of a round: sum_k n_k g_k in float64 by parameter name, and sum_k n_k."""

    values: Gradients
    records: int

    def __sub__(self, other: "Sum") -> "Sum":
        values = {name: value - other.values[name] for name, value in self.values.items()}
        return Sum(values, self.records - other.records)

    def mean(self) -> Gradients:
        """Return the gradient of the mean loss over the records."""
        if self.records < 1:
            raise BadArgument("Sum", f"it is over {self.records} records", "subtract the sum over fewer clients")
        return {name: value / self.records for name, value in self.values.items()}


def secure_sum(gradients: Sequence[Mapping[str, Tensor]], records: Sequence[int]) -> Sum:
    """Return the sum of the clients' gradients, each times its number of records, as secure aggregation opens it.

    Values are sent as integer multiples of 2^-b, with one b for each tensor:

        b = 62 - ceil(log2 n) - e,      all |n_k g_k| < 2^(e - 8)

    so that the error of the sum over n clients is at most n 2^-(b + 1), before it is rounded to float64.
    """
    values = {}
    for name in gradients[0]:
        pairs = zip(gradients, records, strict=True)
        weighted = torch.stack([count * own[name].detach().double() for own, count in pairs])
        unit = 2.0 ** -fraction_bits(weighted)
        values[name] = (weighted / unit).round().long().sum(0).double() * unit
    return Sum(values, sum(records))


def fraction_bits(weighted: Tensor) -> int:
    """Return the fraction bits b of a sum of n_k g_k, with clients in the first dimension."""
    exponent = math.frexp(float(weighted.abs().max()))[1] + SPARE
    return min(WORD - (len(weighted) - 1).bit_length() - exponent, MAX_BITS)
