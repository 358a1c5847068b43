"""The cost in accuracy of a guarantee for each record: five clients, five seeds, several budgets.

    FEDVEIL_DATA=../shared/data python -m benchmarks.budgets [--data digits bank] [--seeds 5]

Plain training with `Privacy(unit="record")`, noise by the server, delta 1e-5; digits with an MLP 64-100-10, bank with
63-50-1 and binary cross-entropy. Rate, rounds, clip and learning rate were chosen by looking at such runs; that choice
is not covered by epsilon. Mean over seeds, with Student's 95 % interval; a seed decides the initial model and which
client has which records. The last row of each is the guarantee for clients with the same budget.
"""

import argparse
import statistics
from dataclasses import dataclass
from functools import partial

import torch
from scipy import stats
from torch.optim.lr_scheduler import CosineAnnealingLR

from benchmarks.timing import machine, table
from fedveil import Federation, Privacy
from fedveil.data import load, split
from fedveil.models import mlp

CLIENTS = 5
BUDGETS = (None, 8.0, 3.0, 1.0)


@dataclass(frozen=True)
class Task:
    """A data set and how it is trained."""

    outputs: int
    hidden: int
    loss: str
    metric: str
    rate: float
    rounds: int
    clip: float
    lr: float


TASKS = {
    "digits": Task(10, 100, "cross_entropy", "accuracy", 0.5, 150, 0.5, 0.02),
    "bank": Task(1, 50, "binary_cross_entropy", "auc", 0.05, 600, 1.0, 0.01),
}


def run(name: str, privacy: Privacy | None, seed: int) -> float:
    """Train once; return the metric of the last model on the test records."""
    task, data = TASKS[name], load(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = mlp(data.train.inputs.shape[1], task.outputs, hidden=task.hidden, layers=1)
    parts = [(data.train.inputs[rows], data.train.targets[rows]) for rows in split(data, CLIENTS, seed=seed)]
    federation = Federation(
        model,
        parts,
        "plain",
        partial(torch.optim.Adam, lr=task.lr),
        loss=task.loss,
        schedule=partial(CosineAnnealingLR, T_max=task.rounds),
        schedule_every="round",
        batch_size=max(1, round(task.rate * len(parts[0][1]))),
        privacy=privacy,
        seed=seed,
    )
    test = data.test.inputs, data.test.targets
    history = federation.fit(rounds=task.rounds, test=test, evaluate_every=task.rounds)
    return history.metrics[task.metric]


def main() -> None:
    """Train all and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    rows = []
    for name in given.data:
        task = TASKS[name]
        own = {"rounds": task.rounds, "clip": task.clip}
        settings = {
            "none" if budget is None else f"record, {budget:g}": (
                None if budget is None else Privacy(epsilon=budget, rate=task.rate, **own)
            )
            for budget in BUDGETS
        }
        settings["client, 8"] = Privacy(epsilon=8.0, unit="client", **own)
        for label, privacy in settings.items():
            found = [run(name, privacy, seed) for seed in range(given.seeds)]
            mean = statistics.fmean(found)
            half = stats.t.ppf(0.975, len(found) - 1) * statistics.stdev(found) / len(found) ** 0.5
            rows.append([name, label, task.metric, f"{mean:.4f} ± {half:.4f}", f"{min(found):.4f}"])
            print(*rows[-1], flush=True)
    print(table(["data", "unit, epsilon", "metric", "mean ± 95 %", "worst seed"], rows))


if __name__ == "__main__":
    main()
