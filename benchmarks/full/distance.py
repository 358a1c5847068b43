"""How far veiled training moves from plain training in float64, round by round, beside a rounding baseline.

    FEDVEIL_DATA=folder OMP_NUM_THREADS=1 python -m benchmarks.full.distance [--rounds 200] [--folder FOLDER]

CIFAR-10, ResNet20, five clients, as in `benchmarks.full`, but in float64; 200 rounds are one epoch. The distance is the
norm of the difference of all parameters, over the norm of plain training's. Training amplifies any rounding error, so
the baseline is plain training in another memory layout, whose kernels sum in another order. Bounds: 1e-9 in the first
20 rounds, and three times the baseline's distance in every round; ends with 1 if one is exceeded. The same command
continues after a kill.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from benchmarks.full.images import build
from benchmarks.full.tasks import DEFENCES, IMAGE_TASKS, Run
from benchmarks.timing import machine, table
from fedveil import Federation
from fedveil.data import load
from fedveil.federation.checkpoint import list_checkpoints
from fedveil.files import lock_folder, write_atomically

EARLY, BOUND, TIMES = 20, 1e-9, 3.0
SAVE_EVERY = 60.0  # seconds
SHOWN = (1, 5, 10, 20, 50, 100, 150, 200)
Distances = dict[int, dict[str, float]]  # by round and defence


def measure(make: Callable[[str], Federation], folder: Path, rounds: int) -> Distances:
    """Train all defences side by side, and return the distance from plain after each round.

    After a kill, their checkpoints may be from different rounds: those that are behind catch up first.
    """
    runs = {name: make(name) for name in DEFENCES}
    found, path, saved = Distances(), folder / "distances.json", time.monotonic()
    with lock_folder(folder):
        for name, run in runs.items():
            if list_checkpoints(folder / name):
                run.resume(folder / name)
        if path.exists():
            found |= {int(number): own for number, own in json.loads(path.read_text()).items()}
        while (behind := min(run.round for run in runs.values())) < rounds:
            for run in runs.values():
                if run.round == behind:
                    run.step()
            numbers = {run.round for run in runs.values()}
            if len(numbers) == 1:
                found[behind + 1] = compare(runs)
                write_atomically(path, json.dumps(found) + "\n")
            if time.monotonic() - saved >= SAVE_EVERY or behind + 1 == rounds:
                for name, run in runs.items():
                    run.save(folder / name)
                saved = time.monotonic()
    return found


def compare(runs: Mapping[str, Federation]) -> dict[str, float]:
    """Return the relative distance of each defence from plain."""
    values = {name: flatten(run) for name, run in runs.items()}
    plain = values.pop("plain")
    return {name: float((own - plain).norm() / plain.norm()) for name, own in values.items()}


def flatten(run: Federation) -> Tensor:
    """Return all parameters of a run's model as one vector."""
    return parameters_to_vector([own.detach().contiguous() for own in run.model.parameters()])


def exceeded(found: Distances) -> list[int]:
    """Return the rounds in which a bound is exceeded."""
    return [
        number
        for number, own in sorted(found.items())
        if own["veil"] > TIMES * own["rounding"] or (number <= EARLY and own["veil"] >= BOUND)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the distances; return 1 if a bound is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.full.distance", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--folder", type=Path, default=Path("runs/full/distance"))
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    data = load("cifar10")
    make = lambda name: build(Run("cifar10", 5, name, 24), IMAGE_TASKS["cifar10"], data, dtype=torch.float64)  # noqa: E731
    found = measure(make, given.folder, given.rounds)
    rows = [[str(n), *(f"{found[n][name]:.1e}" for name in DEFENCES[1:])] for n in SHOWN if n in found]
    print(table(["round", *(f"{name} from plain" for name in DEFENCES[1:])], rows))
    print(machine())
    print(f"repeat: python -m benchmarks.full.distance --rounds {given.rounds}")
    over = exceeded(found)
    print(f"exceeded in rounds {over}" if over else "every bound is kept")
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main())
