"""Measure how many records the server rebuilds at several epsilons, without accuracy, members and copies.

    FEDVEIL_DATA=../shared/data python -m benchmarks.protections.rebuild [--data cifar10-mlp] [--rounds 30]

The attack and the networks are those of `benchmarks.protections.inversion`. Each cell is a JSON file in the folder's
`work`, and a run that was stopped continues.
"""

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.cells import Figures, keep
from benchmarks.protections.inversion import FEW, KNOWN, batch_of, invert_updates
from benchmarks.protections.summary import SERVER_PARTS, server_cells, table
from benchmarks.protections.tasks import CLIENTS, TASKS, Protection, noise_multiplier
from benchmarks.timing import machine

EPSILONS = (None, 8.0, 3.0)
ROWS = [Protection(secure=secure, epsilon=epsilon) for secure in (False, True) for epsilon in EPSILONS]


def describe(name: str, rounds: int, networks: Sequence[str]) -> str:
    """Describe what was measured in a paragraph."""
    task = TASKS[name]
    size = f"the first {task.records:,} training records; " if task.records else ""
    noise = ", ".join(f"{noise_multiplier(name, own):.2f} for epsilon {own:g}" for own in EPSILONS if own is not None)
    return (
        f"{size}{CLIENTS} clients, {task.hidden} hidden units; clip {task.clip:g}, noise {noise}. Of {rounds} rounds "
        f"each, the share in which a rebuilt record comes {KNOWN:g} dB closer to a record that was used than the mean "
        f"record does, with 95 % intervals; for {' or '.join(networks)} networks (the worse). *DP* alone: "
        "the server adds the noise to the sums that it has received. With *secure aggregation*, the clients add it."
    )


def worst(found: Mapping[tuple[Protection, int, str], Figures], own: Protection, count: int) -> list[str]:
    """Return the table's cells for the networks with which the server knows most."""
    known = {phase: cell for (row, number, phase), cell in found.items() if (row, number) == (own, count)}
    phase = max(known, key=lambda one: known[one]["known"])  # type: ignore[arg-type,return-value]
    return server_cells({**known[phase], "network": phase})


def main() -> None:
    """Measure all cells and write a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.protections.rebuild", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--data", default="cifar10-mlp", choices=[name for name, task in TASKS.items() if task.hidden])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--networks", nargs="+", default=["new"], choices=["new", "trained"])
    parser.add_argument("--out", type=Path, default=Path("results/protections"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    name, counts, folder = given.data, (FEW, batch_of(given.data)), given.out / "work"
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[tuple[Protection, int, str], Figures] = {}
    for own in ROWS:
        for count in counts:
            for phase in given.networks:
                measure = partial(invert_updates, name, own, count, phase == "trained", given.rounds)
                label = f"{name}-inversion-{own.slug}-{count}-{phase}"
                found[own, count, phase] = keep(f"{label}-{given.rounds}", measure, folder)
                print(label, found[own, count, phase], flush=True)
    rows = [[own.label, *(cell for count in counts for cell in worst(found, own, count))] for own in ROWS]
    words = "one record per client", f"{counts[1]} records"
    header = ["protection", *(f"{word}: {part}" for word in words for part in SERVER_PARTS)]
    command = f"`python -m benchmarks.protections.rebuild --data {name} --rounds {given.rounds} "
    command += f"--networks {' '.join(given.networks)}`"
    lines = [f"# Records that the server rebuilds: {name}", "", command, "", machine(), ""]
    lines += [describe(name, given.rounds, given.networks), "", *table(header, rows)]
    (given.out / f"rebuild-{name}.md").write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
