"""Build data, model, defence, loss, optimizer and federation from a configuration."""

import contextlib
import difflib
import inspect
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, ReduceLROnPlateau

from fedveil import data as datasets
from fedveil.data import Data, Part, split
from fedveil.defences import registry
from fedveil.defences.interface import AnyDefence
from fedveil.errors import BadArgument
from fedveil.federation.limits import Limits
from fedveil.federation.local import Federation
from fedveil.files import require_memory
from fedveil.lookup import imported
from fedveil.models import cnn, densenet, lenet, mlp, resnet
from fedveil.records.shards import count_batches
from fedveil.runs.choices import parse_settings
from fedveil.runs.config import Config, DataSettings, LimitSettings, ModelSettings, TrainingSettings
from fedveil.runs.losses import choose_loss
from fedveil.scheme import CrossEntropy, Loss, find_loss

RESNETS = ("resnet8", "resnet20", "resnet32", "resnet44", "resnet56")


def load_data(config: Config) -> Data:
    """Return the data set of a configuration."""
    asked = config.data
    sharing = {"name", "labels", "clients", "split", "alpha", "column"}  # the rest are options of data sets
    options = asked.model_dump(exclude=sharing, exclude_defaults=True)
    if ":" in asked.name:
        if options:
            what = f"--{next(iter(options)).replace('_', '-')} is for data sets of the library"
            raise BadArgument(asked.name, what, "apply it in the factory, and leave it out")
        found = load_own_data(asked.name)
    else:
        if asked.name == "digits" and not config.model.name.startswith("mlp"):
            options["flat"] = False
        found = datasets.load(asked.name, **options)
    if asked.labels is None:
        return found
    return datasets.keep_labels(found, datasets.parse_labels(asked.labels, len(found.classes)))


def client_parts(asked: DataSettings, seed: int, data: Data) -> list[Part]:
    """Return the records of each client."""
    rows = split(data, asked.clients, how=asked.split, seed=seed, alpha=asked.alpha, column=asked.column)
    return [data.train.take(r) for r in rows]


def build_model(config: Config, data: Data) -> nn.Module:
    """Return the named network for the shape of the data, or the model of a factory; the seed repeats it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.training.seed)
        if ":" in config.model.name:
            return load_factory(config.model.name)
        shape, fix = record_shape(config.model.name, data), "choose a smaller --hidden or --width, or smaller records"
        with require_memory("model", f"the values of this {config.model.name}", fix):
            return named_model(config.model, shape, data.outputs)


def record_shape(name: str, data: Data) -> torch.Size:
    """Return the shape of one record for a network of the library."""
    if not isinstance(data.train.inputs, Tensor) or not data.train.inputs.is_floating_point():
        what = f"{name} takes one floating-point tensor, {data!r} has others"
        raise BadArgument("model", what, "use --model package.module:factory for a model of your own")
    return data.train.inputs.shape[1:]


def named_model(asked: ModelSettings, shape: torch.Size, outputs: int) -> nn.Module:
    """Return a network of the library for records of a shape."""
    name, width = asked.name, asked.width
    _check_name(name)
    if name == "mlp":
        net = mlp(shape.numel(), outputs, layers=asked.layers, hidden=asked.hidden, bias=asked.bias)
        return net if len(shape) == 1 else nn.Sequential(nn.Flatten(), net)
    if len(shape) == 1:
        raise BadArgument("model", f"{name} takes images, and a record is {shape[0]} numbers in a row", "use mlp")
    channels = shape[0] if len(shape) == 3 else 1
    if name == "cnn":
        return cnn(channels, outputs, width=width, size=shape[-1])
    if name == "lenet":
        return lenet(channels, outputs, size=shape[-1], activation=asked.activation)
    if name == "densenet":
        return densenet(channels, outputs)
    return resnet(
        int(name.removeprefix("resnet")), channels, outputs, width=width, norm=asked.norm, shortcut=asked.shortcut
    )


def _check_name(name: str) -> None:
    """Refuse a name that no network of the library has, and suggest the nearest."""
    known = ("mlp", "cnn", "lenet", *RESNETS, "densenet")
    if name in known or (name.startswith("resnet") and name[6:].isdigit()):
        return
    near = difflib.get_close_matches(name, known, 1)
    every = f"{', '.join(known)} or package.module:factory"
    raise BadArgument(
        "model", f"there is no model {name!r}", f"{near[0]!r} is the nearest of {every}" if near else every
    )


def load_factory(spec: str) -> nn.Module:
    """Return the model that `package.module:factory` builds or names."""
    model = _call_factory(spec, "a model", "fedveil inspect my_package.models:net", nn.Module)
    if not isinstance(model, nn.Module):
        raise BadArgument(spec, f"gave {type(model).__name__}, not a torch.nn.Module")
    return model


def load_own_data(spec: str) -> Data:
    """Return the data that `package.module:factory` loads: a `fedveil.data.Data`, or train and test in any form.

    Each is (inputs, targets) of tensors, arrays or frames, a Dataset or a DataLoader; see `fedveil.data.from_records`.
    """
    found = _call_factory(spec, "data", "fedveil train --data my_package.data:load --model my_package.models:net", Data)
    if isinstance(found, Data):
        return found
    if isinstance(found, tuple | list) and len(found) == 2:
        return datasets.from_records(spec, found[0], found[1])
    length = f" of {len(found)}" if isinstance(found, tuple | list) else ""
    fix = "return (train, test), each (inputs, targets), a Dataset or a DataLoader; or return fedveil.data.Data"
    raise BadArgument(spec, f"gave {type(found).__name__}{length}, not data", fix)


def _call_factory(spec: str, kind: str, example: str, made: type) -> object:
    """Return the result of `package.module:factory`, or the named object if it is of that type already."""
    found = imported(spec, kind, example)
    if isinstance(found, made):
        return found
    try:
        if not callable(found):
            raise TypeError(f"it is {type(found).__name__}")
        with contextlib.suppress(ValueError):  # built-in classes have no signature
            inspect.signature(found).bind()
    except TypeError as error:
        raise BadArgument(
            spec, f"cannot be called without arguments: {error}", "name a factory without required arguments"
        ) from error
    return found()


def build_defence(config: Config) -> AnyDefence:
    """Return the defence of a configuration, with differential privacy if it is asked for."""
    privacy = config.privacy
    defence = registry.build(config.defence.name, config.flat(), parse_settings(config.defence.settings))
    if privacy.dp_clip is None or privacy.dp_noise is None:
        return defence
    return registry.add_privacy(defence, privacy.dp_clip, privacy.dp_noise, privacy.dp_delta)


def build_limits(asked: LimitSettings) -> Limits | None:
    """Return the limits on clients; None if none are given."""
    given = asked.model_dump(exclude_none=True)
    return Limits(**given) if given else None


def build_loss(asked: TrainingSettings) -> Loss | None:
    """Return the named loss with its settings; None for the default of the targets."""
    if asked.label_smoothing:
        return CrossEntropy(label_smoothing=asked.label_smoothing)
    return None if asked.loss is None else find_loss(asked.loss)


def build_optimizer(asked: TrainingSettings) -> Callable[[Iterable[Tensor]], torch.optim.Optimizer]:
    """Return a constructor of the named optimizer."""
    lr, decay = asked.lr, asked.weight_decay
    if asked.optimizer == "sgd":
        return lambda p: torch.optim.SGD(p, lr, momentum=asked.momentum, weight_decay=decay)
    kind = torch.optim.AdamW if asked.optimizer == "adamw" else torch.optim.Adam
    return lambda p: kind(p, lr, weight_decay=decay)


def build_schedule(
    asked: TrainingSettings, rounds_per_epoch: int
) -> Callable[[torch.optim.Optimizer], LRScheduler] | None:
    """Return a constructor of the named learning-rate schedule; None for a constant rate."""
    if asked.schedule == "constant":
        return None
    if asked.schedule == "plateau":
        return ReduceLROnPlateau
    return partial(CosineAnnealingLR, T_max=asked.epochs * (rounds_per_epoch if asked.schedule_every == "round" else 1))


def move_to_device(model: nn.Module, device: str) -> nn.Module:
    """Move a model to a device; refuse a device that is not available."""
    try:
        return model.to(torch.device(device))
    except (RuntimeError, AssertionError) as error:  # torch asserts where it was built without CUDA
        raise BadArgument(
            "device", f"cannot use {device!r}: {str(error).splitlines()[0]}", "use --device cpu"
        ) from error


def build_federation(
    config: Config, data: Data, defence: AnyDefence | None = None, make: Callable[..., Federation] = Federation
) -> Federation:
    """Return the federation of a configuration before its first round.

    Args:
        config: the configuration.
        data: its data set, loaded.
        defence: replaces the one of the configuration.
        make: a class derived from `Federation`, or one with further arguments.
    """
    config = choose_loss(config, data)
    model, training = move_to_device(build_model(config, data), config.training.device), config.training
    parts = client_parts(config.data, training.seed, data)
    largest = max(len(part.targets) for part in parts)
    return make(
        model,
        parts,
        defence or build_defence(config),
        build_optimizer(training),
        schedule=build_schedule(training, 1 if training.whole_shard else count_batches(largest, training.batch_size)),
        schedule_every=training.schedule_every,
        clip_norm=training.clip_norm,
        batch_size=training.batch_size,
        loss=build_loss(training),
        whole_shard=training.whole_shard,
        participation=training.participation,
        limits=build_limits(config.limits),
        secure_aggregation=config.privacy.secure_aggregation,
        fuse=training.fuse,
        seed=training.seed,
    )
