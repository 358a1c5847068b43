"""`fedveil audit --epsilon`: train a private configuration with canaries, and bound its true epsilon from below."""

from dataclasses import dataclass
from pathlib import Path

from fedveil.attacks.canaries import measure_epsilon
from fedveil.errors import BadArgument
from fedveil.privacy.measure import MeasuredEpsilon
from fedveil.progress import Progress
from fedveil.report import Facts, Section, Text
from fedveil.runs.build import (
    build_defence,
    build_loss,
    build_model,
    build_optimizer,
    build_privacy,
    client_parts,
    load_data,
    move_to_device,
)
from fedveil.runs.settings import Config, has_privacy
from fedveil.studies.jobs import Failure, JobResults, Result, StudyJob
from fedveil.studies.study import JobGraph, Presentation, Study, read_texts

TEXTS = read_texts()["epsilon"]
COMMAND = "fedveil audit --epsilon"
HEADER = (
    "claimed epsilon",
    "lower bound (95 %)",
    "estimate (not a proof)",
    "correct guesses",
    "guesses",
    "canaries",
)


@dataclass(frozen=True)
class EpsilonResult(Result):
    """The measured epsilon of a configuration."""

    measured: MeasuredEpsilon


@dataclass(frozen=True)
class MeasureConfig:
    """A task that trains a configuration with canaries, in one process."""

    config: Config

    def __call__(self, progress: Progress, results: JobResults) -> EpsilonResult:
        """Measure epsilon; a veil is omitted, because the server recovers the same sum as in plain training."""
        config, training = self.config, self.config.training
        data = load_data(config)
        parts = client_parts(config.data, training.seed, data)
        result = measure_epsilon(
            move_to_device(build_model(config, data), training.device),
            parts,
            "plain" if config.defence.name == "veil" else build_defence(config),
            build_optimizer(training),
            privacy=build_privacy(config, max(len(part.targets) for part in parts)),
            loss=build_loss(training),
            batch_size=training.batch_size,
            whole_shard=training.whole_shard,
            participation=training.participation,
            secure_aggregation=config.privacy.secure_aggregation,
            seed=training.seed,
            progress=lambda round_index, rounds: progress(
                round_index / rounds, f"training with canaries, round {round_index}/{rounds}"
            ),
        )
        return EpsilonResult(result)


class EpsilonStudy(Study[Config, EpsilonResult | Failure]):
    """A lower bound on the true epsilon of a configuration with differential privacy for records."""

    def graph(self, request: Config, folder: Path) -> JobGraph[EpsilonResult | Failure]:
        """Return one job; refuse a configuration that does not protect records."""
        if not has_privacy(request):
            message, fix = (
                "this configuration has no differential privacy",
                "pass --epsilon 3, or add a [privacy] section",
            )
            raise BadArgument(COMMAND, message, fix)
        if request.privacy.unit != "record":
            message = "epsilon is measured for records, but this configuration protects clients"
            raise BadArgument(COMMAND, message, "pass --unit record")
        job = StudyJob("epsilon", MeasureConfig(request), EpsilonResult)
        return JobGraph([job], lambda results: results[job])

    def present(self, request: Config, results: EpsilonResult | Failure) -> Presentation:
        """Return the result in one sentence, the table, and an explanation of how to read them."""
        values = {name: str(value) for name, value in request.flat().items()}
        sections: list[Section] = [Text("How to read it", TEXTS.reading), Facts("Configuration", values)]
        title = f"Measured epsilon: {request.data.name}, {request.model.name}"
        if isinstance(results, Failure):
            return Presentation(title, f"Failed: {results.failed}", HEADER, [], TEXTS.note, sections)
        measurement = results.measured
        row = [f"{measurement.claimed:.2f}", measurement.format_bound(), f"{measurement.estimate:.2f}"]
        row += [str(measurement.right), str(measurement.guesses), str(measurement.canaries)]
        return Presentation(title, f"Epsilon: {measurement!r}.", HEADER, [row], TEXTS.note, sections)


EPSILON = EpsilonStudy()
