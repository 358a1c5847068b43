"""`fedveil demo`: compare plain and veiled training on digits, and measure the effect of rounding alone."""

import copy
import dataclasses
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fedveil.attacks.leaked_gradients import mean_gradients
from fedveil.attacks.veil import remove_noise
from fedveil.data import one_tensor
from fedveil.federation import Federation, History
from fedveil.federation.history import RoundRecord
from fedveil.federation.page import NO_DATA, PROTECTION, client_models, confusion_counts, curve_sections, scores
from fedveil.progress import Progress
from fedveil.records.sources import as_source
from fedveil.report import Facts, Matrix, SideBySide, Text, count
from fedveil.runs.build import build_federation, load_data
from fedveil.runs.choices import applicable_values
from fedveil.runs.settings import Config, Value, configure
from fedveil.studies.compare import baseline_settings
from fedveil.studies.federations import observe, round_progress
from fedveil.studies.jobs import JobResults, Result, StudyJob
from fedveil.studies.study import JobGraph, Presentation, Study

CONFIG = configure({"data": "digits", "loss": "cross_entropy", "additive": 100.0})
NOTE = (
    "Relative error of recovered gradients, compared with plain autograd on the true model: {}. Any client can remove "
    "the offset, and a client that keeps two broadcasts can remove the veil without data: the veil guarantees nothing "
    "(fedveil help threat-model)."
)
TRAINING_KINDS: Mapping[str, Mapping[str, Value]] = {
    "plain": {"defence": "plain"},
    "veiled": {"defence": "veil"},
    "rounding baseline": {"defence": "plain", "settings": baseline_settings(1)},
}


@dataclass(frozen=True)
class Demo:
    """Settings of the demo."""

    epochs: int = 60


@dataclass(frozen=True)
class DemoRun(Result):
    """The result of one training run.

    Attributes:
        records: one record per round.
        seconds: duration of all rounds except the first, which may include the time to load code.
        classes: names of the classes.
        views: test accuracy of the server's model and of each model that a client can obtain.
        matrices: confusion matrices of the first two models in `views`.
        errors: relative errors of recovered gradients, measured in rounds after training.
    """

    records: list[RoundRecord]
    seconds: float
    classes: list[str]
    views: dict[str, float] = dataclasses.field(default_factory=dict)
    matrices: dict[str, list[list[int]]] = dataclasses.field(default_factory=dict)
    errors: list[float] = dataclasses.field(default_factory=list)


def recovery_errors(federation: Federation) -> list[float]:
    """Train for one more epoch, and compare each recovered gradient with plain autograd on the true model.

    Returns the largest relative error of any parameter in each round.
    """
    shards, errors = federation.shards, list[float]()
    for _ in range(federation.rounds_per_epoch):
        expected: dict[str, Tensor] = {}
        for client, size in enumerate(shards.sizes):
            inputs, targets = shards.take(shards.rows(client, federation.round))
            gradients = mean_gradients(federation.model, federation.loss, one_tensor("demo", inputs), targets)
            for name, gradient in gradients.items():
                expected[name] = expected.get(name, 0) + size / sum(shards.sizes) * gradient
        result = federation.step().gradients
        errors.append(max(float((result[name] - value).norm() / value.norm()) for name, value in expected.items()))
    return errors


@dataclass(frozen=True)
class TrainDigits:
    """A task that trains one run on digits."""

    config: Config

    def __call__(self, progress: Progress, results: JobResults) -> DemoRun:
        """Train, and measure the models that a client can obtain."""
        data, epochs = load_data(self.config), self.config.training.epochs
        run = build_federation(self.config, data)
        test, on_round = (data.test.inputs, data.test.targets), round_progress(epochs, progress)
        run.fit(epochs, test=test, on_round=on_round, verbose=False)
        records = list(run.history.records)
        seconds = records[-1].seconds - records[0].seconds
        result = DemoRun(records, seconds, list(data.classes))
        if self.config.defence.name == "plain":
            return result
        views = {name: copy.deepcopy(view) for name, view in client_models(run).items()}  # `observe` changes the model
        views[f"two broadcasts{NO_DATA}"] = remove_noise(observe(run, rounds=2)).model
        source = as_source("test data", test)
        accuracies = {name: metrics["accuracy"] for name, metrics in scores(views, source).items()}
        matrices = confusion_counts(views, source, data.outputs)
        return dataclasses.replace(result, views=accuracies, matrices=matrices, errors=recovery_errors(run))


Runs = dict[str, DemoRun]


class DemoStudy(Study[Demo, Runs]):
    """Plain training, veiled training, and plain training with one additional rounding error."""

    def graph(self, request: Demo, folder: Path) -> JobGraph[Runs]:
        """Return one job per kind of training; a failed job raises an error."""
        configs = {kind: CONFIG.changed(epochs=request.epochs, **values) for kind, values in TRAINING_KINDS.items()}
        tasks = {kind: TrainDigits(config) for kind, config in configs.items()}
        jobs = {kind: StudyJob(kind.replace(" ", "-"), task, DemoRun) for kind, task in tasks.items()}
        return JobGraph(list(jobs.values()), lambda results: {kind: results.require(job) for kind, job in jobs.items()})

    def present(self, request: Demo, results: Runs) -> Presentation:
        """Return the accuracies, two confusion matrices, the curves and the settings."""
        veiled_run, histories = results["veiled"], {name: History(run.records) for name, run in results.items()}
        rows = [
            [name, f"{histories[name].metrics['accuracy']:.1%}", f"{run.seconds:.1f} s"]
            for name, run in results.items()
        ]
        rows += [[view, f"{accuracy:.1%}", ""] for view, accuracy in list(veiled_run.views.items())[1:]]
        error = f"{statistics.median(veiled_run.errors):.0e}, the median of {count(len(veiled_run.errors), 'round')}"
        matrices = [Matrix(view, veiled_run.classes, counts) for view, counts in veiled_run.matrices.items()]
        settings = applicable_values(CONFIG.changed(epochs=request.epochs))
        verdict = f"Test accuracy: {', '.join(f'{name} {accuracy}' for name, accuracy, _ in rows)}."
        header, top_sections = (
            ["model", "test accuracy", "time"],
            [SideBySide("Predictions on the test data", matrices)],
        )
        protection = Text("What is and is not protected", PROTECTION)
        facts = Facts("Configuration", {name: str(value) for name, value in settings.items()})
        sections = [*curve_sections(histories), protection, facts]
        return Presentation(
            "Demo: digits, plain and veiled", verdict, header, rows, NOTE.format(error), sections, top_sections
        )


DEMO = DemoStudy()
