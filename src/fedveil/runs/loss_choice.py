"""Whether the loss of a configuration goes with its data, said in the words of the command line."""

from fedveil.data import Data
from fedveil.errors import BadArgument
from fedveil.federation.targets import is_binary
from fedveil.runs.config import Config, of_users

HAS_TASK = ("csv", "bank")  # data sets with --task
NEEDS = {"binary_cross_entropy": "targets from 0 to 1", "poisson": "counts"}


def check_choice(config: Config, data: Data) -> None:
    """Refuse a loss that cannot learn from the data set; without a loss, targets that leave it open.

    What depends on the model's outputs alone is left to the federation, which compares all targets with them.
    """
    loss = config.training.loss
    if data.classes:
        _check_classes(config, data)
    elif loss in ("cross_entropy", "hinge") and data.outputs == 1:
        _refuse(config, data, f"--loss {loss}", f"{loss} compares classes")
    elif loss is None and config.training.label_smoothing:
        _refuse(config, data, "--label-smoothing", "it is cross-entropy's, which compares classes")
    elif loss in NEEDS and data.target_scale:
        _refuse(config, data, f"--loss {loss}", f"{loss} takes {NEEDS[loss]}, not standardised numbers")
    elif loss is None and of_users(config.data.name) and not data.target_scale:
        _check_open(data)


def _check_classes(config: Config, data: Data) -> None:
    """Refuse yes/no answers where a model of the library has one output for each class."""
    if config.training.loss == "binary_cross_entropy" and ":" not in config.model.name:
        what = f"it takes a yes or no for each output, and each record of {data.name!r} has one class"
        fix = "--loss cross_entropy, or --model package.module:factory of a network with one output"
        raise BadArgument("--loss binary_cross_entropy", what, fix)


def _refuse(config: Config, data: Data, where: str, why: str) -> None:
    target = f"the target {config.data.target!r} of {data.name!r}" if config.data.target else f"{data.name!r}"
    fix = "--loss squared_error, or leave --loss out" if config.training.loss else f"leave {where} out"
    if config.data.name in HAS_TASK:
        fix += "; or --task classification if the values of the target are classes"
    raise BadArgument(where, f"{why}, and {target} is a regression", fix)


def _check_open(data: Data) -> None:
    targets = data.train.targets
    if is_binary(targets) and bool(targets.any()) and not bool(targets.all()):
        what = "targets are floating-point numbers, all of them 0 or 1: classes or quantities?"
        raise BadArgument(data.name, what, "return them as int64 if they are classes, or name --loss squared_error")
