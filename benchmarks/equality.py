"""Is a veiled run equal to a plain run? Compared with three rounding baselines (docs/maths.md, 'What "equal" means').

    FEDVEIL_DATA=folder python -m benchmarks.equality bank|cifar10|lesion|losses [--clients 5] [--quick]

bank: the paper's setting (MLP, L in {3, 5, 7}, K in {1, 5, 10}, Adam 1e-3, batch 512, weight decay 5e-4, 20 epochs);
|MSE(veil) - MSE(plain)| at the end against twice the largest baseline, and 1e-3. cifar10, lesion: subsets, ResNet8 and
ResNet20, both norms, 3 epochs; the largest distance between the curves against three times the largest baseline's.
losses: 200 rounds with cross-entropy (digits; 2,000 images of CIFAR-10 with ResNet20, both norms, one client, batch 16)
and binary cross-entropy (bank); the test loss every 20 rounds, judged as the images are.
Floors as in the maths: 1e-4 for an error, one test sample for an accuracy.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor

import torch

from benchmarks.timing import table
from fedveil.data import Data
from fedveil.defences import Defence, Plain, Veil
from fedveil.federation import Federation
from fedveil.runs.build import build_loss, build_model, build_optimizer, client_parts, load_data
from fedveil.runs.settings import Config

BASELINES = 3
RUNS: dict[str, Callable[[], Defence]] = {
    "plain": Plain,
    "veil": lambda: Veil(additive=100.0),
    **{f"baseline {seed}": lambda seed=seed: Plain(rounding=seed) for seed in range(1, BASELINES + 1)},  # type: ignore[misc]
}


def curve(config: Config, data: Data, defence: Defence) -> list[float]:
    """The test metric after each epoch."""
    run = Federation(
        build_model(config, data),
        client_parts(config.data, config.training.seed, data),
        defence,
        build_optimizer(config.training),
        batch_size=config.training.batch_size,
        loss=build_loss(config.training),
        seed=config.training.seed,
    )
    test = data.test.inputs, data.test.targets
    if config.training.loss == "squared_error":
        history = run.fit(config.training.epochs, test=test)
        return [value for name in ("accuracy", "mse") if name in history.names for _, value in history.curve(name)]
    history = run.fit(rounds=config.training.epochs, test=test, evaluate_every=max(1, config.training.epochs // 10))
    return [value for _, value in history.curve("loss")]


def cell(config: Config) -> dict[str, list[float]]:
    """Curves of all runs of a configuration."""
    torch.set_num_threads(1)
    data = load_data(config)
    return {name: curve(config, data, make()) for name, make in RUNS.items()}


def bank_cells(quick: bool) -> list[Config]:
    """Table 1's cells."""
    base = Config().changed(
        data="bank",
        loss="squared_error",
        lr=1e-3,
        batch_size=512,
        weight_decay=5e-4,
        bias=False,
        epochs=2 if quick else 20,
    )
    return [base.changed(layers=layers, clients=k) for layers in (3, 5, 7) for k in (1, 5, 10)]


def image_cells(name: str, clients: int, quick: bool) -> list[Config]:
    """Small and full ResNets with and without norm."""
    sizes = {"cifar10": (5000, 1000), "lesion": (1000, 300)}[name]
    train, test = (sizes[0] // 20, sizes[1] // 10) if quick else sizes
    base = Config().changed(
        data=name, loss="squared_error", train_size=train, test_size=test, clients=clients, lr=1e-3, epochs=3
    )
    nets = [(f"resnet{depth}", norm) for depth in (8, 20) for norm in ("none", "batch")]
    return [base.changed(model=model, norm=norm) for model, norm in nets]


def loss_cells(clients: int, quick: bool) -> list[Config]:
    """Losses other than squared error; `epochs` are rounds here."""
    base = Config().changed(clients=clients, lr=1e-3, epochs=10 if quick else 200, loss="cross_entropy")
    one = base.changed(data="cifar10", train_size=2000, test_size=500, clients=1, batch_size=16)
    return [
        one.changed(model="resnet20", norm="none"),
        one.changed(model="resnet20", norm="batch"),
        base.changed(data="digits"),
        base.changed(data="bank", batch_size=512, loss="binary_cross_entropy"),
    ]


def judge(config: Config, curves: dict[str, list[float]]) -> tuple[list[str], bool]:
    """A row of the table, and whether the bound holds."""
    plain = curves["plain"]
    squared = config.training.loss == "squared_error"
    ends = squared and config.data.name == "bank"
    floor = 1e-4 if ends or not squared else 1 / (config.data.test_size or 1)

    def apart(name: str) -> float:
        return max(abs(a - b) for a, b in list(zip(curves[name], plain, strict=True))[-1 if ends else 0 :])

    baseline = max(apart(f"baseline {seed}") for seed in range(1, BASELINES + 1))
    found, bound = apart("veil"), (2 if ends else 3) * max(baseline, floor)
    kept = found <= bound and (not ends or found < 1e-3)
    net = f"L={config.model.layers}" if ends else f"{config.model.name}, norm {config.model.norm}"
    net = net if squared else f"{config.data.name}, {net if config.model.name != 'mlp' else 'mlp'}"
    figures = [f"{plain[-1]:.5f}", f"{curves['veil'][-1]:.5f}", f"{found:.1e}", f"{baseline:.1e}", f"{bound:.1e}"]
    return [net, str(config.data.clients), *figures, "ok" if kept else "OVER"], kept


def main(argv: Sequence[str] | None = None) -> int:
    """Run a table; 1 if a bound is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.equality", description="Veiled against plain runs.")
    parser.add_argument("data", choices=("bank", "cifar10", "lesion", "losses"))
    parser.add_argument("--clients", type=int, default=5, help="for images")
    parser.add_argument("--quick", action="store_true", help="small data, few epochs")
    options = parser.parse_args(argv)
    if options.data == "bank":
        cells = bank_cells(options.quick)
    elif options.data == "losses":
        cells = loss_cells(options.clients, options.quick)
    else:
        cells = image_cells(options.data, options.clients, options.quick)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = [judge(config, curves) for config, curves in zip(cells, pool.map(cell, cells), strict=True)]
    header = ["network", "K", "plain", "veil", "apart", "baselines apart", "bound", ""]
    print(table(header, [row for row, _ in found]))
    return int(not all(kept for _, kept in found))


if __name__ == "__main__":
    sys.exit(main())
