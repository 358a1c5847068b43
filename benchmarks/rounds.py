"""How few rounds are enough for bank: whole-shard gradients under one veil, against the paper's small batches.

    FEDVEIL_DATA=folder python -m benchmarks.rounds [--quick] [--deployed 50]

K = 5, MLP with three hidden layers of 50, no biases. Reference: batches of 512, Adam 1e-3, 20 epochs (260 rounds),
fused in one process. Few rounds: every client's whole shard in each round, Adam 1e-2 with betas (0.9, 0.99), cosine to
0 over the run: what examples/flower_app does by default. Bound: 150 rounds or fewer within 0.003 of the reference's
test MSE. --choose prints the validation error of other learning rates. --deployed runs examples/flower_app as it is,
veiled, on a SuperLink and five SuperNodes on this machine, for this number of rounds.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.timing import machine, table
from fedveil.data import Data, DataPart
from fedveil.federation import Federation
from fedveil.runs.build import build_model, build_optimizer, client_parts, load_data
from fedveil.runs.settings import Config

BASE = Config().changed(
    data="bank", loss="squared_error", clients=5, bias=False, lr=1e-3, weight_decay=5e-4, batch_size=512, epochs=20
)
EXAMPLE = Path(__file__).parents[1] / "examples" / "flower_app"
ROUNDS, RATES, BOUND = (10, 20, 30, 50, 80, 100, 150), (3e-3, 5e-3, 1e-2, 2e-2), 0.003


def score(run: Federation, part: DataPart) -> float:
    """Mean squared error."""
    with torch.no_grad():
        return float((run.model(part.inputs) - part.targets).square().mean())


def reference(data: Data) -> Federation:
    """The paper's setting."""
    run = Federation(
        build_model(BASE, data),
        client_parts(BASE.data, 0, data),
        "veil",
        build_optimizer(BASE.training),
        batch_size=512,
    )
    run.fit(BASE.training.epochs)
    return run


def few(data: Data, rounds: int, lr: float = 1e-2, defence: str = "veil") -> Federation:
    """Whole shards and a large-batch schedule."""
    run = Federation(
        build_model(BASE, data),
        client_parts(BASE.data, 0, data),
        defence,
        lambda p: torch.optim.Adam(p, lr, betas=(0.9, 0.99), weight_decay=BASE.training.weight_decay),
        schedule=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, rounds),
        batch_size=8192,
        whole_shard=True,
    )
    run.fit(rounds=rounds)
    return run


def deployed(path: str | None, rounds: int) -> tuple[float, float]:
    """Test MSE of the example app on real processes, and seconds per round."""
    from tests.flower.processes import Deployment

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        with Deployment(Path(folder) / "flwr") as deployment:
            for part in range(BASE.data.clients):
                deployment.start_node(part, parts=BASE.data.clients, more=f"cache='{folder}/node{part}'")
            places = {"path": str(Path(path).resolve())} if path else {}
            counts = {"rounds": rounds, "wait_for": BASE.data.clients, "min_answers": BASE.data.clients}
            deployment.run(out, app=EXAMPLE, wait=False, timeout=600.0, **counts, **places)
            deployment.wait(out, 120.0 * rounds, "summary.json")
        summary = json.loads((out / "summary.json").read_text())
        return summary["mse"], summary["seconds"] / rounds


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 if no line of at most 150 rounds is within the bound."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rounds", description="Rounds against accuracy.")
    parser.add_argument("--quick", action="store_true", help="up to 50 rounds")
    parser.add_argument("--choose", action="store_true", help="validation errors of some learning rates")
    parser.add_argument("--deployed", type=int, metavar="ROUNDS", help="on real processes, which takes a while")
    parser.add_argument("--path", help="bank-additional-full.csv, or a folder that holds it")
    arguments = parser.parse_args(argv)
    data = load_data(BASE.changed(path=arguments.path))
    assert data.validation is not None
    counts = [n for n in ROUNDS if n <= (50 if arguments.quick else 150)]
    if arguments.choose:
        rows = [[str(n), *[f"{score(few(data, n, lr, 'plain'), data.validation):.5f}" for lr in RATES]] for n in counts]
        print(table(["rounds", *[f"validation MSE, Adam {lr:g}" for lr in RATES]], rows))
        return 0
    paper = reference(data)
    aim, found, rows = score(paper, data.test), [], []
    rows.append(["batches of 512", str(paper.round), f"{aim:.5f}", "", ""])
    for rounds in counts:
        mse = score(few(data, rounds), data.test)
        found.append(mse - aim <= BOUND)
        rows.append(["whole shards", str(rounds), f"{mse:.5f}", f"{mse - aim:+.5f}", "ok" if found[-1] else "not yet"])
    if arguments.deployed:
        mse, seconds = deployed(arguments.path, arguments.deployed)
        found.append(mse - aim <= BOUND)
        verdict = "ok" if found[-1] else "not yet"
        rows.append(["deployed", str(arguments.deployed), f"{mse:.5f}", f"{mse - aim:+.5f}", verdict])
        print(f"deployed: {seconds:.1f} s per round, load at the end {os.getloadavg()[0]:.1f}")
    print(table(["gradients", "rounds", "test MSE", "above", f"within {BOUND}"], rows))
    print(machine())
    return int(not any(found) or (bool(arguments.deployed) and not found[-1]))


if __name__ == "__main__":
    sys.exit(main())
