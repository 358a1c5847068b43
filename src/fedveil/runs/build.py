"""Build data, model, defence, loss, optimizer and federation from a configuration."""

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, ReduceLROnPlateau

from fedveil import data as datasets
from fedveil.data import Data, DataPart, split
from fedveil.data.catalogue import Scaling, Task
from fedveil.data.splits import hold_out
from fedveil.defences import registry
from fedveil.defences.interface import AnyDefence
from fedveil.errors import BadArgument
from fedveil.federation.limits import Limits
from fedveil.federation.local import Federation
from fedveil.federation.stopping import MODES
from fedveil.federation.targets import is_binary
from fedveil.files import require_memory
from fedveil.lookup import import_object
from fedveil.records.shards import count_batches
from fedveil.runs.choices import check_network, parse_settings, trains_locally
from fedveil.runs.settings import (
    SCALED_DATA,
    Config,
    DataSettings,
    LimitSettings,
    LossName,
    ModelSettings,
    TrainingSettings,
    Value,
    has_privacy,
)
from fedveil.scheme import CrossEntropy, Loss, find_loss

if TYPE_CHECKING:
    from fedveil.privacy import Privacy

LOSSES: dict[Task, LossName] = {"classification": "cross_entropy", "regression": "squared_error"}  # default losses
TASKS: dict[str, Task] = {"bank": "regression", "diabetes": "regression"}  # default tasks
SCALING_FIX = "scale with public constants in --data package.module:factory, or use --scaling records to accept this"
SCALING_NOTES: dict[Scaling, str] = {
    "public": "standardised with constants that do not depend on the records",
    "records": "standardised with statistics of the training records, which epsilon does not cover",
}
TASKS |= dict.fromkeys(("digits", "cifar10", "cifar100", "images", "lesion"), "classification")


def load_data(config: Config) -> Data:
    """Load the data set of a configuration."""
    settings = config.data
    # all other keys are options of the data set
    common_keys = {"data", "labels", "clients", "split", "alpha", "column", "scaling", "validation"}
    options = settings.model_dump(exclude=common_keys, exclude_defaults=True)
    if ":" in settings.name:
        if options:
            message = f"--{next(iter(options)).replace('_', '-')} applies only to the library's data sets"
            raise BadArgument(settings.name, message, "leave it out, and apply it in the factory")
        result = load_user_data(settings.name)
    else:
        if settings.name == "digits" and not config.model.name.startswith("mlp"):
            options["flat"] = False
        scaling = choose_scaling(config)
        if scaling == "public":
            options["scaling"] = scaling
        result = datasets.load(settings.name, **options)
        if has_privacy(config) and settings.name in SCALED_DATA.split():
            result = replace(result, notes=(*result.notes, SCALING_NOTES[scaling]))
    if settings.labels is not None:
        result = datasets.keep_labels(result, datasets.parse_labels(settings.labels, len(result.classes)))
    return _set_validation(config, result)


def _set_validation(config: Config, data: Data) -> Data:
    """Return the data with the validation records that a configuration specifies."""
    validation = config.data.validation
    if validation == "own" and data.validation is None:
        message = f"{data.name!r} has no validation records"
        raise BadArgument("--validation own", message, "pass a fraction of the training records: --validation 0.1")
    result = hold_out(data, validation) if isinstance(validation, float) else data
    if validation is None or not has_privacy(config):
        return result
    return replace(result, notes=(*result.notes, "epsilon does not cover the validation records"))


def choose_scaling(config: Config) -> Scaling:
    """Choose how to standardise inputs; with privacy, refuse a CSV file unless the user accepts its statistics."""
    name, scaling = config.data.name, config.data.scaling
    if name == "csv" and scaling is None and has_privacy(config):
        message = "columns are standardised with statistics of the training records, which epsilon does not cover"
        raise BadArgument("--data csv with privacy", message, SCALING_FIX)
    is_private = has_privacy(config) and name in SCALED_DATA.split()
    return scaling or ("public" if is_private else "records")


def client_parts(settings: DataSettings, seed: int, data: Data) -> list[DataPart]:
    """Divide the training records of a data set among clients."""
    rows = split(data, settings.clients, how=settings.split, seed=seed, alpha=settings.alpha, column=settings.column)
    return [data.train.take(indices) for indices in rows]


def build_model(config: Config, data: Data) -> nn.Module:
    """Seed torch and build the configured model, either one of the library's networks or the result of a factory."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.training.seed)
        if ":" in config.model.name:
            return load_factory(config.model.name)
        shape, fix = record_shape(config.model.name, data), "choose a smaller --hidden or --width, or smaller records"
        with require_memory("model", f"the parameters of this {config.model.name}", fix):
            return named_model(config.model, shape, data.outputs)


def record_shape(name: str, data: Data) -> torch.Size:
    """Return the shape of one record; refuse data that the library's networks do not accept."""
    if not isinstance(data.train.inputs, Tensor) or not data.train.inputs.is_floating_point():
        message = f"{name} takes one floating-point tensor, but {data!r} has other inputs"
        raise BadArgument("model", message, "use --model package.module:factory for your own model")
    return data.train.inputs.shape[1:]


def named_model(settings: ModelSettings, shape: torch.Size, outputs: int) -> nn.Module:
    """Return one of the library's networks, for records of the given shape."""
    from fedveil import models

    name, width = settings.name, settings.width
    check_network(name)
    if name == "mlp":
        mlp = models.mlp(shape.numel(), outputs, layers=settings.layers, hidden=settings.hidden, bias=settings.bias)
        return mlp if len(shape) == 1 else nn.Sequential(nn.Flatten(), mlp)
    if len(shape) == 1:
        raise BadArgument("model", f"{name} takes images, but a record is a vector of {shape[0]} numbers", "use mlp")
    channels = shape[0] if len(shape) == 3 else 1
    if name == "cnn":
        return models.cnn(channels, outputs, width=width, size=shape[-1])
    if name == "lenet":
        return models.lenet(channels, outputs, size=shape[-1], activation=settings.activation)
    depth, norm = int(name.removeprefix("resnet")), settings.norm
    resnet = models.resnet(
        depth, channels, outputs, width=width, norm="batch" if norm == "group" else norm, shortcut=settings.shortcut
    )
    return models.with_group_norm(resnet) if norm == "group" else resnet


def load_factory(spec: str) -> nn.Module:
    """Return the model at `package.module:name`, or the model that the factory at this path builds."""
    model = _call_factory(spec, "a model", "fedveil inspect my_package.models:net", nn.Module)
    if not isinstance(model, nn.Module):
        raise BadArgument(spec, f"expected a torch.nn.Module, got {type(model).__name__}")
    return model


def load_user_data(spec: str) -> Data:
    """Return the data that `package.module:factory` loads: a `fedveil.data.Data`, or training and test records.

    Validation records may follow. Each part is (inputs, targets) as tensors, arrays or data frames, a Dataset, or a
    DataLoader; see `fedveil.data.from_records`.
    """
    result = _call_factory(
        spec, "data", "fedveil train --data my_package.data:load --model my_package.models:net", Data
    )
    if isinstance(result, Data):
        return result
    if isinstance(result, tuple | list) and len(result) in (2, 3):
        return datasets.from_records(spec, *result[:2], validation=result[2] if len(result) == 3 else None)
    fix = "return (train, test) or (train, test, validation), each (inputs, targets), a Dataset or a DataLoader; "
    fix += "or return fedveil.data.Data"
    raise BadArgument(spec, f"expected data, got {type(result).__name__}", fix)


def _call_factory(spec: str, kind: str, example: str, expected: type) -> object:
    """Return the object at `spec` if it has the expected type, otherwise the result of calling it."""
    result = import_object(spec, kind, example)
    if isinstance(result, expected):
        return result
    try:
        if not callable(result):
            raise TypeError(f"it is {type(result).__name__}")
        with contextlib.suppress(ValueError):  # built-in classes have no signature
            inspect.signature(result).bind()
    except TypeError as error:
        message, fix = f"cannot be called without arguments: {error}", "use a factory that has no required arguments"
        raise BadArgument(spec, message, fix) from error
    return result()


def build_defence(config: Config) -> AnyDefence:
    """Build the configured defence; with differential privacy for records, build its variant for records."""
    defence = registry.build(config.defence.name, config.flat(), parse_settings(config.defence.settings))
    return defence.for_records() if has_privacy(config) and config.privacy.unit == "record" else defence


def build_privacy(config: Config, client_size: int) -> "Privacy | None":
    """Return the settings for differential privacy; `client_size` is the number of records of the largest client."""
    if not has_privacy(config):
        return None
    from fedveil.privacy import Privacy

    values = config.privacy.model_dump(exclude={"secure_aggregation"}) | {"rate": sampling_rate(config, client_size)}
    return Privacy(rounds=config.training.epochs * rounds_per_epoch(config, client_size), **values)


def sampling_rate(config: Config, client_size: int) -> float | None:
    """Return the rate at which clients sample records, or None without differential privacy for records."""
    privacy_settings, training = config.privacy, config.training
    if not has_privacy(config) or privacy_settings.unit == "client":
        return None
    return privacy_settings.rate or (1.0 if training.whole_shard else min(1.0, training.batch_size / client_size))


def rounds_per_epoch(config: Config, client_size: int) -> int:
    """Return the number of rounds that the largest client needs to see each of its records once."""
    rate, training = sampling_rate(config, client_size), config.training
    if rate is not None:
        return math.ceil(1 / rate)
    return 1 if training.whole_shard or trains_locally(config) else count_batches(client_size, training.batch_size)


def choose_settings(config: Config, records: int) -> Config:
    """Return the configuration with defaults that suit differential privacy or local training.

    These defaults depend only on the number of training records, which is public. Explicit values stay unchanged.
    """
    explicit_values, training = config.explicit_values(), config.training
    result: dict[str, Value] = {}
    if trains_locally(config) and explicit_values.get("optimizer") in (None, "sgd"):
        result |= {"optimizer": "sgd", "lr": 1.0, "momentum": 0.0}  # the new model is the mean of the clients' models
    if has_privacy(config):
        result |= {"norm": "group"}
    if has_privacy(config) and config.privacy.unit == "record":
        from fedveil.privacy.defaults import CLIP, default_lr, default_rate, default_rounds

        client_size = math.ceil(records / config.data.clients)
        has_batch_size = training.whole_shard or "batch_size" in explicit_values
        rate = (sampling_rate(config, client_size) if has_batch_size else config.privacy.rate) or default_rate(records)
        epoch_rounds = math.ceil(1 / rate)
        epochs = training.epochs if "epochs" in explicit_values else max(1, round(default_rounds(rate) / epoch_rounds))
        result |= {"rate": rate, "epochs": epochs, "clip": CLIP, "schedule": "cosine", "schedule_every": "round"}
        result |= {"layers": 1, "multiplicative": 1.0}
        if training.optimizer != "sgd":
            result["lr"] = default_lr(epochs * epoch_rounds)
    result = {key: value for key, value in result.items() if explicit_values.get(key) is None}
    return config.changed(**result) if result else config


def build_limits(settings: LimitSettings) -> Limits | None:
    """Return the limits on clients; None if there are none."""
    arguments = settings.model_dump(exclude_none=True)
    return Limits(**arguments) if arguments else None


def build_loss(settings: TrainingSettings) -> Loss | None:
    """Return the configured loss; None if it depends on the targets."""
    if settings.label_smoothing:
        return CrossEntropy(label_smoothing=settings.label_smoothing)
    return None if settings.loss is None else find_loss(settings.loss)


def build_optimizer(settings: TrainingSettings) -> Callable[[Iterable[Tensor]], torch.optim.Optimizer]:
    """Return a function that constructs the configured optimizer."""
    lr, decay = settings.lr, settings.weight_decay
    if settings.optimizer == "sgd":
        return lambda params: torch.optim.SGD(params, lr, momentum=settings.momentum, weight_decay=decay)
    optimizer_class = torch.optim.AdamW if settings.optimizer == "adamw" else torch.optim.Adam
    return lambda params: optimizer_class(params, lr, weight_decay=decay)


def build_schedule(
    settings: TrainingSettings, rounds_per_epoch: int
) -> Callable[[torch.optim.Optimizer], LRScheduler] | None:
    """Return a function that constructs the configured learning-rate schedule; None for a constant rate."""
    if settings.schedule == "constant":
        return None
    if settings.schedule == "plateau":
        maximise = (settings.mode or MODES.get(settings.monitor or "", "min")) == "max"
        return partial(ReduceLROnPlateau, mode="max" if maximise else "min")
    steps = settings.epochs * (rounds_per_epoch if settings.schedule_every == "round" else 1)
    return partial(CosineAnnealingLR, T_max=steps)


def move_to_device(model: nn.Module, device: str) -> nn.Module:
    """Move a model to a device; refuse a device that is not available."""
    try:
        return model.to(torch.device(device))
    except (RuntimeError, AssertionError) as error:  # torch raises AssertionError if it was built without CUDA
        message = f"cannot use {device!r}: {str(error).splitlines()[0]}"
        raise BadArgument("device", message, "use --device cpu") from error


def build_federation(config: Config, data: Data, defence: AnyDefence | None = None) -> Federation:
    """Build the federation that a configuration describes.

    Args:
        config: the configuration.
        data: the data set that the configuration specifies.
        defence: defence to use instead of the configured one.
    """
    config = choose_settings(choose_loss(config, data), len(data.train.targets))
    model, training = move_to_device(build_model(config, data), config.training.device), config.training
    parts = client_parts(config.data, training.seed, data)
    client_size = max(len(part.targets) for part in parts)
    epoch_rounds = rounds_per_epoch(config, client_size)
    return Federation(
        model,
        parts,
        defence or build_defence(config),
        build_optimizer(training),
        schedule=build_schedule(training, epoch_rounds),
        schedule_every=training.schedule_every,
        clip_norm=training.clip_norm,
        batch_size=training.batch_size,
        loss=build_loss(training),
        whole_shard=training.whole_shard,
        participation=training.participation,
        limits=build_limits(config.limits),
        privacy=build_privacy(config, client_size),
        secure_aggregation=config.privacy.secure_aggregation,
        fuse=training.fuse,
        seed=training.seed,
    )


def choose_loss(config: Config, data: Data | None = None) -> Config:
    """Return the configuration with a loss, by default the usual one for the task.

    Without data, the loss stays unset if the task has to be inferred from the records. The federation
    refuses a loss that does not fit the targets.
    """
    loss = config.training.loss
    if data is not None and data.classes and loss == "binary_cross_entropy" and ":" not in config.model.name:
        message = f"this loss needs a binary target for each output, but each record of {data.name!r} has one class"
        fix = "use --loss cross_entropy, or --model package.module:factory for a network with one output"
        raise BadArgument("--loss binary_cross_entropy", message, fix)
    if loss:
        return config
    task = config.data.task or TASKS.get(config.data.name)
    if data is not None:
        if not (data.classes or data.target_scale or config.data.name in TASKS):
            _refuse_ambiguous(data)
        task = "classification" if data.classes else "regression"
    return config if task is None else config.changed(loss=LOSSES[task])


def _refuse_ambiguous(data: Data) -> None:
    """Refuse targets that could be either classes or quantities."""
    targets = data.train.targets
    if is_binary(targets) and bool(targets.any()) and not bool(targets.all()):
        message = "all targets are floating-point 0 or 1, so they could be classes or quantities"
        raise BadArgument(data.name, message, "return them as int64 if they are classes, or pass --loss squared_error")
