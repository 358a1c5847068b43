"""What the server's work costs, compared with copying the same bytes.

    PYTHONPATH=src python -m benchmarks.server [--quick] [--threads 2] [--only NAME]

`perturb` is timed against cloning all parameters and buffers of the model, which it must read; `recover` of two updates
(squared error, m = 1: three passes each) against cloning those updates. Float32; ratios are taken within a repetition.
A clone also asks the kernel for new memory; copying into memory that is already there is several times faster and is
shown for information. Perturbing includes drawing the noise. Updates are random: nothing depends on their values.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

import fedveil
from benchmarks.analysis import image_batch
from benchmarks.shapes import IMAGE, SHAPES
from benchmarks.speed import Row, passes_of, show
from benchmarks.timing import Timings, compare, interleave, machine

NETWORKS = ("resnet18", "resnet50", "vit_b")
BOUND = 8.0
CLIENTS = 2
WARM_UP = 1


def random_update(broadcast: fedveil.Broadcast, samples: int) -> fedveil.Update:
    """An answer of the right shapes that no network computed."""
    count = passes_of(broadcast)
    passes = {
        name: torch.randn(count, *broadcast.parameters[name].shape, dtype=broadcast.parameters[name].dtype)
        for name in broadcast.trainable
    }
    buffers = {name: buffer.clone() for name, buffer in broadcast.buffers.items()}
    return fedveil.Update(broadcast.round, broadcast.model, samples, passes, buffers)


def cloned(tensors: Sequence[Tensor]) -> list[Tensor]:
    """What every server must at least do: read and write these bytes."""
    return [tensor.clone() for tensor in tensors]


def copied(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """The same without new memory."""
    for target, tensor in zip(into, tensors, strict=True):
        target.copy_(tensor)


def megabytes(tensors: Sequence[Tensor]) -> float:
    """How much there is to copy."""
    return sum(tensor.nbytes for tensor in tensors) / 1e6


def measure(name: str, model: nn.Module, repetitions: int) -> list[Row]:
    """One network's rows: all work is timed in turn, in one run."""
    plan = fedveil.analyse(model, image_batch(IMAGE))
    session = fedveil.Veil().start(plan)
    perturbation = session.perturb(model)
    updates = [random_update(perturbation.broadcast, samples=8) for _ in range(CLIENTS)]
    values = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    answers = [tensor for update in updates for tensor in (*update.passes.values(), *update.buffers.values())]
    other_values, other_answers = cloned(values), cloned(answers)
    work: dict[str, Callable[[], object]] = {
        "clone model": lambda: cloned(values),
        "copy model": lambda: copied(other_values, values),
        "perturb": lambda: session.perturb(model).release(reuse=True),
        "clone updates": lambda: cloned(answers),
        "copy updates": lambda: copied(other_answers, answers),
        "recover": lambda: perturbation.recover(updates),
    }
    timings = interleave(work, repetitions, 1, warm_up=WARM_UP)
    size, uploaded = f"{megabytes(values):.0f} MB", f"{megabytes(answers):.0f} MB"
    return [
        row(f"perturb / clone of the model ({size}), {name}", timings, "perturb", "clone model", BOUND),
        row(f"perturb / copy into memory that is there, {name}", timings, "perturb", "copy model", None),
        row(f"recover / clone of two updates ({uploaded}), {name}", timings, "recover", "clone updates", BOUND),
        row(f"recover / copy into memory that is there, {name}", timings, "recover", "copy updates", None),
    ]


def row(what: str, timings: Timings, work: str, copy: str, bound: float | None) -> Row:
    """One kind of work over its copy."""
    pair = replace(timings, seconds={name: timings.seconds[name] for name in (work, copy)})
    return Row(what, compare(pair, copy)[work], bound, timings.kept)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 if a bound is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.server", description="What a server's work costs.")
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default 2)")
    parser.add_argument("--only", choices=NETWORKS, help="one network")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    rows: list[Row] = []
    for name in NETWORKS if arguments.only is None else [arguments.only]:
        rows += measure(name, SHAPES[name](), 5 if arguments.quick else 15)
    kept = show(rows)
    print(machine())
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
