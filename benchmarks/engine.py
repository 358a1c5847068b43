"""Rounds a second of the one-machine engine: clients fused and apart, plain and veiled.

    python -m benchmarks.engine [--quick] [--threads 2]

MLP 48-50-50-50-1, 10 clients, batch 32 each, fused Adam. Bounds: fused at least 4 times apart, veiled at least 0.35 of
plain, memory flat over 10,000 rounds.
"""

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.timing import compare, interleave, machine, table
from fedveil import Federation
from fedveil.models import mlp

CLIENTS, BATCH, RECORDS = 10, 32, 3200
PAGE = 4096


def federation(defence: str, fuse: bool) -> Federation:
    """Ten clients with 320 records each."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(RECORDS, 48), torch.randint(0, 2, (RECORDS, 1)).float()
    parts = [(inputs[k::CLIENTS], targets[k::CLIENTS]) for k in range(CLIENTS)]
    model = mlp(48, 1, layers=3, hidden=50)
    return Federation(
        model, parts, defence, lambda p: torch.optim.Adam(p, 1e-3, fused=True), batch_size=BATCH, fuse=fuse
    )


def resident() -> int:
    """Bytes of memory that this process holds; 0 where /proc does not tell."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * PAGE if statm.exists() else 0


def growth(defence: str, rounds: int) -> float:
    """MiB by which memory grows over `rounds` rounds, after a warm-up."""
    run = federation(defence, fuse=True)
    for _ in range(500):
        run.step()
    gc.collect()
    before = resident()
    for _ in range(rounds):
        run.step()
    gc.collect()
    return (resident() - before) / 2**20


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 if a bound is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description="Rounds a second.")
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default 2)")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    runs = {f"{d}, {'fused' if f else 'apart'}": federation(d, f) for d in ("plain", "veil") for f in (True, False)}
    timings = interleave({name: run.step for name, run in runs.items()}, 5 if arguments.quick else 30, 20)
    found = compare(timings, "plain, fused")
    rows = [[name, f"{1 / summary.seconds:.0f}", f"x{summary.ratio[1]:.2f}"] for name, summary in found.items()]
    print(table(["engine", "rounds/s", "time over plain, fused"], rows))
    speed = {name: 1 / summary.seconds for name, summary in found.items()}
    checks = {
        "fused over apart, plain": (speed["plain, fused"] / speed["plain, apart"], 4.0),
        "fused over apart, veil": (speed["veil, fused"] / speed["veil, apart"], 4.0),
        "veil over plain, fused": (speed["veil, fused"] / speed["plain, fused"], 0.35),
    }
    lines = [[name, f"{v:.2f}", f"{b:g}", "ok" if v >= b else "UNDER"] for name, (v, b) in checks.items()]
    print(table(["ratio", "found", "at least", ""], lines))
    rounds = 1000 if arguments.quick else 10_000
    grown = {defence: growth(defence, rounds) for defence in ("plain", "veil")}
    print("memory grown over", rounds, "rounds:", ", ".join(f"{d} {mib:.1f} MiB" for d, mib in grown.items()))
    print(timings.kept, machine(), sep="; ")
    return int(any(line[3] == "UNDER" for line in lines) or max(grown.values()) > 20)


if __name__ == "__main__":
    sys.exit(main())
