"""Train the named runs, one after another; a run that was stopped continues from its last checkpoint.

    FEDVEIL_DATA=folder OMP_NUM_THREADS=1 python -m benchmarks.full NAME ... [--folder runs/full] [--threads 1]

NAME is a run, or the beginning of the names of several, such as cifar10-k5. The same command continues after any kill;
a SIGTERM saves the last complete round first. Runs that are complete are skipped.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.full.tasks import RUNS, Run
from benchmarks.full.training import train
from fedveil.signals import TERMINATED, Termination, catch_sigterm


def main(argv: Sequence[str] | None = None) -> int:
    """Train the named runs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.full", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="+", metavar="NAME", help="runs, or the beginning of their names")
    parser.add_argument("--folder", type=Path, default=Path("runs/full"), help="where runs are kept and continued")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(argv)
    torch.set_num_threads(given.threads)
    chosen = [run for name in given.names for run in find(name)]
    try:
        with catch_sigterm():
            for run in chosen:
                train(run, given.folder / run.name)
    except Termination:
        return TERMINATED
    return 0


def find(name: str) -> list[Run]:
    """Return the run with this name, or all runs whose names begin with it."""
    found = [run for run in RUNS if f"{run.name}-".startswith(f"{name}-")]
    if not found:
        raise SystemExit(f"no run is called {name}; the runs are: {', '.join(run.name for run in RUNS)}")
    return found


if __name__ == "__main__":
    sys.exit(main())
