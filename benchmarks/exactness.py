"""How far a recovered gradient is from plain autograd, over networks, noise of every size, and losses.

    PYTHONPATH=src python -m benchmarks.exactness [--full] [--seed 0] [--only squared-error|losses]

Float64: the worst error of a parameter, |found - true| / max(|true|, 1e-6 |all true|). Float32: that error,
against the gradient in float64 of the same float32 values, over the error of plain float32 autograd; the
median of 5 batches, each with its own secret. The largest ratio of a single round is shown for information:
the worst draws of the noise leave the anchor of a narrow head far off. Takes about a minute on 2 cores.

The second table has the losses of `benchmarks/losses.py`, recovered with decoys: for each network and loss the worst
over groups, decoys and additive noise, in float32 the median of 3 batches. Takes two to three minutes on one core.
"""

import argparse
import copy
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tests.oracle import batch, built, in_dtype, squared_error, worst
from tests.zoo import ZOO
from torch import Tensor, nn

import fedveil
from benchmarks.losses import TRIALS, Function, Trial
from benchmarks.timing import machine, table, verdict
from fedveil.graph.inputs import Inputs, call

GROUPS, ADDITIVE, MULTIPLICATIVE = (1, 3, 10), (1e-3, 1.0, 1e3, 1e6), (2.0, 10.0, 100.0)
SETTINGS = list(itertools.product(GROUPS, ADDITIVE, MULTIPLICATIVE))
BATCHES = 5
DECOYS, DECOYS_ADDITIVE, DECOYS_BATCHES = (1, 2, 3), (1e-3, 1.0, 1e6), 3
DECOYS_SETTINGS = list(itertools.product(GROUPS, DECOYS, DECOYS_ADDITIVE))
SAMPLES, OUTPUTS = 6, 10
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


def plain(model: nn.Module, inputs: Inputs, targets: Tensor, loss: Function) -> dict[str, Tensor]:
    """Gradients by plain autograd, of a copy of the model."""
    model = copy.deepcopy(model)
    wanted = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradients = torch.autograd.grad(loss(call(model, inputs), targets), list(wanted.values()))
    return dict(zip(wanted, gradients, strict=True))


def truth(model: nn.Module, inputs: Inputs, targets: Tensor, loss: Function = squared_error) -> Truth:
    """What plain autograd says about a batch."""
    double = in_dtype(inputs, torch.float64), targets.double() if targets.is_floating_point() else targets
    gradients = plain(copy.deepcopy(model).double(), *double, loss)
    return Truth(inputs, targets, gradients, worst(plain(model, inputs, targets, loss), gradients))


def round_error(model: nn.Module, known: Truth, perturbation: fedveil.Perturbation) -> float:
    """Return the worst error of a parameter after one round."""
    update = fedveil.client_step(model, perturbation.broadcast, known.inputs, known.targets)
    return worst(perturbation.recover([update]).gradients, known.gradients)


def recovered_error(model: nn.Module, plan: fedveil.Plan, known: Truth, setting: Setting, seed: int) -> float:
    """The worst error of a parameter after one round of squared error."""
    groups, additive, multiplicative = setting
    entropy = fedveil.Entropy.for_tests(seed)
    veil = fedveil.Veil(groups, additive, multiplicative, entropy=entropy)
    return round_error(model, known, veil.perturb(model, plan))


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


def show_all(results: dict[str, list[Result]], setting: Sequence[str]) -> None:
    """Every setting of every network."""
    header = ["network", *setting, "float64 error", "float32 ratio", "single round"]
    rows = [
        [name, *(f"{number:g}" for number in r.setting), f"{r.error_64:.1e}", f"{r.ratio_32:.2f}", f"{r.single_32:.2f}"]
        for name, found in results.items()
        for r in found
    ]
    print(table(header, rows), end="\n\n")


class Grid:
    """A network in both precisions, analysed once, and its rounds with every loss and setting of decoys."""

    def __init__(self, build: Callable[[], nn.Module], shape: Sequence[int], seed: int) -> None:
        self.seed, self._shape = seed, shape
        self._double, self._single = built(build, seed), built(build, seed, torch.float32)
        self._double_plan, self._single_plan = (
            fedveil.analyse(model, self._inputs(seed, model)) for model in (self._double, self._single)
        )

    def _inputs(self, seed: int, model: nn.Module) -> Tensor:
        dtype = next(model.parameters()).dtype
        return batch(self._shape, OUTPUTS, samples=SAMPLES, seed=seed, dtype=dtype)[0]

    def _truth(self, trial: Trial, model: nn.Module, seed: int) -> Truth:
        inputs = self._inputs(seed, model)
        targets = trial.targets(SAMPLES, OUTPUTS, torch.Generator().manual_seed(seed))
        return truth(model, inputs, targets.to(inputs) if targets.is_floating_point() else targets, trial.plain)

    def results(self, trial: Trial) -> list[Result]:
        """A loss under every setting; a `Result`'s setting is (groups, decoys, additive)."""
        exact = self._truth(trial, self._double, self.seed)
        rounded = [self._truth(trial, self._single, self.seed + number) for number in range(DECOYS_BATCHES)]
        results = []
        for number, setting in enumerate(DECOYS_SETTINGS):
            first = 1000 * (self.seed + 1) + DECOYS_BATCHES * number
            error = round_error(self._double, exact, perturb(self._double, self._double_plan, trial, setting, first))
            ratios = [
                round_error(self._single, known, perturb(self._single, self._single_plan, trial, setting, first + i))
                / known.plain_error
                for i, known in enumerate(rounded)
            ]
            results.append(Result(setting, error, statistics.median(ratios), max(ratios)))
        return results


def perturb(
    model: nn.Module, plan: fedveil.Plan, trial: Trial, setting: tuple[int, int, float], seed: int
) -> fedveil.Perturbation:
    """Perturb a model with repeatable noise and decoys."""
    groups, decoys, additive = setting
    veil = fedveil.Veil(groups, additive, decoys=decoys, entropy=fedveil.Entropy.for_tests(seed))
    return veil.perturb(model, plan, trial.loss)


def progress(benchmark: str, done: int, total: int) -> None:
    """A counter, for people."""
    if sys.stderr.isatty():
        print(
            f"\r{benchmark}: {done} of {total} networks",
            end="\n" if done == total else "",
            file=sys.stderr,
            flush=True,
        )


def squared_error_table(seed: int, full: bool) -> bool:
    """Print the first table; returns whether both bounds are kept."""
    results: dict[str, list[Result]] = {}
    for name, (build, shape) in ZOO.items():
        progress("exactness", len(results), len(ZOO))
        results[name] = network(build, shape, seed)
    progress("exactness", len(results), len(ZOO))
    if full:
        show_all(results, ["m", "additive", "multiplicative"])
    rows = [describe(name, found) for name, found in results.items()]
    print(table(HEADER, rows))
    print(f"{len(SETTINGS)} settings each: m {GROUPS}, additive {ADDITIVE}, multiplicative {MULTIPLICATIVE}")
    return not any("OVER" in row for row in rows)


def losses_table(seed: int, full: bool) -> bool:
    """Print the second table; returns whether both bounds are kept."""
    results: dict[str, list[Result]] = {}
    for number, (name, (build, shape)) in enumerate(ZOO.items()):
        progress("losses", number, len(ZOO))
        grid = Grid(build, shape, seed)
        results |= {f"{name}, {loss}": grid.results(trial) for loss, trial in TRIALS.items()}
    progress("losses", len(ZOO), len(ZOO))
    if full:
        show_all(results, ["m", "decoys", "additive"])
    print(
        table(["network", *TRIALS], [[name, *(brief(results[f"{name}, {loss}"]) for loss in TRIALS)] for name in ZOO])
    )
    print("float64 worst, and float32 over plain float32 autograd's error, worst median of", DECOYS_BATCHES, "batches")
    print(f"{len(DECOYS_SETTINGS)} settings each: m {GROUPS}, decoys {DECOYS}, additive {DECOYS_ADDITIVE}")
    return all([summarise(results, "float64", BOUND_64), summarise(results, "float32", BOUND_32)])


def brief(results: Sequence[Result]) -> str:
    """The worst of a network's settings in both precisions."""
    return f"{max(r.error_64 for r in results):.0e} x{max(r.ratio_32 for r in results):.1f}"


def summarise(results: dict[str, list[Result]], precision: str, bound: float) -> bool:
    """Say where the second table is worst, and whether all of it keeps the bound."""
    every = [
        (result.error_64 if precision == "float64" else result.ratio_32, name, result)
        for name, found in results.items()
        for result in found
    ]
    value, name, result = max(every, key=lambda one: one[0])
    kept = all(one[0] <= bound for one in every)  # a NaN does not
    where = "m={}, {} decoys, additive {:g}".format(*result.setting)
    single = "" if precision == "float64" else f"; worst single round {max(one[2].single_32 for one in every):.2g}"
    print(f"{precision} worst {value:.2g} ({name}, {where}){single}; bound {bound:g}: {'ok' if kept else 'OVER'}")
    return kept


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 if a bound is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exactness", description="Recovered against plain.")
    parser.add_argument("--full", action="store_true", help="print every setting")
    parser.add_argument("--seed", type=int, default=0, help="of networks, batches and noise (default 0)")
    parser.add_argument("--only", choices=TABLES, help="one of the tables")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)  # the networks are small: more threads only wait for one another
    wanted = [arguments.only] if arguments.only else list(TABLES)
    kept = []
    for name in wanted:
        kept.append(TABLES[name](arguments.seed, arguments.full))
        print(flush=True)
    print(machine())
    return int(not all(kept))


TABLES = {"squared-error": squared_error_table, "losses": losses_table}

if __name__ == "__main__":
    sys.exit(main())
