"""What `fedveil.analyse` costs: CPU seconds and memory for large networks, growth with depth, milliseconds for small.

    PYTHONPATH=src python -m benchmarks.analysis [--quick]

Large networks have the dimensions of public ones at 224 pixels. Each is analysed once, in a separate process, after
one analysis of a tiny network that loads what torch.export needs. Memory is the peak of resident memory during the call
above what was resident before it. Growth with depth is the cost of one more layer in the last doubling over that in the
first: about 1 if the cost is linear. All times are CPU seconds of the process, with one thread.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import fedveil
from benchmarks.networks.residual import Basic, ResNet
from benchmarks.networks.vit import VisionTransformer
from benchmarks.shapes import IMAGE, SHAPES
from benchmarks.timing import machine, table, verdict
from fedveil.models import mlp, resnet

LARGE = ("swin_t", "vit_b", "resnet50")
BOUND_SECONDS, BOUND_BYTES = 5.0, 1e9
SAMPLES = 2
ROOT = Path(__file__).parents[1]
STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Cost:
    """One analysis: CPU seconds, bytes at the peak above those before, parameters of the network."""

    seconds: float
    memory: int
    parameters: int


@dataclass(frozen=True)
class Growth:
    """Networks of one kind: layers -> how to build it, and the images they take."""

    name: str
    networks: Mapping[int, Callable[[], nn.Module]]
    image: int


def small_vit(layers: int) -> nn.Module:
    """ViT-Ti's width."""
    return VisionTransformer(image=IMAGE, patch=16, width=192, heads=3, layers=layers, classes=1000)


def deep_resnet(blocks: int) -> nn.Module:
    """As many basic blocks in each of four stages."""
    return ResNet(Basic, (blocks,) * 4, width=32)


GROWTHS = (
    Growth("ViT, width 192", {layers: partial(small_vit, layers) for layers in (3, 6, 12, 24)}, IMAGE),
    Growth("ResNet, width 32", {8 * blocks: partial(deep_resnet, blocks) for blocks in (1, 2, 4, 8)}, 64),
)


def status(field: str) -> int:
    """A number of bytes that the kernel keeps of this process."""
    line = next(line for line in STATUS.read_text().split("\n") if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def resident() -> int:
    """Bytes in memory now; the peak so far where the kernel does not tell."""
    return status("VmRSS") if STATUS.exists() else peak()


def peak() -> int:
    """The most bytes that were in memory so far.

    By the kernel's own count where it is kept: getrusage also counts what the parent had when this process began.
    """
    if STATUS.exists():
        return status("VmHWM")
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def check_method() -> None:
    """The method must find 64 million bytes that were in memory for a moment."""
    before = resident()
    torch.ones(16_000_000).sum()
    found = peak() - before
    assert 0.9 < found / 64e6 < 1.5, f"measured {found} bytes, known 64,000,000"


def image_batch(size: int) -> Tensor:
    """A batch of images; only its shape matters."""
    return torch.zeros(SAMPLES, 3, size, size)


def cpu_seconds(model: nn.Module, inputs: Tensor) -> float:
    """CPU time of one analysis."""
    start = time.process_time()
    fedveil.analyse(model, inputs)
    return time.process_time() - start


def warm_up() -> None:
    """Load what the first analysis loads."""
    fedveil.analyse(mlp(4, 3), torch.zeros(SAMPLES, 4))


def measure(name: str) -> Cost:
    """One analysis of a large network, in this process."""
    check_method()
    warm_up()
    model, inputs = SHAPES[name](), image_batch(IMAGE)
    before = resident()
    seconds = cpu_seconds(model, inputs)
    return Cost(seconds, max(0, peak() - before), sum(p.numel() for p in model.parameters()))


def measure_apart(name: str) -> Cost:
    """The same in a new process."""
    command = [sys.executable, "-m", "benchmarks.analysis", "--one", name]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment(), check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr.strip().splitlines()[-1]}")
    return Cost(**json.loads(done.stdout))


def environment() -> dict[str, str]:
    """This process's, with the same Fedveil."""
    source = str(Path(fedveil.__file__).parents[1])
    return os.environ | {"PYTHONPATH": os.pathsep.join([source, str(ROOT), os.environ.get("PYTHONPATH", "")])}


def show_large() -> bool:
    """Large networks; returns whether every bound is kept."""
    rows, kept = [], True
    for name in LARGE:
        try:
            cost = measure_apart(name)
        except RuntimeError as error:
            print(f"analyse failed: {error}")
            kept = False
            continue
        seconds, memory = verdict(cost.seconds, BOUND_SECONDS), verdict(cost.memory / 1e6, BOUND_BYTES / 1e6)
        kept &= "OVER" not in (*seconds, *memory)
        sizes = [f"{cost.parameters / 1e6:.1f} M", f"{cost.seconds:.2f}", *seconds, f"{cost.memory / 1e6:.0f}", *memory]
        rows.append([name, *sizes])
    print(table(["network, 224 px", "parameters", "CPU s", "bound", "", "new MB", "bound", ""], rows))
    return kept


def growth_ratio(seconds: Mapping[int, float]) -> float:
    """Cost of a layer between the two deepest networks over that between the two shallowest."""
    depths = sorted(seconds)

    def added(before: int, after: int) -> float:
        return (seconds[after] - seconds[before]) / (after - before)

    return added(*depths[-2:]) / added(*depths[:2])


def show_growth(growth: Growth, repetitions: int) -> None:
    """How cost grows with depth; the least of a few repetitions."""
    inputs = image_batch(growth.image)
    seconds = {}
    for layers, build in growth.networks.items():
        model = build()
        seconds[layers] = min(cpu_seconds(model, inputs) for _ in range(repetitions))
    rows = [[f"{layers}", f"{found:.3f}", f"{1e3 * found / layers:.1f}"] for layers, found in seconds.items()]
    print(f"\n{growth.name}, {growth.image} px")
    print(table(["layers", "CPU s", "ms per layer"], rows))
    print(f"one more layer, last doubling over first: x{growth_ratio(seconds):.2f} (linear is about 1)")


def show_small(repetitions: int) -> None:
    """Set-up of small networks."""
    cases: dict[str, tuple[nn.Module, Tensor]] = {
        "MLP, 3 hidden layers": (mlp(48, 1, layers=3, hidden=50, bias=False), torch.zeros(SAMPLES, 48)),
        "ResNet20": (resnet(20), image_batch(32)),
    }
    rows = []
    for name, (model, inputs) in cases.items():
        cpu_seconds(model, inputs)
        found = statistics.median(cpu_seconds(model, inputs) for _ in range(repetitions))
        rows.append([name, f"{1e3 * found:.0f}"])
    print()
    print(table(["small network", "CPU ms"], rows))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 if a bound is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.analysis", description="What analyse costs.")
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    parser.add_argument("--one", choices=sorted(SHAPES), help="analyse one network here, and print JSON")
    arguments = parser.parse_args(argv)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if arguments.one:
            print(json.dumps(vars(measure(arguments.one))))
            return 0
        kept = show_large()
        warm_up()
        for growth in GROWTHS:
            show_growth(growth, 1 if arguments.quick else 3)
        show_small(3 if arguments.quick else 9)
        print(machine())
        return 0 if kept else 1
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    sys.exit(main())
