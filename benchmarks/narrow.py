"""How far the worst draws of the noise on narrow heads are from the median, in float32.

    python -m benchmarks.narrow

One hidden layer before the head, 200 secrets each, one batch: error of the worst parameter over that of plain float32
autograd, both against float64.
"""

import sys

import numpy as np
import torch
from tests.oracle import batch, built, plain, veiled_round, worst
from torch import nn

from benchmarks.timing import table

HEADS = ((8, 2, 2, (4.0, 100.0)), (16, 10, 10, (4.0, 100.0, 1e4)), (64, 10, 10, (1e4, 1e6)))
SECRETS = 200


def ratios(inputs: int, outputs: int, groups: int, factor: float) -> list[float]:
    """Error over plain autograd's, one number per secret."""
    net = built(lambda: nn.Sequential(nn.Linear(12, inputs), nn.ReLU(), nn.Linear(inputs, outputs)))
    x, t = batch((12,), outputs, samples=16, dtype=torch.float32)
    net.float()
    own = plain(net, x, t)[0]
    truth = plain(net.double(), x.double(), t.double())[0]
    net.float()
    noise = {"groups": groups, "multiplicative": factor}
    found = [veiled_round(net, x, t, seed=seed, **noise).gradients for seed in range(SECRETS)]
    return [worst(gradients, truth) / worst(own, truth) for gradients in found]


def main() -> int:
    """Print the table; it has no bound."""
    rows = []
    for inputs, outputs, groups, factors in HEADS:
        for factor in factors:
            quantiles = np.quantile(ratios(inputs, outputs, groups, factor), [0.5, 0.9, 0.99, 1.0])
            rows.append([f"{inputs}, {outputs}, m = {groups}", f"{factor:g}", *(f"{q:.1f}" for q in quantiles)])
    print(table(["head (inputs, outputs, m)", "factors", "median", "90 %", "99 %", "largest"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
