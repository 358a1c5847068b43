"""The cost of clipping each record's gradient over a plain step, beside Opacus, if it is installed.

    python -m benchmarks.privacy [--repeats 25] [--wall] [--cold]

CPU time of one thread, or wall-clock time. Each round runs every method twice, in turn, and measures the second run;
with --cold it measures the only run, after another method has filled the caches. The table has medians of the ratios to
the plain step of the same round, with quartiles. Opacus's hooks form all per-record gradients; its ghost clipping forms
none, and runs two backward passes. All methods end with the clipped sum of the batch, Opacus's in float32 and ours in
float64; noise is not included.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.timing import machine, table
from fedveil.models import cnn, mlp, resnet, with_group_norm
from fedveil.privacy.gradients import RecordGradients, clipped_sums
from fedveil.scheme.losses import find_loss

Work = Callable[[], object]


def plain(model: nn.Module, inputs: Tensor, targets: Tensor) -> Work:
    """A step without privacy."""
    parameters = list(model.parameters())
    return lambda: torch.autograd.grad(F.cross_entropy(model(inputs), targets), parameters)


def ours(model: nn.Module, inputs: Tensor, targets: Tensor) -> Work:
    """The clipped sum of this library."""
    loss, included = find_loss("cross_entropy"), torch.ones(len(targets), dtype=torch.bool)
    return lambda: clipped_sums(RecordGradients.from_model(model, loss), inputs, targets, included, 1.0)


def opacus_hooks(model: nn.Module, inputs: Tensor, targets: Tensor) -> Work:
    """Opacus's per-record gradients by hooks, then clipped."""
    from opacus.grad_sample import GradSampleModule

    own = GradSampleModule(copy.deepcopy(model), loss_reduction="sum")

    def work() -> list[Tensor]:
        own.zero_grad(set_to_none=True)
        for parameter in own.parameters():
            parameter.grad_sample = None
        F.cross_entropy(own(inputs), targets, reduction="sum").backward()
        samples = [parameter.grad_sample for parameter in own.parameters()]
        norms = torch.stack([sample.flatten(1).norm(dim=1) for sample in samples]).norm(dim=0)
        factors = (1.0 / norms).clamp(max=1)
        return [torch.einsum("b,b...->...", factors, sample) for sample in samples]

    return work


def opacus_ghost(model: nn.Module, inputs: Tensor, targets: Tensor) -> Work:
    """Opacus's ghost clipping."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    own = GradSampleModuleFastGradientClipping(
        copy.deepcopy(model), loss_reduction="sum", max_grad_norm=1.0, use_ghost_clipping=True
    )

    def work() -> None:
        own.zero_grad(set_to_none=True)
        own.enable_hooks()
        losses = F.cross_entropy(own(inputs), targets, reduction="none")
        losses.sum().backward(retain_graph=True)
        factors = own.get_clipping_coef()
        own.zero_grad(set_to_none=True)
        own.disable_hooks()
        (losses * factors).sum().backward()

    return work


TASKS = {
    "MLP 64-50-50-50-10, batch 512": (lambda: mlp(64, 10, hidden=50), (512, 64)),
    "CNN, batch 64": (lambda: cnn(3, 10), (64, 3, 32, 32)),
    "ResNet20 with GroupNorm, batch 64": (lambda: with_group_norm(resnet(20, 3, 10)), (64, 3, 32, 32)),
}
WAYS = {"plain": plain, "fedveil": ours, "Opacus hooks": opacus_hooks, "Opacus ghost": opacus_ghost}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--wall", action="store_true", help="measure wall-clock time, on a quiet machine")
    parser.add_argument("--cold", action="store_true", help="run every method once per round, after another method")
    given = parser.parse_args()
    clock = time.perf_counter if given.wall else time.process_time
    torch.set_num_threads(1)
    names = [name for name in WAYS if find_spec("opacus") or "Opacus" not in name]
    print(machine())
    rows = []
    for label, (build, shape) in TASKS.items():
        torch.manual_seed(0)
        model, inputs, targets = build(), torch.randn(shape), torch.randint(0, 10, shape[:1])
        works = {name: WAYS[name](model, inputs, targets) for name in names}
        for work in works.values():
            work()  # what is made once
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(given.repeats):
            for name, work in works.items():
                if not given.cold:
                    work()
                began = clock()
                work()
                seconds[name].append(clock() - began)
        row = [label, f"{1e3 * statistics.median(seconds['plain']):.1f}"]
        for name in names[1:]:
            ratios = [own / base for own, base in zip(seconds[name], seconds["plain"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            row.append(f"{middle:.2f} [{low:.2f}, {high:.2f}]")
        rows.append(row)
    print(table(["task", "plain, ms", *names[1:]], rows))


if __name__ == "__main__":
    main()
