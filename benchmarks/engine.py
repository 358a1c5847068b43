"""Rounds per second of the one-process federation: clients fused and apart, plain and veiled.

    python -m benchmarks.engine [--quick] [--threads 2] [--only clients|losses]

MLP 48-50-50-50-1, 10 clients, batch 32 each, fused Adam. Bounds: fused at least 4 times the loop over clients (veiled:
over clients and their passes), veiled at least 0.35 of plain, both at least 20 times Flower's simulation of the same
rounds where that is installed, memory flat over 10,000 rounds.

The veil fuses twice: clients' batches into one, and for a stack of Linear and ReLU each client's passes into one. With
the second kept and only the first undone ("veil, apart") the loop over clients is so fast that the server's work,
which fusion does not change, limits the ratio; it is printed without a bound.

A second table compares losses, all fused: cross-entropy and squared error, plain and veiled. Digits, MLP
64-50-50-50-10, ten clients, batches of 32 and 128 each, after 300 rounds of training. It has no bound.
"""

import argparse
import gc
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from benchmarks import flower
from benchmarks.small import BATCH, CLIENTS, clients_data, new_model
from benchmarks.timing import compare, interleave, machine, table
from fedveil import Federation
from fedveil.data import Data, load, split
from fedveil.defences import Defence, Plain, Veil
from fedveil.models import mlp

PAGE = 4096
APART = "veil, clients and passes apart"
TRAINED, BATCHES = 300, (32, 128)
DECOYS = 2


class Apart(nn.Sequential):
    """Not a stack whose passes `client_step` runs together: each pass is a separate backward."""


def federation(defence: str, fuse: bool, passes_apart: bool = False) -> Federation:
    """The ten clients and their server."""
    model = Apart(*new_model()) if passes_apart else new_model()
    optimizer = partial(torch.optim.Adam, lr=1e-3, fused=True)
    return Federation(model, clients_data(), defence, optimizer, loss="squared_error", batch_size=BATCH, fuse=fuse)


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


def digits_federation(data: Data, defence: Defence, loss: str, batch: int) -> Federation:
    """Ten clients and their server, after some training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = mlp(64, 10, layers=3, hidden=50)
    parts = [(data.train.inputs[rows], data.train.targets[rows]) for rows in split(data, CLIENTS, seed=0)]
    optimizer = partial(torch.optim.Adam, lr=1e-3, fused=True)
    run = Federation(model, parts, defence, optimizer, batch_size=batch, loss=loss)
    run.fit(rounds=TRAINED)
    return run


def losses_table(quick: bool, batch: int) -> None:
    """Print rounds per second by loss, all fused."""
    data = load("digits")
    base, decoys = "plain, squared error", f"veil, cross-entropy, {DECOYS} decoys"
    runs = {
        base: digits_federation(data, Plain(), "squared_error", batch),
        "plain, cross-entropy": digits_federation(data, Plain(), "cross_entropy", batch),
        "veil, squared error": digits_federation(data, Veil(), "squared_error", batch),
        decoys: digits_federation(data, Veil(decoys=DECOYS), "cross_entropy", batch),
    }
    assert all(run.engine.fused for run in runs.values())
    timings = interleave({name: run.step for name, run in runs.items()}, 5 if quick else 15, 10)
    passes = {"veil, squared error": "3", decoys: str(DECOYS + 1)}
    rows = [
        [name, passes.get(name, "1"), f"{1 / summary.seconds:.0f}", f"x{summary.ratio[1]:.2f}"]
        for name, summary in compare(timings, base).items()
    ]
    print(table(["engine, fused", "passes", "rounds/s", f"time over {base}"], rows))
    print(f"batch {batch}; rounds {TRAINED} to {runs[base].round};", timings.kept)


def clients_table(quick: bool) -> bool:
    """Print rounds per second with clients fused and apart; returns whether all bounds are kept."""
    runs = {f"{d}, {'fused' if f else 'apart'}": federation(d, f) for d in ("plain", "veil") for f in (True, False)}
    runs[APART] = federation("veil", False, passes_apart=True)
    timings = interleave({name: run.step for name, run in runs.items()}, 5 if quick else 30, 20)
    found = compare(timings, "plain, fused")
    rows = [[name, f"{1 / summary.seconds:.0f}", f"x{summary.ratio[1]:.2f}"] for name, summary in found.items()]
    speed = {name: 1 / summary.seconds for name, summary in found.items()}
    checks = {
        "plain: fused over apart": (speed["plain, fused"] / speed["plain, apart"], 4.0),
        "veil: fused over clients and passes apart": (speed["veil, fused"] / speed[APART], 4.0),
        "veil: fused over clients apart": (speed["veil, fused"] / speed["veil, apart"], None),
        "fused: veil over plain": (speed["veil, fused"] / speed["plain, fused"], 0.35),
    }
    if flower.installed():
        theirs = flower.rounds_a_second(15 if quick else 40)
        rows.append(["Flower's simulation, plain", f"{theirs:.1f}", f"x{speed['plain, fused'] / theirs:.0f}"])
        checks["plain, fused over Flower"] = (speed["plain, fused"] / theirs, 20.0)
        checks["veil, fused over Flower"] = (speed["veil, fused"] / theirs, 20.0)
    else:
        rows.append(["Flower's simulation", "not installed", ""])
    print(table(["engine", "rounds/s", "time over plain, fused"], rows))
    lines = [
        [name, f"{v:.2f}", "" if b is None else f"{b:g}", "" if b is None else "ok" if v >= b else "UNDER"]
        for name, (v, b) in checks.items()
    ]
    print(table(["ratio", "found", "at least", ""], lines))
    rounds = 1000 if quick else 10_000
    grown = {defence: growth(defence, rounds) for defence in ("plain", "veil")}
    print("memory grown over", rounds, "rounds:", ", ".join(f"{d} {mib:.1f} MiB" for d, mib in grown.items()))
    print(timings.kept)
    return not any(line[3] == "UNDER" for line in lines) and max(grown.values()) <= 20


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 if a bound is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description="Rounds per second.")
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default 2)")
    parser.add_argument("--only", choices=("clients", "losses"), help="one of the tables")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    kept = True
    if arguments.only != "losses":
        kept = clients_table(arguments.quick)
        print(flush=True)
    if arguments.only != "clients":
        for batch in BATCHES:
            losses_table(arguments.quick, batch)
        print(flush=True)
    print(machine())
    return int(not kept)


if __name__ == "__main__":
    sys.exit(main())
