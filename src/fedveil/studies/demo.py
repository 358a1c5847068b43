"""`make demo`: plain and veiled training of digits from the same start, beside what rounding alone does."""

import copy
import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedveil.data import Data, load, split
from fedveil.defences import Aggregate, Defence, Plain, Veil
from fedveil.federation import Federation
from fedveil.graph.inputs import Inputs
from fedveil.models import mlp
from fedveil.report import Facts, Page, Table, Text, write
from fedveil.runs.page import PROTECTION, client_models, curve_sections, scores, view_sections
from fedveil.scheme import Broadcast, Loss

CLIENTS, EPOCHS, NOISE, HIDDEN = 5, 60, 100.0, 50
MEASURED = (
    "Measured in every round against plain autograd on the true model: the worst parameter. A peak is a round in which "
    "rounding moved a ReLU across 0, as it does between any two plain runs."
)


class Shows(Protocol):
    """Something that shows a round's record."""

    def show(self, record: dict[str, Any]) -> None:
        """Take a round's record in."""


Opens = Callable[[int, str], AbstractContextManager[Shows]]


def active(model: nn.Module, inputs: Tensor) -> list[Tensor]:
    """For each ReLU and sample the number of active units, which no factor and no permutation changes."""
    counts = []
    for module in model:  # type: ignore[attr-defined]
        inputs = module(inputs)
        if isinstance(module, nn.ReLU):
            counts.append((inputs > 0).sum(1))
    return counts


class Watched(Veil):
    """A veil whose every recovered gradient is compared with plain autograd on the true model."""

    def __init__(self, additive: float) -> None:
        super().__init__(additive=additive)
        self.errors: list[float] = []
        self.flips = 0
        self._plain = Plain()
        self._truth: dict[str, Tensor] = {}
        self._flipped = False

    def prepare(self, model: nn.Module, example: Inputs, loss: Loss) -> None:
        """As the veil does."""
        super().prepare(model, example, loss)
        self._plain.prepare(model, example, loss)

    def client_step(
        self,
        model: nn.Module,
        broadcast: Broadcast,
        inputs: Inputs,
        targets: Tensor,
        weights: Tensor | None = None,
        client: int = 0,
    ) -> Any:
        """As the veil does; the truth is computed beside it."""
        assert isinstance(inputs, Tensor)  # digits
        self._truth = self._plain.client_step(model, model, inputs, targets, weights).gradients
        with torch.no_grad():
            sent = self.client_view(model, broadcast)
            pairs = zip(active(model, inputs), active(sent, inputs), strict=True)
            self._flipped = any(bool((a != b).any()) for a, b in pairs)
        return super().client_step(model, broadcast, inputs, targets, weights)

    def aggregate(self, updates: Any, weights: Any) -> Aggregate:
        """As the veil does; rounds in which rounding moved a ReLU across 0 are counted apart."""
        result = super().aggregate(updates, weights)
        error = max(float((result.gradients[name] - g).norm() / g.norm()) for name, g in self._truth.items())
        self.flips += self._flipped
        if not self._flipped:
            self.errors.append(error)
        return dataclasses.replace(result, error=error)


def federation(start: nn.Module, data: Data, defence: Defence) -> Federation:
    """Five clients, Adam at the server."""
    rows = split(data, CLIENTS, seed=0)
    parts = [(data.train.tensor[r], data.train.targets[r]) for r in rows]
    return Federation(copy.deepcopy(start), parts, defence, lambda p: torch.optim.Adam(p, 1e-3), loss="cross_entropy")


def run_comparison(folder: Path, opens: Opens) -> Iterator[str]:
    """Run the demo; yields the lines it prints."""
    data = load("digits")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        start = mlp(data.train.tensor.shape[1], data.outputs, hidden=HIDDEN)
    watched = Watched(NOISE)
    runs = {
        "plain": federation(start, data, Plain()),
        "veiled": federation(start, data, watched),
        "rounding control": federation(start, data, Plain(rounding=1)),
    }
    seconds: dict[str, str] = {}
    for name, run in runs.items():
        began = time.perf_counter()
        with opens(EPOCHS, f"{name:<16}") as progress:
            run.fit(EPOCHS, test=(data.test.inputs, data.test.targets), on_round=progress.show)
        checked = " with every gradient checked" if name == "veiled" else ""
        seconds[name] = f"{time.perf_counter() - began:.1f} s{checked}"
    views = client_models(runs["veiled"])
    seen = {view: found["accuracy"] for view, found in scores(views, data).items()}
    rows = [[name, f"{run.history.last['accuracy']:.1%}", seconds[name]] for name, run in runs.items()]
    rows += [[view, f"{accuracy:.1%}", ""] for view, accuracy in list(seen.items())[1:]]
    worst = max(watched.errors)
    exact = f"largest relative error of a recovered gradient: {worst:.0e}"
    counted = f"{watched.flips} round{'s' if watched.flips > 1 else ''}"
    flips = f" (but for {counted} in which rounding moved a ReLU across 0)" if watched.flips else ""
    rounds, records = runs["veiled"].round, len(data.train.targets)
    yield f"digits, {records} records, {CLIENTS} clients, {rounds} rounds, noise {NOISE:g}"
    yield f"\n{'test accuracy':<34}"
    yield from (f"  {name:<32} {accuracy:>7}  {cost}".rstrip() for name, accuracy, cost in rows)
    yield f"\n{exact}{flips}"
    yield "the centred model is what a client gets that thinks: no guarantee (docs/threat-model.md)"
    histories = {name: run.history for name, run in runs.items()}
    sections = [
        Table("Result", ["model", "test accuracy", "time"], rows, exact + flips + "."),
        *curve_sections(histories, MEASURED),
        *view_sections(views, data),
        Text("What is and is not protected", PROTECTION),
        Facts(
            "Configuration", {"clients": str(CLIENTS), "epochs": str(EPOCHS), "additive noise": str(NOISE), "m": "10"}
        ),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    lead = f"Veiled and plain training end at {rows[1][1]} and {rows[0][1]}; a client's model as sent at {rows[3][1]}."
    yield f"report: {write(Page('Fedveil demo', lead, sections, 'make demo'), folder / 'report.html')}"
