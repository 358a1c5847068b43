"""Train one run in its folder, and continue it from its last checkpoint; print a line per evaluation."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.full import bank, images
from benchmarks.full.tasks import BANK_EVERY, IMAGE_TASKS, Run
from fedveil.data import Data, load
from fedveil.federation import Federation, Probabilities
from fedveil.federation.fitting import Callback
from fedveil.federation.history import History, RoundRecord
from fedveil.federation.results import read_rounds
from fedveil.files import write_atomically

CPU_EVERY = 30.0  # CPU seconds between two updates of the file with their sum
CPU = "cpu.json"


class ProgressLines:
    """A callback that prints a line per evaluation and sums the CPU time of a run over all its processes."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.run, self._path = run, folder / CPU
        self._before = read_cpu_seconds(folder)
        self._started = self._written = time.process_time()

    def __call__(self, record: RoundRecord) -> None:
        """Note the record of a round."""
        now = time.process_time()
        total = self._before + now - self._started
        if record.evaluated or now - self._written >= CPU_EVERY:
            write_atomically(self._path, json.dumps({"cpu_seconds": total}) + "\n")
            self._written = now
        if record.evaluated:
            values = " ".join(f"{name} {value:.5f}" for name, value in record.metrics.items())
            epoch, clock = f"epoch {record.epoch:.0f}/{self.run.epochs}", time.strftime("%H:%M:%S")
            print(f"{clock} {self.run.name} {epoch} {values} lr {record.lr:.4f} cpu {total / 60:.1f} min", flush=True)


def read_cpu_seconds(folder: Path) -> float:
    """Return the CPU time of a run so far, including rounds that were repeated after a kill."""
    path = folder / CPU
    return float(json.loads(path.read_text())["cpu_seconds"]) if path.exists() else 0.0


def build(run: Run, data: Data) -> Federation:
    """Return the federation of a run, before the first round."""
    return images.build(run, IMAGE_TASKS[run.task], data) if run.task in IMAGE_TASKS else bank.build(run, data)


def fit(run: Run, federation: Federation, data: Data, folder: Path, on_round: Sequence[Callback] = ()) -> History:
    """Train to the last epoch; continue from the last checkpoint in the folder, if there is one."""
    with_auc = run.task in IMAGE_TASKS and "auc" in IMAGE_TASKS[run.task].metrics
    return federation.fit(
        run.epochs,
        test=(data.test.inputs, data.test.targets),
        evaluate_every=federation.rounds_per_epoch * (1 if run.task in IMAGE_TASKS else BANK_EVERY),
        folder=folder,
        resume=True,
        metrics={"auc": Probabilities(images.one_against_rest)} if with_auc else None,
        on_round=list(on_round),
    )


def train(run: Run, folder: Path) -> None:
    """Train one run to its last epoch, unless it is complete."""
    data = load(run.task)
    federation = build(run, data)
    if read_rounds(folder) == run.epochs * federation.rounds_per_epoch:
        print(f"{run.name} is complete", flush=True)
        return
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{time.strftime('%H:%M:%S')} {run.name} in {folder}, process {os.getpid()}", flush=True)
    fit(run, federation, data, folder, [ProgressLines(run, folder)])
