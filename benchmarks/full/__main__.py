"""Train the named runs, one after another; a run that was stopped continues from its last checkpoint.

    FEDVEIL_DATA=folder OMP_NUM_THREADS=1 python -m benchmarks.full NAME ... [--folder runs/full] [--threads 1]

NAME is a run, or the beginning of the names of several, such as cifar10-k5. `--list` shows all runs and how far they
are. The same command continues after any kill; a SIGTERM saves the last complete round first.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.full.images import build, train
from benchmarks.full.tasks import IMAGE_RUNS, ImageRun
from fedveil.data import load
from fedveil.federation.history import RoundRecord
from fedveil.files import write_atomically
from fedveil.signals import TERMINATED, Termination, catch_sigterm

CPU_EVERY = 30.0  # CPU seconds between two updates of the file with their sum
CPU = "cpu.json"


class ProgressLines:
    """A callback that prints a line per epoch and sums the CPU seconds of a run over all its processes."""

    def __init__(self, name: str, folder: Path, epochs: int) -> None:
        self.name, self.epochs, self._path = name, epochs, folder / CPU
        self._before = json.loads(self._path.read_text())["cpu_seconds"] if self._path.exists() else 0.0
        self._started = self._written = time.process_time()

    def __call__(self, record: RoundRecord) -> None:
        """Note the record of a round."""
        now = time.process_time()
        if record.evaluated or now - self._written >= CPU_EVERY:
            write_atomically(self._path, json.dumps({"cpu_seconds": self._before + now - self._started}) + "\n")
            self._written = now
        if record.evaluated:
            values = " ".join(f"{name} {value:.4f}" for name, value in record.metrics.items())
            clock, cpu = time.strftime("%H:%M:%S"), (self._before + now - self._started) / 60
            line = f"{clock} {self.name} epoch {record.epoch:.0f}/{self.epochs} {values} lr {record.lr:.4f}"
            print(f"{line} cpu {cpu:.1f} min", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and return 0 if all named runs are complete."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.full", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="runs, or the beginning of their names")
    parser.add_argument("--folder", type=Path, default=Path("runs/full"), help="where runs are kept and continued")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(argv)
    torch.set_num_threads(given.threads)
    chosen = [run for name in given.names for run in find(name)]
    try:
        with catch_sigterm():
            for run in chosen:
                train_run(run, given.folder / run.name)
    except Termination:
        return TERMINATED
    return 0


def find(name: str) -> list[ImageRun]:
    """Return the run with this name, or all runs whose names begin with it."""
    found = [run for run in IMAGE_RUNS if f"{run.name}-".startswith(f"{name}-")]
    if not found:
        raise SystemExit(f"no run is called {name}; the runs are: {', '.join(run.name for run in IMAGE_RUNS)}")
    return found


def train_run(run: ImageRun, folder: Path) -> None:
    """Train one run to its last epoch."""
    data = load(run.task)
    folder.mkdir(parents=True, exist_ok=True)
    federation = build(run, data)
    print(f"{time.strftime('%H:%M:%S')} {run.name} in {folder}, process {os.getpid()}", flush=True)
    train(run, federation, data, folder, [ProgressLines(run.name, folder, run.epochs)])


if __name__ == "__main__":
    sys.exit(main())
