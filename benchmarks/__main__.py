"""Every benchmark in turn; ends with 1 if a bound is exceeded.

PYTHONPATH=src python -m benchmarks [--quick] [--threads 2]
"""

import argparse
import sys
from collections.abc import Sequence

import torch

from benchmarks import (
    analysis,
    anchor,
    architectures,
    engine,
    engines,
    exactness,
    limits,
    memory,
    overhead,
    picks,
    secagg,
    server,
    speed,
)
from benchmarks.timing import machine


def main(argv: Sequence[str] | None = None) -> int:
    """Run them all; 1 if any is over its bound."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run every benchmark.")
    parser.add_argument("--quick", action="store_true", help="few repetitions where time is measured")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default 2)")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    quick = ["--quick"] if arguments.quick else []
    options = ["--threads", str(arguments.threads), *quick]
    over = []
    for name, run, given in (
        ("exactness", exactness.main, []),
        ("architectures", architectures.main, []),
        ("analysis", analysis.main, quick),
        ("speed", speed.main, options),
        ("server", server.main, options),
        ("memory", memory.main, []),
        ("anchor", anchor.main, []),
        ("picks", picks.main, quick),
        ("engine", engine.main, options),
        ("limits", limits.main, options),
        ("overhead", overhead.main, options),
        ("engines", engines.main, quick),
        ("secagg", secagg.main, quick),
    ):
        print(f"## {name}\n", flush=True)
        if run(given):
            over.append(name)
        print(flush=True)
    print(machine())
    print("repeat: make bench, or: python -m benchmarks", *options)
    print("over its bound: " + ", ".join(over) if over else "every bound is kept")
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main())
