"""What the veil costs over Flower: seconds and bytes per round against plain, in simulation and with real processes.

    python -m benchmarks.overhead [--quick] [--pairs 10] [--only squared|others]

Three clients: the MLP of bank with a batch of 512 per round, as in the paper's setting, and with whole shards (6,590
records each), as a deployment should; ResNet20 with whole shards (256 images each). Plain and veiled rounds alternate
in one run, so that both see the same machine; the ratio is the median over pairs. Bounds: 1.15 for the MLP; for
ResNet20 its extra passes, (1 + 2 * 3) / (1 + 2) if a backward pass costs two forward ones; the same for whole shards of
the MLP in simulation, where a round costs little more than its passes. A second table, without bounds, has losses other
than squared error.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import flower
from benchmarks.timing import machine, table

APP = Path(__file__).parent / "flower_app"
PASSES = 7 / 3
BOUNDS = {
    ("mlp-512", "simulation"): 1.15,
    ("mlp-512", "deployment"): 1.15,
    ("mlp", "simulation"): PASSES,
    ("mlp", "deployment"): 1.15,
    ("resnet20", "simulation"): PASSES,
    ("resnet20", "deployment"): PASSES,
}


OTHERS = (
    ("mlp-512", "simulation", "binary_cross_entropy"),
    ("resnet20", "simulation", "cross_entropy"),
    ("resnet20", "deployment", "cross_entropy"),
)


def measure(net: str, where: str, pairs: int, loss: str = "squared_error") -> list[dict[str, Any]]:
    """Rounds of plain and veiled training in turn."""
    from tests.flower.processes import Deployment

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        with Deployment(Path(folder) / "flwr", simulation=where == "simulation") as deployment:
            if where == "deployment":
                for part in range(3):
                    deployment.start_node(part)
            deployment.run(out, app=APP, net=net, loss=loss, pairs=pairs, within=180.0 * (pairs + 3))
        found: list[dict[str, Any]] = json.loads((out / "done.json").read_text())
        return found


def row(net: str, where: str, pairs: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """A line of the table, and whether its bound holds."""
    seconds = {name: statistics.median(pair[name]["seconds"] for pair in pairs) for name in ("plain", "veil")}
    ratios = sorted(pair["veil"]["seconds"] / pair["plain"]["seconds"] for pair in pairs)
    ratio = statistics.median(ratios)
    bound = BOUNDS[net, where]
    last, kept = pairs[-1], ratio <= bound
    sizes = [f"{last[name][way] / 1e6:.3f}" for way in ("down", "up") for name in ("plain", "veil")]
    spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
    times = [f"{seconds['plain']:.2f}", f"{seconds['veil']:.2f}"]
    return [net, where, *times, f"{ratio:.2f}", spread, f"{bound:.2f}", "ok" if kept else "OVER", *sizes], kept


def other_row(net: str, where: str, loss: str, rounds: list[dict[str, Any]]) -> list[str]:
    """A line of the second table."""
    names = ("plain", "veil")
    seconds = [f"{statistics.median(r[name]['seconds'] for r in rounds):.2f}" for name in names]
    ratio = statistics.median(r["veil"]["seconds"] / r["plain"]["seconds"] for r in rounds)
    megabytes = [f"{statistics.median(r[name]['up'] for r in rounds) / 1e6:.3f}" for name in names]
    return [net, where, loss, *seconds, f"{ratio:.2f}", *megabytes]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 if a bound is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description="The veil's cost over Flower.")
    parser.add_argument("--quick", action="store_true", help="three pairs")
    parser.add_argument(
        "--pairs",
        type=int,
        default=10,
        help="pairs of rounds (default 10), six times as many for the MLP in simulation",
    )
    parser.add_argument("--only", choices=("squared", "others"), help="one of the tables")
    parser.add_argument("--threads", type=int, default=1, help="ignored: clients use one")
    arguments = parser.parse_args(argv)
    if not flower.installed():
        print("Flower's simulation is not installed: pip install 'flwr[simulation]==1.41.0'")
        return 0
    pairs = 3 if arguments.quick else arguments.pairs
    found = []
    for net, where in BOUNDS if arguments.only != "others" else ():
        short = where == "simulation" and net.startswith("mlp")  # a tenth of a second each
        found.append(row(net, where, measure(net, where, 6 * pairs if short else pairs)))
    heads = ["net", "where", "plain s", "veil s", "ratio", "from", "bound", ""]
    heads += ["plain MB down", "veil", "plain MB up", "veil"]
    if found:
        print(table(heads, [line for line, _ in found]))
    if arguments.only != "squared":
        lines = [other_row(*case, measure(*case[:2], pairs, case[2])) for case in OTHERS]
        print(table(["net", "where", "loss", "plain s", "veil s", "ratio", "plain MB up", "veil"], lines))
    print(f"MB per client and round; load at the end {os.getloadavg()[0]:.1f};", machine())
    return int(not all(kept for _, kept in found))


if __name__ == "__main__":
    sys.exit(main())
