"""Local training: accuracy against passes over the records and against bytes, for gradients and for FedAvg.

    FEDVEIL_DATA=folder python -m benchmarks.local [--data digits bank] [--out folder] [--seeds 3]

Five clients with an MLP train on digits and on bank (two classes), with records divided at random or, by class, with a
Dirichlet distribution of 0.5. Gradients: one batch per client and round, Adam on the server. FedAvg: 1 or 5 local
epochs, plain SGD on the clients, and the mean of their models. All methods go through the records equally often, with
the same batch size. For each method and division, the learning rate with the best mean accuracy on the training
records counts. Bytes are those of the messages that one client receives and sends. Finished runs are read from --out.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.protections.training import message_sizes
from benchmarks.timing import machine, table
from fedveil.data import Data
from fedveil.federation.evaluate import metrics, predict
from fedveil.files import write_atomically
from fedveil.plain_json import read_json, to_json
from fedveil.runs.build import build_federation, load_data
from fedveil.runs.settings import Config, Value, configure


@dataclass(frozen=True)
class Task:
    """A data set, the passes over the records after which the model is tested, and an accuracy to reach."""

    values: Mapping[str, Value]
    passes: tuple[int, ...]
    target: float


TASKS = {
    "digits": Task({"data": "digits", "batch_size": 32}, (5, 10, 20, 40), 0.9),
    "bank": Task({"data": "bank", "task": "classification", "batch_size": 128}, (5, 10, 20), 0.9),
}
SPLITS: Mapping[str, Mapping[str, Value]] = {"random": {}, "Dirichlet 0.5": {"split": "dirichlet", "alpha": 0.5}}
METHODS: Mapping[str, tuple[int | None, tuple[float, ...]]] = {
    "gradients": (None, (1e-3, 3e-3, 1e-2)),
    "FedAvg, 1 epoch": (1, (0.1, 0.3, 1.0)),
    "FedAvg, 5 epochs": (5, (0.1, 0.3, 1.0)),
}


def configuration(task: str, split: str, method: str, lr: float, seed: int) -> Config:
    """Return the configuration of one run."""
    epochs, _ = METHODS[method]
    own: dict[str, Value] = {"lr": lr} if epochs is None else {"local_epochs": epochs, "local_lr": lr}
    return configure({**TASKS[task].values, **SPLITS[split], **own, "defence": "plain", "layers": 2, "seed": seed})


def run(config: Config, data: Data, task: Task) -> dict[str, Any]:
    """Train, and return the accuracies by passes, the bytes per pass, and the accuracy on the training records."""
    federation, sizes = build_federation(config, data), message_sizes(build_federation(config, data))
    epochs = config.defence.local_epochs or 1
    federation.fit(task.passes[-1] // epochs, test=(data.test.tensor, data.test.targets))
    tested = [
        (record.epoch * epochs, record.metrics["accuracy"]) for record in federation.history.records if record.evaluated
    ]
    train = metrics(predict(federation.model, data.train.tensor), data.train.targets)["accuracy"]
    return {"tested": tested, "bytes": sum(sizes) * federation.rounds_per_epoch / epochs, "train": train}


def mean(values: Sequence[float], digits: int = 1) -> str:
    """Format the mean and the spread of several seeds."""
    return f"{statistics.mean(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def reached(found: Mapping[str, Any], target: float) -> float | None:
    """Return the passes after which a run first reaches the target."""
    return next((passes for passes, accuracy in found["tested"] if accuracy >= target), None)


def row(task: str, split: str, method: str, runs: Mapping[float, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return a row of the table, for the learning rate with the best accuracy on the training records."""
    own = TASKS[task]
    lr = max(runs, key=lambda rate: statistics.mean(one["train"] for one in runs[rate]))
    at = [[100 * dict(one["tested"])[passes] for one in runs[lr]] for passes in own.passes]
    size = statistics.mean(one["bytes"] for one in runs[lr])
    needed = [reached(one, own.target) for one in runs[lr]]
    least = [passes for passes in needed if passes is not None]
    until = [f"in {len(least)} of {len(needed)} runs", ""]
    if len(least) == len(needed):
        until = [f"{statistics.mean(least):.1f}", f"{statistics.mean(least) * size / 1e6:.2f}"]
    return [split, method, f"{lr:g}", f"{size / 1e3:.0f}", *map(mean, at), *until]


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is not in the folder yet, and print one table per task."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.local", description="Gradients and FedAvg.")
    parser.add_argument("--out", type=Path, default=Path("runs/local"), help="folder of finished runs")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default 3)")
    parser.add_argument("--data", nargs="+", choices=TASKS, default=list(TASKS), help="data sets (default all)")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for task in arguments.data:
        own, found = TASKS[task], []
        for split in SPLITS:
            for method, (_, rates) in METHODS.items():
                runs: dict[float, list[Mapping[str, Any]]] = {rate: [] for rate in rates}
                for rate in rates:
                    for seed in range(arguments.seeds):
                        config = configuration(task, split, method, rate, seed)
                        path = arguments.out / f"{task}-{split}-{method}-{rate:g}-{seed}.json".replace(" ", "_")
                        if not path.exists():
                            write_atomically(path, to_json(run(config, load_data(config), own)))
                            print(path.name, file=sys.stderr, flush=True)
                        runs[rate].append(read_json(path))
                found.append(row(task, split, method, runs))
        header = ["records", "method", "rate", "kB/pass", *(f"% after {n} passes" for n in own.passes)]
        print(f"{task}: {arguments.seeds} seeds, mean (minimum-maximum)\n")
        print(table([*header, f"passes to {own.target:.0%}", "MB to it"], found), end="\n\n", flush=True)
    print(machine())
    return 0


if __name__ == "__main__":
    sys.exit(main())
