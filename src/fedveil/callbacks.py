"""Trackers for `fit(on_round=...)`: TensorBoard, MLflow, and Weights & Biases."""

import math
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from fedveil.errors import BadArgument
from fedveil.federation.checkpoint import BEST, MODEL
from fedveil.federation.fitting import Tracker
from fedveil.federation.history import RoundRecord
from fedveil.federation.results import Setting
from fedveil.federation.run_folder import REPORT, SUMMARY

__all__ = ["MLflow", "TensorBoard", "WeightsAndBiases"]
ARTEFACTS = (REPORT, SUMMARY, MODEL, BEST)


def list_artefacts(folder: Path | None) -> list[Path]:
    """Return the paths of the report page, summary and models in a run's folder; without a folder, an empty list."""
    return [path for name in ARTEFACTS if folder is not None and (path := folder / name).is_file()]


def _import(where: str, module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise BadArgument(where, f"{package} is not installed", f"run pip install {package}") from error


class NumberTracker(Tracker):
    """A tracker that logs the numbers in the records of evaluated rounds or, without held-out data, of all rounds."""

    _is_evaluated = False

    def start(self, settings: Mapping[str, Setting], is_evaluated: bool) -> None:
        """Begin a run with these settings."""
        self._is_evaluated = is_evaluated
        self._open(
            {name: list(setting) if isinstance(setting, tuple) else setting for name, setting in settings.items()}
        )

    def __call__(self, record: RoundRecord) -> None:
        """Log the numbers in the record of a round."""
        if not self._is_evaluated or record.metrics:
            values = {name: value for name, value in record.items() if name not in ("round", "evaluated")}
            numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
            self._log({name: number for name, number in numbers.items() if math.isfinite(number)}, record.round)

    def _open(self, settings: Mapping[str, object]) -> None:
        """Begin a run."""
        raise NotImplementedError

    def _log(self, numbers: Mapping[str, float], round_number: int) -> None:
        """Log the numbers of a round."""
        raise NotImplementedError


class TensorBoard(NumberTracker):
    """A tracker for TensorBoard, which receives numbers, settings and the paths of the run's files.

    Args:
        folder: the folder to write to, which `tensorboard --logdir` reads.
    """

    def __init__(self, folder: str | Path) -> None:
        self._module = _import("TensorBoard", "torch.utils.tensorboard", "tensorboard")
        self._folder = str(folder)

    def _open(self, settings: Mapping[str, object]) -> None:
        self._writer = self._module.SummaryWriter(self._folder)
        rows = "".join(f"\n| {name} | {value} |" for name, value in settings.items())
        self._writer.add_text("settings", f"| setting | value |\n|---|---|{rows}")

    def _log(self, numbers: Mapping[str, float], round_number: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, round_number)

    def finish(self, folder: Path | None, failed: bool) -> None:
        """Close the files."""
        if paths := list_artefacts(folder):
            self._writer.add_text("files", "\n".join(f"- {path}" for path in paths))
        self._writer.close()


class MLflow(NumberTracker):
    """A tracker for MLflow, which receives numbers, settings, report page, summary and models.

    Args:
        experiment: name of the experiment, which is created if it does not exist.
        uri: tracking server or store, such as "sqlite:///mlflow.db"; by default, the one configured in MLflow.
        name: name of the run; by default, MLflow chooses one.
    """

    def __init__(self, experiment: str = "fedveil", uri: str | None = None, name: str | None = None) -> None:
        self._module = _import("MLflow", "mlflow", "mlflow")
        self._client = self._module.MlflowClient(uri)
        self._experiment, self._name = experiment, name

    def _open(self, settings: Mapping[str, object]) -> None:
        experiment = self._client.get_experiment_by_name(self._experiment)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(self._experiment)
        self._run = self._client.create_run(experiment_id, run_name=self._name).info.run_id
        make_param = self._module.entities.Param
        self._client.log_batch(self._run, params=[make_param(name, str(value)) for name, value in settings.items()])

    def _log(self, numbers: Mapping[str, float], round_number: int) -> None:
        make_metric, milliseconds = self._module.entities.Metric, int(1000 * time.time())
        metrics = [make_metric(name, value, milliseconds, round_number) for name, value in numbers.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def finish(self, folder: Path | None, failed: bool) -> None:
        """Log the run's files and end the run."""
        for path in list_artefacts(folder):
            self._client.log_artifact(self._run, str(path))
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


class WeightsAndBiases(NumberTracker):
    """A tracker for Weights & Biases, which receives numbers, settings, report page, summary and models.

    Args:
        project: name of the project.
        options: further arguments of `wandb.init`, such as mode="offline" to send nothing until `wandb sync`.
    """

    def __init__(self, project: str = "fedveil", **options: object) -> None:
        self._module = _import("WeightsAndBiases", "wandb", "wandb")
        self._options = {"project": project, **options}

    def _open(self, settings: Mapping[str, object]) -> None:
        self._run = self._module.init(**self._options, config=dict(settings))

    def _log(self, numbers: Mapping[str, float], round_number: int) -> None:
        self._run.log(dict(numbers), step=round_number)

    def finish(self, folder: Path | None, failed: bool) -> None:
        """Log the run's files and end the run."""
        if paths := list_artefacts(folder):
            artefact = self._module.Artifact(f"run-{self._run.id}", type="model")
            for path in paths:
                artefact.add_file(str(path))
            self._run.log_artifact(artefact)
        self._run.finish(exit_code=int(failed))
