"""How far a recovered gradient is from plain autograd, over networks and noise of every size.

    PYTHONPATH=src python -m benchmarks.exactness [--full] [--seed 0]

Float64: the worst error of a parameter, |found - true| / max(|true|, 1e-6 |all true|). Float32: that error,
against the gradient in float64 of the same float32 values, over the error of plain float32 autograd; the
median of 5 batches, each under a secret of its own. The largest ratio of a single round is shown for
information: a rare secret leaves the anchor of a narrow head far off. Takes about a minute on 2 cores.
"""

import argparse
import copy
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tests.oracle import batch, built, in_dtype, plain, worst
from tests.zoo import ZOO
from torch import Tensor, nn

import fedveil
from benchmarks.timing import machine, table, verdict
from fedveil.graph.inputs import Inputs

GROUPS, ADDITIVE, MULTIPLICATIVE = (1, 3, 10), (1e-3, 1.0, 1e3, 1e6), (2.0, 10.0, 100.0)
SETTINGS = list(itertools.product(GROUPS, ADDITIVE, MULTIPLICATIVE))
BATCHES = 5
BOUND_64, BOUND_32 = 1e-9, 10.0
HEADER = [
    *("network", "float64 worst", "bound", ""),
    *("float32 ratio worst", "median", "bound", "", "worst at", "worst single round"),
]

Setting = tuple[int, float, float]


@dataclass(frozen=True)
class Truth:
    """A batch, its gradient in float64, and how far plain autograd in the batch's own dtype is from it."""

    inputs: Inputs
    targets: Tensor
    gradients: dict[str, Tensor]
    plain_error: float


@dataclass(frozen=True)
class Result:
    """One network under one setting; `ratio_32` is the median of ratios, `single_32` the largest."""

    setting: Setting
    error_64: float
    ratio_32: float
    single_32: float


def truth(model: nn.Module, inputs: Inputs, targets: Tensor) -> Truth:
    """What plain autograd says about a batch."""
    gradients, _ = plain(copy.deepcopy(model).double(), in_dtype(inputs, torch.float64), targets.double())
    return Truth(inputs, targets, gradients, worst(plain(model, inputs, targets)[0], gradients))


def recovered_error(model: nn.Module, plan: fedveil.Plan, known: Truth, setting: Setting, seed: int) -> float:
    """The worst error of a parameter after one round."""
    groups, additive, multiplicative = setting
    entropy = fedveil.Entropy.for_tests(seed)
    secret = fedveil.draw_secret(plan, groups=groups, additive=additive, multiplicative=multiplicative, entropy=entropy)
    update = fedveil.client_step(model, fedveil.perturb(model, secret), known.inputs, known.targets)
    return worst(fedveil.recover(secret, [update]).gradients, known.gradients)


def network(build: Callable[[], nn.Module], shape: Sequence[int], seed: int) -> list[Result]:
    """One network under every setting."""
    double, single = built(build, seed), built(build, seed, torch.float32)
    exact = truth(double, *batch(shape, seed=seed))
    rounded = [truth(single, *batch(shape, seed=seed + number, dtype=torch.float32)) for number in range(BATCHES)]
    double_plan, single_plan = (
        fedveil.analyse(double, exact.inputs),
        fedveil.analyse(single, rounded[0].inputs),
    )
    results = []
    for number, setting in enumerate(SETTINGS):
        first = 1000 * (seed + 1) + BATCHES * number
        ratios = [
            recovered_error(single, single_plan, known, setting, first + i) / known.plain_error
            for i, known in enumerate(rounded)
        ]
        error = recovered_error(double, double_plan, exact, setting, first)
        results.append(Result(setting, error, statistics.median(ratios), max(ratios)))
    return results


def describe(name: str, results: Sequence[Result]) -> list[str]:
    """A network's row: the worst over settings decides."""
    error = max(result.error_64 for result in results)
    ratios = [result.ratio_32 for result in results]
    worst_at = max(results, key=lambda result: result.ratio_32).setting
    setting = "m={}, additive {:g}, x={:g}".format(*worst_at)
    double, single = verdict(error, BOUND_64), verdict(max(ratios), BOUND_32)
    middle, largest = statistics.median(ratios), max(result.single_32 for result in results)
    figures = [f"{ratio:.2f}" for ratio in (max(ratios), middle)]
    return [name, f"{error:.1e}", *double, *figures, *single, setting, f"{largest:.2f}"]


def show_all(results: dict[str, list[Result]]) -> None:
    """Every setting of every network."""
    header = ["network", "m", "additive", "multiplicative", "float64 error", "float32 ratio", "single round"]
    rows = [
        [name, *(f"{number:g}" for number in r.setting), f"{r.error_64:.1e}", f"{r.ratio_32:.2f}", f"{r.single_32:.2f}"]
        for name, found in results.items()
        for r in found
    ]
    print(table(header, rows), end="\n\n")


def progress(benchmark: str, done: int, total: int) -> None:
    """A counter, for people."""
    if sys.stderr.isatty():
        print(
            f"\r{benchmark}: {done} of {total} networks",
            end="\n" if done == total else "",
            file=sys.stderr,
            flush=True,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 if a bound is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exactness", description="Recovered against plain.")
    parser.add_argument("--full", action="store_true", help="print every setting")
    parser.add_argument("--seed", type=int, default=0, help="of networks, batches and noise (default 0)")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)  # the networks are small: more threads only wait for one another
    results: dict[str, list[Result]] = {}
    for name, (build, shape) in ZOO.items():
        progress("exactness", len(results), len(ZOO))
        results[name] = network(build, shape, arguments.seed)
    progress("exactness", len(results), len(ZOO))
    if arguments.full:
        show_all(results)
    rows = [describe(name, found) for name, found in results.items()]
    print(table(HEADER, rows))
    print(f"{len(SETTINGS)} settings each: m {GROUPS}, additive {ADDITIVE}, multiplicative {MULTIPLICATIVE}")
    print(machine())
    return int(any("OVER" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
