"""Seconds per round on every engine: one process, Flower's simulation, SuperNodes, FLARE.

    python -m benchmarks.engines [--quick] [--only flower,nvflare] [--nets mlp-8.7k]

Three clients on this machine, each with all of its records in every round: MLPs of 8,700 and 228,480 parameters on
digits (about 480 records each), ResNet20 on 32 images each. Plain and veiled rounds alternate. Processes talk over TLS,
but for the simulations. Goals, for the MLP of 8,700 parameters: FLARE with mTLS at most 100 ms and 50 times faster than
Flower's SuperNodes, veil over plain at most 1.3 on every engine with processes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.in_turn import CLIENTS, make_model, options, records
from benchmarks.timing import machine, table
from fedveil.federation import Federation

APP = Path(__file__).parent / "flower_app"
SMALL = "mlp-8.7k"
NETS = (SMALL, "mlp-228k", "resnet20-32")
MOST_SECONDS = {"nvflare": 0.1}
FASTER, MOST_RATIO = 50.0, 1.3
Pairs = list[dict[str, Any]]
Run = Callable[[str, Path, int], Pairs]


@dataclass(frozen=True)
class Engine:
    """How rounds are run, and how many."""

    start: Callable[[Path], AbstractContextManager[Run]]
    pairs: int
    processes: bool = True


def one_process(folder: Path) -> AbstractContextManager[Run]:
    """`Federation`: no bytes, clients fused."""

    def run(net: str, out: Path, pairs: int) -> Pairs:
        data = [records(net, part) for part in range(CLIENTS)]
        runs = {
            name: Federation(make_model(net), data, name, torch.optim.Adam, loss="squared_error", **options(net))
            for name in ("plain", "veil")
        }
        found: Pairs = []
        for _ in range(pairs + 1):
            pair = {}
            for name, federation in runs.items():
                began = time.perf_counter()
                federation.step()
                pair[name] = {"seconds": time.perf_counter() - began}
            found.append(pair)
        return found[1:]

    return nullcontext(run)


class OnFlower:
    """A SuperLink with SuperNodes, or Flower's simulation."""

    def __init__(self, folder: Path, simulation: bool) -> None:
        from tests.flower.processes import SCRIPT, Deployment

        self.simulation, keys = simulation, folder / "keys"
        if not simulation:
            subprocess.run([SCRIPT, keys, str(CLIENTS)], check=True, capture_output=True)
        self.deployment: Any = Deployment(folder / "flwr", simulation=simulation, tls=None if simulation else keys)
        self.keys = keys

    def __enter__(self) -> Run:
        self.deployment.__enter__()
        for part in () if self.simulation else range(CLIENTS):
            self.deployment.flwr("supernode", "register", self.keys / f"node{part}.pub", "lab")
            self.deployment.start_node(part)
        return self.run

    def run(self, net: str, out: Path, pairs: int) -> Pairs:
        """Submit the app and wait for what it writes."""
        self.deployment.run(out, app=APP, net=net, loss="squared_error", pairs=pairs, within=180.0 * (pairs + 3))
        return written(out)

    def __exit__(self, *_: object) -> None:
        self.deployment.__exit__()


class OnFlare:
    """FLARE's server and sites, or its simulator."""

    def __init__(self, folder: Path, simulator: bool) -> None:
        from tests.nvflare.processes import Flare

        self.deployment: Any = Flare(folder / "flare", sites=CLIENTS, simulator=simulator, packages=("benchmarks",))

    def __enter__(self) -> Run:
        self.deployment.__enter__()
        return self.run

    def run(self, net: str, out: Path, pairs: int) -> Pairs:
        """Submit the job and wait for what it writes."""
        out.mkdir(parents=True)
        config = {"net": net, "loss": "squared_error", "pairs": pairs, "out": str(out)}
        self.deployment.submit("benchmarks.flare_app", config)
        self.deployment.wait(out, 60.0 + 5.0 * pairs)
        return written(out)

    def __exit__(self, *_: object) -> None:
        self.deployment.stop()


def written(out: Path) -> Pairs:
    """What the server of an app wrote."""
    found: Pairs = json.loads((out / "done.json").read_text())
    return found


ENGINES = {
    "one process": Engine(one_process, 60, processes=False),
    "flower simulation": Engine(lambda folder: OnFlower(folder, simulation=True), 30, processes=False),
    "flower": Engine(lambda folder: OnFlower(folder, simulation=False), 6),
    "nvflare simulator": Engine(lambda folder: OnFlare(folder, simulator=True), 60, processes=False),
    "nvflare": Engine(lambda folder: OnFlare(folder, simulator=False), 60),
}


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that this fraction of the values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


@dataclass(frozen=True)
class Row:
    """Rounds of a network on an engine."""

    engine: str
    net: str
    pairs: Pairs

    def median(self, name: str, what: str = "seconds") -> float:
        """Of plain or veiled rounds."""
        return statistics.median(pair[name][what] for pair in self.pairs)

    @property
    def ratio(self) -> float:
        """Veil over plain, the median over pairs."""
        return statistics.median(pair["veil"]["seconds"] / pair["plain"]["seconds"] for pair in self.pairs)

    def cells(self) -> list[str]:
        """Milliseconds: median and 95 % of plain and veil, the slowest client's work; the ratio; kilobytes."""
        times = [
            f"{1e3 * number:.1f}"
            for name in ("plain", "veil")
            for number in (self.median(name), percentile([pair[name]["seconds"] for pair in self.pairs], 0.95))
        ]
        sent = "up" in self.pairs[0]["veil"]
        work = f"{1e3 * self.median('veil', 'work'):.1f}" if sent else "-"
        sizes = [f"{self.median('veil', way) / 1e3:.0f}" if sent else "-" for way in ("down", "up")]
        return [self.engine, self.net, str(len(self.pairs)), *times, f"{self.ratio:.2f}", work, *sizes]


def verdicts(rows: Sequence[Row]) -> list[tuple[str, bool]]:
    """The goals that can be judged, in words, and whether they are reached."""
    small = {row.engine: row for row in rows if row.net == SMALL}
    found = []
    for engine, most in MOST_SECONDS.items():
        if engine in small:
            seconds = max(small[engine].median(name) for name in ("plain", "veil"))
            found.append((f"{engine}: {1e3 * seconds:.0f} ms, at most {1e3 * most:.0f}", seconds <= most))
    if {"flower", "nvflare"} <= small.keys():
        for name in ("plain", "veil"):
            faster = small["flower"].median(name) / small["nvflare"].median(name)
            found.append(
                (f"nvflare over flower, {name}: {faster:.0f} times faster, at least {FASTER:.0f}", faster >= FASTER)
            )
    for engine, row in small.items():
        if ENGINES[engine].processes:
            found.append((f"{engine}: veil over plain {row.ratio:.2f}, at most {MOST_RATIO}", row.ratio <= MOST_RATIO))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 if a goal is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engines", description="Seconds per round, every engine."
    )
    parser.add_argument("--quick", action="store_true", help="a fifth of the rounds")
    parser.add_argument("--only", help=f"engines with commas between them, of {', '.join(ENGINES)}")
    parser.add_argument("--nets", default=",".join(NETS), help=f"networks, of {', '.join(NETS)}")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = []
    for name in arguments.only.split(",") if arguments.only else ENGINES:
        engine = ENGINES[name]
        with tempfile.TemporaryDirectory() as folder, engine.start(Path(folder)) as run:
            for net in arguments.nets.split(","):
                share = (5 if arguments.quick else 1) * (2 if net.startswith("resnet") else 1)
                pairs = max(2, engine.pairs // share)
                rows.append(Row(name, net, run(net, Path(folder) / net, pairs)))
                print("  ".join(rows[-1].cells()), file=sys.stderr, flush=True)
    heads = ["engine", "net", "pairs", "plain ms", "95 %", "veil ms", "95 %", "ratio", "work ms", "kB down", "kB up"]
    print(table(heads, [row.cells() for row in rows]))
    found = verdicts(rows)
    for text, reached in found:
        print("ok  " if reached else "OVER", text)
    print(f"kB per client and veiled round; load at the end {os.getloadavg()[0]:.1f};", machine())
    return int(not all(reached for _, reached in found))


if __name__ == "__main__":
    sys.exit(main())
