"""The cost in accuracy of a guarantee for each record: five clients, several seeds and budgets.

    FEDVEIL_DATA=../shared/data python -m benchmarks.budgets [--data digits bank cifar10] [--seeds 5] [--budgets 3 8]

Plain training with `Privacy(unit="record")`, noise by the server, delta 1e-5: digits with an MLP 64-100-10, bank with
63-50-1 and binary cross-entropy, CIFAR-10 (50,000 images) with a linear model on normalised scattering coefficients,
which are fixed beforehand (`benchmarks.scattering`). Rate, rounds, clip and learning rate of digits and bank were
chosen by looking at such runs, those of CIFAR-10 are published ones; such a choice is not covered by epsilon. Mean over
seeds, with Student's 95 % interval; a seed decides the initial model and which client has which records. The last row
of digits and bank is the guarantee for clients with the same budget.
"""

import argparse
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from scipy import stats
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR

from benchmarks.scattering import features
from benchmarks.timing import machine, table
from fedveil import Federation, Privacy
from fedveil.data import Data, load, split
from fedveil.models import mlp

CLIENTS = 5


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
    optimizer: Callable[..., torch.optim.Optimizer]


TASKS = {
    "digits": Task(10, 100, "cross_entropy", "accuracy", 0.5, 150, 0.5, partial(Adam, lr=0.02)),
    "bank": Task(1, 50, "binary_cross_entropy", "auc", 0.05, 600, 1.0, partial(Adam, lr=0.01)),
    # 60 epochs in samples of 8,192; rate, clip and optimizer as in Tramèr and Boneh (arXiv 2011.11660)
    "cifar10": Task(10, 0, "cross_entropy", "accuracy", 0.16384, 366, 0.1, partial(SGD, lr=4.0, momentum=0.9)),
}


def build_model(task: Task, inputs: int) -> nn.Module:
    """Return an MLP with one hidden layer, or a linear model whose values are 0."""
    if task.hidden:
        return mlp(inputs, task.outputs, hidden=task.hidden, layers=1)
    model = nn.Sequential(nn.Linear(inputs, task.outputs))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


@cache
def records(name: str) -> tuple[Data, Tensor, Tensor]:
    """Return a data set, and the inputs for training and for testing."""
    data = load(name)
    if name != "cifar10":
        return data, data.train.inputs, data.test.inputs
    return data, features(data.train.tensor), features(data.test.tensor)


def run(name: str, privacy: Privacy | None, seed: int) -> float:
    """Train once; return the metric of the last model on the test records."""
    task, (data, inputs, test_inputs) = TASKS[name], records(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_model(task, inputs.shape[1])
    parts = [(inputs[rows], data.train.targets[rows]) for rows in split(data, CLIENTS, seed=seed)]
    federation = Federation(
        model,
        parts,
        "plain",
        task.optimizer,
        loss=task.loss,
        schedule=partial(CosineAnnealingLR, T_max=task.rounds),
        schedule_every="round",
        batch_size=max(1, round(task.rate * len(parts[0][1]))),
        privacy=privacy,
        seed=seed,
    )
    test = test_inputs, data.test.targets
    history = federation.fit(rounds=task.rounds, test=test, evaluate_every=task.rounds)
    return history.metrics[task.metric]


def main() -> None:
    """Train all and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", nargs="+", default=["digits", "bank"], choices=list(TASKS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.0, 8.0, 3.0, 1.0], help="0: no privacy")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    rows = []
    for name in given.data:
        task = TASKS[name]
        own = {"rounds": task.rounds, "clip": task.clip}
        settings = {
            f"record, {budget:g}" if budget else "none": (
                Privacy(epsilon=budget, rate=task.rate, **own) if budget else None
            )
            for budget in given.budgets
        }
        if name != "cifar10":
            settings["client, 8"] = Privacy(epsilon=8.0, unit="client", **own)
        for label, privacy in settings.items():
            found = [run(name, privacy, seed) for seed in range(given.seeds)]
            mean = statistics.fmean(found)
            spread = math.nan
            if len(found) > 1:
                spread = stats.t.ppf(0.975, len(found) - 1) * statistics.stdev(found) / len(found) ** 0.5
            rows.append([name, label, task.metric, f"{mean:.4f} ± {spread:.4f}", f"{min(found):.4f}"])
            print(*rows[-1], flush=True)
    print(table(["data", "unit, epsilon", "metric", "mean ± 95 %", "worst seed"], rows))


if __name__ == "__main__":
    main()
