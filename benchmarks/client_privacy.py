"""What differential privacy costs, and whether it costs a veiled run the same as a plain one.

    python -m benchmarks.client_privacy [--quick] [--loss cross_entropy] [--clients 10] [--seeds 2]

Digits, MLP 64-50-50-50-10, SGD 0.05 with momentum 0.9, clip 1, 100 rounds, delta 1e-5, 100 and 10 clients. One learning
rate for all rows, chosen by looking at such runs. Each seed draws one series of noise, and plain+dp, veil+dp and a
rounding baseline (plain+dp with one unit of noise in the last place of every client's gradient) all use it: they differ
by rounding only. "Apart" is the largest distance from plain+dp's accuracy in any evaluation (every 10 rounds); veil+dp
may be 3 times as far as the baseline, or 3 test records. Time is CPU time of one thread, evaluation included.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.timing import machine, table
from fedveil import Entropy
from fedveil.data import Data, load, split
from fedveil.defences import Defence, Plain, Private, Veil
from fedveil.federation import Federation
from fedveil.models import mlp
from fedveil.privacy.accounting import epsilon

CLIP, DELTA, EVERY = 1.0, 1e-5, 10
LOSSES = ("squared_error", "cross_entropy")


@dataclass(frozen=True)
class Row:
    """One line of the table; noise None is training without clipping and noise."""

    loss: str
    clients: int
    noise: float | None


@dataclass(frozen=True)
class Result:
    """A run's accuracies, and its milliseconds per round."""

    curve: list[float]
    cost: float


ROWS = [
    *[Row("cross_entropy", 100, noise) for noise in (None, 0.0, 1.0, 2.0, 5.0, 10.0, 20.0)],
    *[Row("cross_entropy", 10, noise) for noise in (None, 0.0, 0.5, 1.0, 2.0)],
    *[Row("squared_error", 100, noise) for noise in (None, 0.0, 2.0, 5.0)],
]


def run(row: Row, data: Data, inner: Defence, seed: int, rounds: int) -> Result:
    """Train once."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = mlp(64, 10, hidden=50)
    parts = [(data.train.inputs[r], data.train.targets[r]) for r in split(data, row.clients, seed=seed)]
    defence = inner
    if row.noise is not None:
        defence = Private(inner, CLIP, row.noise, delta=DELTA, entropy=Entropy.for_tests(seed))
    optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    federation = Federation(model, parts, defence, optimizer, loss=row.loss, seed=seed, fuse=False)
    began = time.process_time()
    history = federation.fit(rounds=rounds, test=(data.test.inputs, data.test.targets), evaluate_every=EVERY)
    cost = 1e3 * (time.process_time() - began) / rounds
    return Result([value for _, value in history.curve("accuracy")], cost)


def apart(found: Sequence[Result], plain: Sequence[Result]) -> float:
    """The largest distance between curves of the same seed."""
    pairs = zip(found, plain, strict=True)
    return max(abs(a - b) for one, other in pairs for a, b in zip(one.curve, other.curve, strict=True))


def line(row: Row, data: Data, seeds: int, rounds: int) -> list[str]:
    """Run a row, and print its figures as cells."""
    plain = [run(row, data, Plain(), seed, rounds) for seed in range(seeds)]
    veil = [run(row, data, Veil(), seed, rounds) for seed in range(seeds)]
    baseline = [run(row, data, Plain(rounding=seed + 1), seed, rounds) for seed in range(seeds)]
    far, rounding = apart(veil, plain), apart(baseline, plain)
    kept = far <= 3 * max(rounding, 1 / len(data.test.targets))
    noise, spent = "none", ["", ""]
    if row.noise is not None:
        noise = f"{row.noise:g}"
        spent = [f"{epsilon(rounds, row.noise, DELTA, replace=replace):.3g}" for replace in (False, True)]
    ends = [[result.curve[-1] for result in found] for found in (plain, veil)]
    figures = [f"{statistics.mean(end):.3f} ± {statistics.stdev(end) if seeds > 1 else 0:.3f}" for end in ends]
    costs = [f"{statistics.mean(result.cost for result in found):.0f}" for found in (plain, veil)]
    verdict = "ok" if kept else "OVER"
    return [row.loss, str(row.clients), noise, *spent, *figures, f"{far:.4f}", f"{rounding:.4f}", verdict, *costs]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 if a veiled run is too far from the plain one."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.client_privacy", description="Cost of differential privacy."
    )
    parser.add_argument("--quick", action="store_true", help="one seed, 20 rounds, few rows")
    parser.add_argument("--loss", choices=LOSSES, help="only this loss")
    parser.add_argument("--clients", type=int, help="only rows with this number of clients")
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    data = load("digits")
    rows, seeds, rounds = (ROWS[7:9], 1, 20) if options.quick else (ROWS, options.seeds, 100)
    rows = [row for row in rows if options.loss in (None, row.loss) and options.clients in (None, row.clients)]
    lines = []
    for row in rows:
        lines.append(line(row, data, seeds, rounds))
        print(*lines[-1], sep="  ", file=sys.stderr, flush=True)  # a long run that is stopped leaves its rows
    header = ["loss", "clients", "noise", "epsilon", "replace", "plain+dp", "veil+dp", "apart", "baseline", ""]
    print(table([*header, "plain, ms", "veil, ms"], lines))
    print(f"{rounds} rounds, {seeds} seeds, delta {DELTA:g}; {machine()}")
    return int(any("OVER" in cells for cells in lines))


if __name__ == "__main__":
    sys.exit(main())
