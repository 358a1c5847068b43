"""The default loss and the primary metric of every command, and losses that do not fit the data."""

from collections.abc import Collection

from fedveil.data import Data
from fedveil.errors import BadArgument
from fedveil.federation.evaluate import METRICS
from fedveil.federation.targets import is_binary
from fedveil.runs.config import Config, LossName

CLASSES, NUMBERS = "classification", "regression"
TASKS = {"bank": NUMBERS, "diabetes": NUMBERS}  # without --task
TASKS |= dict.fromkeys(("digits", "cifar10", "cifar100", "images", "lesion"), CLASSES)
HAS_TASK = ("csv", "bank")  # data sets with --task
NEEDS = {"binary_cross_entropy": "targets from 0 to 1", "poisson": "counts"}


def default_loss(config: Config, data: Data | None = None) -> LossName | None:
    """Return the loss of a configuration that names none; None if it depends on records that are not given."""
    asked = config.data
    task = asked.task or TASKS.get(asked.name)
    if data is not None:
        task = CLASSES if data.classes else NUMBERS
    return None if task is None else "cross_entropy" if task == CLASSES else "squared_error"


def choose_loss(config: Config, data: Data | None = None) -> Config:
    """Return the configuration with its loss, by default that of the task; refuse a loss that does not fit the data."""
    if data is not None:
        check_loss(config, data)
    loss = config.training.loss or default_loss(config, data)
    return config if loss == config.training.loss else config.changed(loss=loss)


def primary_metric(measured: Collection[str]) -> str:
    """Return the metric that stands for a model's quality, of those that were measured."""
    return next((name for name in METRICS if name in measured), METRICS[0])


def check_loss(config: Config, data: Data) -> None:
    """Refuse a loss that does not fit the data, or, without a loss, targets that leave the choice open.

    The federation compares the targets with the model's outputs.
    """
    loss = config.training.loss
    if data.classes:
        if loss == "binary_cross_entropy" and ":" not in config.model.name:
            what = f"it takes a yes or no for each output, and each record of {data.name!r} has one class"
            fix = "use --loss cross_entropy, or --model package.module:factory of a network with one output"
            raise BadArgument("--loss binary_cross_entropy", what, fix)
    elif loss in ("cross_entropy", "hinge") and data.outputs == 1:
        _refuse(config, data, f"--loss {loss}", f"{loss} compares classes")
    elif loss is None and config.training.label_smoothing:
        _refuse(config, data, "--label-smoothing", "it is for cross-entropy, which compares classes")
    elif loss in NEEDS and data.target_scale:
        _refuse(config, data, f"--loss {loss}", f"{loss} takes {NEEDS[loss]}, not standardised numbers")
    elif loss is None and config.data.name not in TASKS and not data.target_scale:
        _refuse_ambiguous(data)


def _refuse(config: Config, data: Data, where: str, why: str) -> None:
    target = f"the target {config.data.target!r} of {data.name!r}" if config.data.target else f"{data.name!r}"
    fix = "use --loss squared_error, or leave --loss out" if config.training.loss else f"leave {where} out"
    if config.data.name in HAS_TASK:
        fix += "; or use --task classification if the values of the target are classes"
    raise BadArgument(where, f"{why}, and {target} is a regression", fix)


def _refuse_ambiguous(data: Data) -> None:
    """Refuse targets that may be classes or quantities."""
    targets = data.train.targets
    if is_binary(targets) and bool(targets.any()) and not bool(targets.all()):
        what = "targets are floating-point numbers, all of them 0 or 1: classes or quantities?"
        raise BadArgument(data.name, what, "return them as int64 if they are classes, or pass --loss squared_error")
