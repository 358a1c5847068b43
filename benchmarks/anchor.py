"""The additive noise that remains in the head that clients work on.

    PYTHONPATH=src python -m benchmarks.anchor

Clients compute y + alpha d o r_a in place of y, with d = -A(V) for a head V (docs/maths.md, "Anchoring"), and
the server subtracts it again. Rounding grows like (1 + ratio)^2 with ratio = |alpha d o r_a| / |y|, both root
mean squares over samples: a ratio up to 1 costs two bits at most, whatever gamma is, because d does not depend on
gamma. Compared with plain means of the head's rows, which fail for wide factors.
"""

import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.timing import table
from fedveil.scheme.noise import anchor

HEADS = [
    (1, 50, 1),
    (10, 64, 1),
    (10, 64, 10),
    (10, 16, 10),
    (100, 64, 1),
    (4, 11, 3),
]  # outputs, columns, groups
MULTIPLICATIVE = (4.0, 100.0, 1e4)
DRAWS, SAMPLES = 200, 64

Reals = NDArray[np.float64]
Integers = NDArray[np.int64]


def log_uniform(random: np.random.Generator, bound: float, count: int) -> Reals:
    """Numbers in [1 / bound, bound]."""
    numbers: Reals = bound ** random.uniform(-1, 1, count)
    return numbers


def draw_partition(random: np.random.Generator, outputs: int, groups: int) -> Integers:
    """A group for each output, no group empty."""
    return random.permutation(np.concatenate([np.arange(groups), random.integers(0, groups, outputs - groups)]))


def row_means(head: Reals, direction: Reals, partition: Integers, groups: int) -> Reals:
    """The multiple of r_a, within each group, nearest to the means of the rows: the obvious anchor."""
    fits = np.bincount(partition, head.mean(1) * direction, groups)
    return fits / np.bincount(partition, direction**2, groups)


def left_over(random: np.random.Generator, head: tuple[int, int, int], bound: float) -> tuple[float, float]:
    """The ratio for one head: by the anchor, by row means."""
    outputs, columns, groups = head
    W = random.normal(size=(outputs, columns)) / np.sqrt(columns)
    h = np.maximum(random.normal(size=(columns, SAMPLES)), 0)
    r = log_uniform(random, bound, columns)
    direction = log_uniform(random, 2.0, outputs) * random.choice([-1.0, 1.0], outputs)
    partition = draw_partition(random, outputs, groups)
    alpha, y, V = r @ h, W @ h, W / r

    def ratio(d: Reals) -> float:
        return float(np.linalg.norm(alpha) * np.linalg.norm(d[partition] * direction) / np.linalg.norm(y))

    return ratio(-anchor(V, direction, partition, groups)), ratio(-row_means(V, direction, partition, groups))


def summary(ratios: Reals) -> list[str]:
    """Median, 90 % and largest, and what the median does to rounding."""
    middle = float(np.median(ratios))
    return [
        *(f"{x:.3g}" for x in (middle, np.quantile(ratios, 0.9), ratios.max())),
        f"x{(1 + middle) ** 2:.2g}",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; there is no bound."""
    random = np.random.default_rng(0)
    rows = []
    for head in HEADS:
        for bound in MULTIPLICATIVE:
            found = np.array([left_over(random, head, bound) for _ in range(DRAWS)])
            rows.append(
                [
                    f"{head[0]} x {head[1]}",
                    str(head[2]),
                    f"{bound:g}",
                    *summary(found[:, 0]),
                    *summary(found[:, 1]),
                ]
            )
    columns = ["median", "90 %", "max", "rounding"]
    header = [
        "head",
        "m",
        "multiplicative",
        *(f"anchor {c}" for c in columns),
        *(f"means {c}" for c in columns),
    ]
    print(table(header, rows))
    print(f"|noise left| / |output|, {DRAWS} draws each; rounding grows (1 + median)^2 times")
    return 0


if __name__ == "__main__":
    sys.exit(main())
