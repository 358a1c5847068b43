"""Measure what each protection costs, and what each attacker gets in spite of it.

    FEDVEIL_DATA=../shared/data python -m benchmarks.protections [--data digits bank cifar10-mlp] [--seeds 5]

Five clients, an MLP with one hidden layer, Adam; no protection, veil, secure aggregation, differential privacy per
record at epsilon 8, 3 and 1 (delta 1e-5), and combinations (at epsilon 3). Each cell is a JSON file in the folder's
`work`, and a run that was stopped continues. At the end `results.json`, `results.md` and the chart are written. One
core.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.cells import Figures, keep
from benchmarks.protections import inversion, members, training
from benchmarks.protections.chart import draw
from benchmarks.protections.summary import summarise, write_tables
from benchmarks.protections.tasks import EPSILONS, PROTECTIONS, TASKS
from benchmarks.timing import machine

FIRST = 3  # seeds that are measured before everything else
MLPS = [name for name, task in TASKS.items() if task.hidden]  # the attacks use their first layer
Cell = tuple[str, Callable[[], Figures]]


def cells(name: str, seeds: int, folder: Path) -> Iterator[Cell]:
    """Yield all cells of a data set in order; those for members need the targets before them."""
    yield f"{name}-cost", partial(training.measure_cost, name)
    yield from training_cells(name, range(min(seeds, FIRST)))
    for epsilon in EPSILONS:
        for number in range(members.TARGETS):
            label = f"{name}-target-{epsilon or 0:g}-{number}"
            yield label, partial(members.train_target, name, epsilon, number, folder)
        for view in (members.MODEL, members.VEILED) if epsilon is None else (members.MODEL,):
            label = f"{name}-members-{epsilon or 0:g}-{view}"
            yield label, partial(members.infer_members, name, epsilon, view, folder)
    for own in PROTECTIONS:
        if own.veil:
            continue  # the server removes its own noise
        for count in (inversion.FEW, inversion.batch_of(name)):
            for trained in (False, True):
                label = f"{name}-inversion-{own.slug}-{count}-{'trained' if trained else 'new'}"
                yield label, partial(inversion.invert_updates, name, own, count, trained)


def training_cells(name: str, seeds: range) -> Iterator[Cell]:
    """Yield the cells of accuracy, and of a client's copy under a veil."""
    for seed in seeds:
        for own in PROTECTIONS:
            yield f"{name}-accuracy-{own.slug}-{seed}", partial(training.measure_accuracy, name, own, seed)
            if own.veil and not own.secure:
                yield f"{name}-copy-{own.slug}-{seed}", partial(training.measure_copy, name, own, seed)


def main() -> None:
    """Measure all cells and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.protections", description=__doc__.partition("\n")[0])
    parser.add_argument("--data", nargs="+", default=["digits", "bank"], choices=MLPS)
    parser.add_argument("--seeds", type=int, default=5, help="of accuracy and of a client's copy (default 5)")
    parser.add_argument("--out", type=Path, default=Path("results/protections"))
    parser.add_argument("--cells", nargs="+", help="measure and print only cells whose names contain one of these")
    parser.add_argument("--chart", type=Path, default=Path("docs/images/protections.svg"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    folder = given.out / "work"
    folder.mkdir(parents=True, exist_ok=True)
    seeds = {name: min(given.seeds, TASKS[name].most_seeds) for name in given.data}
    every = [cell for name, own in seeds.items() for cell in cells(name, own, folder)]
    every += [cell for name, own in seeds.items() for cell in training_cells(name, range(FIRST, own))]
    every = [cell for cell in every if not given.cells or any(word in cell[0] for word in given.cells)]
    found: dict[str, Figures] = {}
    for number, cell in enumerate(every, start=1):
        found[cell[0]] = keep(*cell, folder)
        print(f"{number}/{len(every)} {cell[0]}: {found[cell[0]]['seconds']} s", flush=True)
    if given.cells:
        print(json.dumps({label: own for label, own in found.items() if "-target-" not in label}, indent=1))
        return
    results = summarise(found, seeds, machine())
    (given.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (given.out / "results.md").write_text(write_tables(results))
    given.chart.write_text(draw(results))


if __name__ == "__main__":
    main()
