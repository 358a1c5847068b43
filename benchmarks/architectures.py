"""What a veil changes in networks of every common kind, and how far recovered gradients are from plain autograd.

    PYTHONPATH=src python -m benchmarks.architectures [--only NAME] [--markdown] [--seed 0]

For each network of `benchmarks/networks`: how many of its values are scaled by secret factors, changed in sign, only
moved to another place, or bare; the worst error of a parameter in float64, |found - true| / max(|true|, 1e-6 |all
true|); and in float32 that error over the error of plain float32 autograd, the median of 5 batches, each under a
different secret. Squared error, up to 3 groups of outputs, additive noise 1, factors up to 4.
"""

import argparse
import copy
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tests.oracle import built, in_dtype
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import fedveil
from benchmarks.exactness import BATCHES, BOUND_32, BOUND_64, progress, recovered_error, truth
from benchmarks.networks import ARCHITECTURES, Architecture
from benchmarks.timing import machine, table, verdict
from fedveil.graph.inputs import Inputs, call

SAMPLES = 6
GROUPS, ADDITIVE, MULTIPLICATIVE = 3, 1.0, 4.0
STRENGTHS = ("scaled", "signed", "moved", "bare")
HEADER = [
    *("network", "family", "parameters", *(f"{strength} %" for strength in STRENGTHS)),
    *("float64 worst", "bound", "", "float32 ratio", "bound", "", "note"),
]


@dataclass(frozen=True)
class Result:
    """One network: shares of its values by strength, the worst error in float64, the median ratio in float32."""

    parameters: int
    shares: dict[str, float]
    error_64: float
    ratio_32: float


def settled(architecture: Architecture, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A network with repeatable values as if it had been trained for a while.

    Norms begin with ones, biases and running means with zeros. A constant hides whether its axis was permuted, and a
    zero whether it was scaled: here they get noise.
    """
    model = built(architecture.build, seed, torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.min() == parameter.max():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                assert module.running_mean is not None
                assert module.running_var is not None
                module.running_mean.normal_(generator=generator)
                module.running_var.uniform_(0.5, 2.0, generator=generator)
    return model.to(dtype)


def batch(architecture: Architecture, model: nn.Module, seed: int, samples: int = SAMPLES) -> tuple[Inputs, Tensor]:
    """Inputs, and normal targets in the shape of the outputs, in the model's dtype."""
    dtype = next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(seed)
    inputs = in_dtype(architecture.inputs(samples, generator), dtype)
    with torch.no_grad():
        shape = call(copy.deepcopy(model), inputs).shape
    return inputs, torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def measure(architecture: Architecture, seed: int) -> Result:
    """Analyse a network, and play rounds with it in both precisions."""
    double, single = settled(architecture, seed), settled(architecture, seed, torch.float32)
    exact = truth(double, *batch(architecture, double, seed))
    plan = fedveil.analyse(double, exact.inputs)
    setting = (min(GROUPS, plan.head.outputs if plan.head else 1), ADDITIVE, MULTIPLICATIVE)
    error = recovered_error(double, plan, exact, setting, 1000 * (seed + 1))
    rounded = [truth(single, *batch(architecture, single, seed + number)) for number in range(BATCHES)]
    single_plan = fedveil.analyse(single, rounded[0].inputs)
    ratios = [
        recovered_error(single, single_plan, known, setting, 1000 * (seed + 1) + number) / known.plain_error
        for number, known in enumerate(rounded)
    ]
    parameters = sum(parameter.numel() for parameter in double.parameters())
    return Result(parameters, dict(plan.shares), error, statistics.median(ratios))


def describe(architecture: Architecture, result: Result) -> list[str]:
    """A network's row."""
    shares = [f"{100 * result.shares[strength]:.1f}" for strength in STRENGTHS]
    double = f"{result.error_64:.1e}", *verdict(result.error_64, BOUND_64)
    single = f"{result.ratio_32:.2f}", *verdict(result.ratio_32, BOUND_32)
    return [architecture.name, architecture.family, f"{result.parameters:,}", *shares, *double, *single, ""]


def describe_failure(architecture: Architecture, error: Exception) -> list[str]:
    """The row of a network that was refused, or in which something else went wrong."""
    reason = str(error).strip().split("\n")[0]
    word = "refused" if isinstance(error, fedveil.FedveilError) else type(error).__name__
    blank = ["-"] * (len(HEADER) - 3)
    return [architecture.name, architecture.family, *blank, f"{word}: {reason}"]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same table for a page."""
    lines = [header, ["---", "---", *["---:"] * (len(header) - 3), "---"], *rows]
    return "\n".join("| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in lines)


def chosen(only: str | None) -> list[Architecture]:
    """Networks whose name contains some text; all without it."""
    return [one for one in ARCHITECTURES if only is None or only.lower() in one.name.lower()]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 if a bound is exceeded or a network refused."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.architectures", description="Networks of every kind.")
    parser.add_argument("--only", metavar="NAME", help="networks whose name contains this")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument("--seed", type=int, default=0, help="of networks, batches and noise (default 0)")
    arguments = parser.parse_args(argv)
    wanted = chosen(arguments.only)
    if not wanted:
        parser.error(f"no network's name contains {arguments.only!r}: {'; '.join(one.name for one in ARCHITECTURES)}")
    torch.set_num_threads(1)  # the networks are small: more threads only wait for one another
    rows: list[list[str]] = []
    failed = False
    for architecture in wanted:
        progress("architectures", len(rows), len(wanted))
        try:
            rows.append(describe(architecture, measure(architecture, arguments.seed)))
        except Exception as error:  # a crash is one network's result, and must not hide the others'
            rows.append(describe_failure(architecture, error))
            failed = True
    progress("architectures", len(rows), len(wanted))
    print((markdown if arguments.markdown else table)(HEADER, rows))
    print(f"{len(rows)} networks;", machine())
    return int(failed or any("OVER" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
