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
from fedveil.report import Beside, Facts, Matrix, Section, Text
from fedveil.runs.page import NO_DATA, PROTECTION, client_models, confusions, curve_sections, scores
from fedveil.scheme import Aggregate, Broadcast, Loss, Perturbation, Update, VeilSession
from fedveil.studies.jobs import Done, Failed, Job, Progress, Result
from fedveil.studies.study import Shown, Study
from fedveil.studies.victim import observe, on_round

CLIENTS, NOISE, HIDDEN, RATE, BATCH, LOSS = 5, 100.0, 50, 1e-3, 32, "cross_entropy"
MEASURED = (
    "Measured in every round against plain autograd on the true model: the worst parameter. It is larger in rounds in "
    "which rounding moved a ReLU across 0, as it does between any two plain runs."
)


@dataclass(frozen=True)
class Demo:
    """What is asked."""

    epochs: int = 60


@dataclass(frozen=True)
class DemoRun(Result):
    """One way to train.

    Attributes:
        records: round by round.
        seconds: of all rounds but the first, in which the first run of a process also loads code.
        train_size: training records.
        classes: their names.
        views: test accuracy of the model as the server has it and as clients see it.
        matrices: confusion matrices of the first two of them.
        worst: largest relative error of a recovered gradient, but for rounds in which rounding moved a ReLU across 0.
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
        self.truth: Mapping[str, Tensor] = {}
        self.flipped = False

    def server(self, model: nn.Module, example: Inputs, loss: Loss) -> "WatchedServer":
        """Prepare a server whose rounds are compared."""
        return WatchedServer(super().server(model, example, loss).session, self)

    def client(self, model: nn.Module, example: Inputs, loss: Loss) -> "WatchedClient":
        """Prepare a client that also computes the true gradient."""
        return WatchedClient(model, PlainClient(model, loss), self)


class WatchedClient(VeilClient):
    """Computes the true gradient beside the perturbed one."""

    def __init__(self, model: nn.Module, plain: PlainClient, watched: Watched) -> None:
        super().__init__(model)
        self._true, self._plain, self._watched = model, plain, watched

    def step(self, broadcast: Broadcast, samples: Samples, client: int = 0) -> Update:
        """Compute both gradients, and note whether rounding moved a ReLU across 0."""
        assert isinstance(samples.inputs, Tensor)  # digits
        self._watched.truth = self._plain.step(self._true, samples).gradients
        with torch.no_grad():
            sent = self._watched.client_view(self._true, broadcast)
            pairs = zip(active(self._true, samples.inputs), active(sent, samples.inputs), strict=True)
            self._watched.flipped = any(bool((a != b).any()) for a, b in pairs)
        return super().step(broadcast, samples, client)


class WatchedServer(VeilServer):
    """Starts rounds that are compared."""

    def __init__(self, session: VeilSession, watched: Watched) -> None:
        super().__init__(session)
        self._watched = watched

    def start_round(self, model: nn.Module, members: Sequence[int] | None = None) -> "WatchedRound":
        """Perturb the model with new noise."""
        return WatchedRound(self.session.perturb(model), self._watched)


class WatchedRound(VeilRound):
    """Compares the recovered gradient with the true one."""

    def __init__(self, perturbation: Perturbation, watched: Watched) -> None:
        super().__init__(perturbation)
        self._watched = watched

    def recover(self, updates: Sequence[Update], weights: Sequence[float]) -> Aggregate:
        """Recover the gradient; rounds in which rounding moved a ReLU across 0 are counted separately."""
        result, watched = super().recover(updates, weights), self._watched
        error = max(float((result.gradients[name] - g).norm() / g.norm()) for name, g in watched.truth.items())
        watched.flips += watched.flipped
        if not watched.flipped:
            watched.errors.append(error)
        return dataclasses.replace(result, error=error)


def client_views(federation: Federation) -> dict[str, nn.Module]:
    """The server's model, as received by a client, and what a client without data makes of it in one more round."""
    views = {name: copy.deepcopy(view) for name, view in client_models(federation).items()}  # before one more round
    return {**views, f"two broadcasts{NO_DATA}": remove_noise(observe(federation, rounds=2)).model}


@dataclass(frozen=True)
class TrainDigits:
    """Train digits in one of three ways."""

    kind: str
    epochs: int

    def __call__(self, progress: Progress, done: Done) -> DemoRun:
        """Train, and look at the model as a client does."""
        data = load("digits")
        watched = Watched(NOISE) if self.kind == "veiled" else None
        defence = watched or Plain(rounding=1 if self.kind == "rounding baseline" else None)
        parts = [(data.train.tensor[rows], data.train.targets[rows]) for rows in split(data, CLIENTS, seed=0)]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            start = mlp(data.train.tensor.shape[1], data.outputs, hidden=HIDDEN)
        run = Federation(start, parts, defence, lambda p: torch.optim.Adam(p, RATE), batch_size=BATCH, loss=LOSS)
        test = data.test.inputs, data.test.targets
        run.fit(self.epochs, test=test, on_round=on_round(self.epochs, progress))
        records = list(run.history.records)
        seconds = records[-1]["seconds"] - records[0]["seconds"]
        views = client_views(run) if watched else {}
        return DemoRun(
            records,
            seconds,
            len(data.train.targets),
            list(data.classes),
            {name: found["accuracy"] for name, found in scores(views, data).items()} if views else {},
            confusions(views, data) if views else {},
            max(watched.errors) if watched else None,
            watched.flips if watched else 0,
        )


def verdict(plain: float, views: dict[str, float]) -> str:
    """Accuracy of plain training, of the veiled model and of it as clients have it, in one sentence."""
    server, received, *others = views
    best = max(others, key=views.__getitem__)
    own, bare, sees, most = (f"{100 * x:.1f} %" for x in (views[server], plain, views[received], views[best]))
    way = best.removesuffix(NO_DATA)
    return (
        f"Veiled training ends at {own}, plain at {bare}; a client's copy of the model has {sees} as received, {most} "
        f"after an attack without data ({way})."
    )


Runs = dict[str, DemoRun | Failed]


class DemoStudy(Study[Demo, Runs]):
    """Plain, veiled, and plain with one rounding error more."""

    name = "demo"
    summary = "train digits with five clients, plain and veiled, and compare"

    def runs(self, asked: Demo) -> dict[str, Job[DemoRun]]:
        """The job of each way."""
        kinds = ("plain", "veiled", "rounding baseline")
        return {kind: Job(kind.replace(" ", "-"), TrainDigits(kind, asked.epochs), DemoRun) for kind in kinds}

    def jobs(self, asked: Demo, folder: Path) -> list[Job[Result]]:
        """All three."""
        return list(self.runs(asked).values())

    def collect(self, asked: Demo, folder: Path, done: Done) -> Runs:
        """By name; a demo that fails is an error."""
        return {name: done.of(job) for name, job in self.runs(asked).items()}

    def present(self, asked: Demo, results: Runs) -> Shown:
        """Two confusion matrices, accuracies, curves, the settings of the run."""
        runs = {name: run for name, run in results.items() if isinstance(run, DemoRun)}
        veiled = runs["veiled"]
        histories, rows = {name: History(run.records) for name, run in runs.items()}, []
        for name, run in runs.items():
            checked = " with every gradient checked" if run.worst is not None else ""
            rows.append([name, f"{histories[name].last['accuracy']:.1%}", f"{run.seconds:.1f} s{checked}"])
        rows += [[view, f"{accuracy:.1%}", ""] for view, accuracy in list(veiled.views.items())[1:]]
        exact = f"Largest relative error of a recovered gradient: {veiled.worst:.0e}"
        if veiled.flips:
            rounds = f"{veiled.flips} round{'s' if veiled.flips > 1 else ''}"
            exact += f" (but for {rounds} in which rounding moved a ReLU across 0)"
        matrices = [Matrix(view, veiled.classes, counts) for view, counts in veiled.matrices.items()]
        noise = Veil().noise
        facts = {
            "data": f"digits, {veiled.train_size} training records, {CLIENTS} clients",
            "model": f"mlp with {HIDDEN} hidden units per layer",
            "training": f"{LOSS}, Adam with {RATE:g}, batches of {BATCH}, {asked.epochs} epochs",
            "veil": f"additive noise {NOISE:g}, m = {noise.groups}, factors up to {noise.multiplicative:g}, 2 decoys",
        }
        sections: list[Section] = [
            *curve_sections(histories, MEASURED),
            Text("What is and is not protected", PROTECTION),
            Facts("Configuration", facts),
        ]
        return Shown(
            "Demo: digits, plain and veiled",
            verdict(histories["plain"].last["accuracy"], veiled.views),
            ["model", "test accuracy", "time"],
            rows,
            f"{exact}. Any client can remove the offset, and a client that keeps two broadcasts can remove the veil, "
            "without data: the veil is no guarantee (docs/threat-model.md).",
            sections,
            [Beside("Answers on the test data", matrices)],
        )


DEMO = DemoStudy()
