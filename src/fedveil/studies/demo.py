"""`make demo`: plain and veiled training of digits from the same start, beside what rounding alone does."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fedveil.attacks.veil import remove_noise
from fedveil.data import load, split
from fedveil.defences import Plain, Samples, Veil
from fedveil.defences.plain import PlainClient
from fedveil.defences.veil import VeilClient, VeilRound, VeilServer
from fedveil.federation import Federation, History
from fedveil.federation.server import Record
from fedveil.graph.inputs import Inputs
from fedveil.models import mlp
from fedveil.progress import Progress
from fedveil.report import Beside, Facts, Matrix, Text, count
from fedveil.runs.page import NO_DATA, PROTECTION, client_models, confusions, curve_sections, scores
from fedveil.scheme import Aggregate, Broadcast, Loss, Perturbation, Update, VeilSession
from fedveil.studies.federations import round_progress
from fedveil.studies.jobs import Done, Job, Result
from fedveil.studies.observation import observe
from fedveil.studies.study import JobGraph, Shown, Study

CLIENTS, NOISE, HIDDEN, RATE, BATCH, LOSS = 5, 100.0, 50, 1e-3, 32, "cross_entropy"
MEASURED = (
    "Measured in every round against plain autograd on the true model: the worst parameter. The error is larger in "
    "rounds in which rounding switched a ReLU, as it is between any two plain runs."
)


@dataclass(frozen=True)
class Demo:
    """Settings of the demo."""

    epochs: int = 60


@dataclass(frozen=True)
class DemoRun(Result):
    """One way to train.

    Attributes:
        records: records of the rounds.
        seconds: time of all rounds except the first, in which the first run of a process also loads code.
        train_size: number of training records.
        classes: names of the classes.
        views: test accuracy of the server's model and of the models that a client has.
        matrices: confusion matrices of the first two of them.
        worst: largest relative error of a recovered gradient, except in rounds in which rounding switched a ReLU.
        flips: number of those rounds.
    """

    records: list[Record]
    seconds: float
    train_size: int
    classes: list[str]
    views: dict[str, float]
    matrices: dict[str, list[list[int]]]
    worst: float | None = None
    flips: int = 0


def count_active(model: nn.Module, inputs: Tensor) -> list[Tensor]:
    """Count the active units of each ReLU and sample, which neither factors nor permutations change."""
    counts = []
    for module in model:  # type: ignore[attr-defined]
        inputs = module(inputs)
        if isinstance(module, nn.ReLU):
            counts.append((inputs > 0).sum(1))
    return counts


class CheckedVeil(Veil):
    """A veil whose every recovered gradient is compared with plain autograd on the true model."""

    def __init__(self, additive: float) -> None:
        super().__init__(additive=additive)
        self.errors: list[float] = []
        self.flips = 0
        self.truth: Mapping[str, Tensor] = {}
        self.flipped = False

    def server(self, model: nn.Module, example: Inputs, loss: Loss) -> "CheckedServer":
        """Prepare a server whose rounds are compared."""
        return CheckedServer(super().server(model, example, loss).session, self)

    def client(self, model: nn.Module, example: Inputs, loss: Loss) -> "CheckedClient":
        """Prepare a client that also computes the true gradient."""
        return CheckedClient(model, PlainClient(model, loss), self)


class CheckedClient(VeilClient):
    """Computes the true gradient beside the perturbed one."""

    def __init__(self, model: nn.Module, plain: PlainClient, checked: CheckedVeil) -> None:
        super().__init__(model)
        self._true, self._plain, self._checked = model, plain, checked

    def step(self, broadcast: Broadcast, samples: Samples, client: int = 0) -> Update:
        """Compute both gradients, and note whether rounding moved a ReLU across 0."""
        assert isinstance(samples.inputs, Tensor)  # digits
        self._checked.truth = self._plain.step(self._true, samples).gradients
        with torch.no_grad():
            sent = self._checked.client_view(self._true, broadcast)
            pairs = zip(count_active(self._true, samples.inputs), count_active(sent, samples.inputs), strict=True)
            self._checked.flipped = any(bool((a != b).any()) for a, b in pairs)
        return super().step(broadcast, samples, client)


class CheckedServer(VeilServer):
    """Starts rounds that are compared."""

    def __init__(self, session: VeilSession, checked: CheckedVeil) -> None:
        super().__init__(session)
        self._checked = checked

    def start_round(self, model: nn.Module, members: Sequence[int] | None = None) -> "CheckedRound":
        """Perturb the model with new noise."""
        return CheckedRound(self.session.perturb(model), self._checked)


class CheckedRound(VeilRound):
    """Compares the recovered gradient with the true one."""

    def __init__(self, perturbation: Perturbation, checked: CheckedVeil) -> None:
        super().__init__(perturbation)
        self._checked = checked

    def recover(self, updates: Sequence[Update], weights: Sequence[float]) -> Aggregate:
        """Recover the gradient; rounds in which rounding moved a ReLU across 0 are counted separately."""
        result, checked = super().recover(updates, weights), self._checked
        error = max(float((result.gradients[name] - g).norm() / g.norm()) for name, g in checked.truth.items())
        checked.flips += checked.flipped
        if not checked.flipped:
            checked.errors.append(error)
        return dataclasses.replace(result, error=error)


def client_views(federation: Federation) -> dict[str, nn.Module]:
    """Return the server's model, as received by a client, and as recovered by a client without data."""
    views = {name: copy.deepcopy(view) for name, view in client_models(federation).items()}  # before one more round
    return {**views, f"two broadcasts{NO_DATA}": remove_noise(observe(federation, rounds=2)).model}


@dataclass(frozen=True)
class TrainDigits:
    """Train digits in one of three ways."""

    kind: str
    epochs: int

    def __call__(self, progress: Progress, done: Done) -> DemoRun:
        """Train, and measure the model as a client sees it."""
        data = load("digits")
        veil = CheckedVeil(NOISE) if self.kind == "veiled" else None
        defence = veil or Plain(rounding=1 if self.kind == "rounding baseline" else None)
        parts = [(data.train.tensor[rows], data.train.targets[rows]) for rows in split(data, CLIENTS, seed=0)]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            start = mlp(data.train.tensor.shape[1], data.outputs, hidden=HIDDEN)
        run = Federation(start, parts, defence, lambda p: torch.optim.Adam(p, RATE), batch_size=BATCH, loss=LOSS)
        test = data.test.inputs, data.test.targets
        run.fit(self.epochs, test=test, on_round=round_progress(self.epochs, progress))
        records = list(run.history.records)
        seconds = records[-1]["seconds"] - records[0]["seconds"]
        found = DemoRun(records, seconds, len(data.train.targets), list(data.classes), {}, {})
        if veil is None:
            return found
        views = client_views(run)
        return dataclasses.replace(
            found,
            views={name: metrics["accuracy"] for name, metrics in scores(views, data).items()},
            matrices=confusions(views, data),
            worst=max(veil.errors),
            flips=veil.flips,
        )


def verdict(plain: float, views: dict[str, float]) -> str:
    """Return the accuracy of plain training, of the veiled model, and of the models that clients have."""
    server, received, *others = views
    best = max(others, key=views.__getitem__)
    own, bare, sees, most = (f"{100 * x:.1f} %" for x in (views[server], plain, views[received], views[best]))
    return (
        f"Test accuracy: veiled training {own}, plain training {bare}, a client's copy of the model {sees} as received "
        f"and {most} after an attack without data ({best.removesuffix(NO_DATA)})."
    )


Runs = dict[str, DemoRun]


class DemoStudy(Study[Demo, Runs]):
    """Plain training, veiled training, and plain training with one more rounding error."""

    name = "demo"
    summary = "train digits with five clients, plain and veiled, and compare"

    def graph(self, asked: Demo, folder: Path) -> JobGraph[Runs]:
        """Return a job for each way; a demo that fails is an error."""
        kinds = ("plain", "veiled", "rounding baseline")
        jobs = {kind: Job(kind.replace(" ", "-"), TrainDigits(kind, asked.epochs), DemoRun) for kind in kinds}
        return JobGraph(list(jobs.values()), lambda done: {kind: done.require(job) for kind, job in jobs.items()})

    def present(self, asked: Demo, results: Runs) -> Shown:
        """Show two confusion matrices, accuracies, curves and settings."""
        veiled, rows = results["veiled"], []
        histories = {name: History(run.records) for name, run in results.items()}
        for name, run in results.items():
            checked = " with every gradient checked" if run.worst is not None else ""
            rows.append([name, f"{histories[name].last['accuracy']:.1%}", f"{run.seconds:.1f} s{checked}"])
        rows += [[view, f"{accuracy:.1%}", ""] for view, accuracy in list(veiled.views.items())[1:]]
        exact = f"Largest relative error of a recovered gradient: {veiled.worst:.0e}"
        if veiled.flips:
            exact += f" (except in {count(veiled.flips, 'round')} in which rounding switched a ReLU)"
        matrices = [Matrix(view, veiled.classes, counts) for view, counts in veiled.matrices.items()]
        noise = Veil().noise
        facts = {
            "data": f"digits, {veiled.train_size} training records, {CLIENTS} clients",
            "model": f"mlp with {HIDDEN} hidden units per layer",
            "training": f"{LOSS}, Adam with {RATE:g}, batches of {BATCH}, {asked.epochs} epochs",
            "veil": f"additive noise {NOISE:g}, m = {noise.groups}, factors up to {noise.multiplicative:g}, 2 decoys",
        }
        return Shown(
            "Demo: digits, plain and veiled",
            verdict(histories["plain"].last["accuracy"], veiled.views),
            ["model", "test accuracy", "time"],
            rows,
            f"{exact}. Any client can remove the offset, and a client that keeps two broadcasts can remove the veil "
            "without data: the veil is no guarantee (docs/threat-model.md).",
            [
                *curve_sections(histories, MEASURED),
                Text("What is and is not protected", PROTECTION),
                Facts("Configuration", facts),
            ],
            [Beside("Answers on the test data", matrices)],
        )


DEMO = DemoStudy()
