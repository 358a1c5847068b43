"""What a configuration describes, as objects: data, model, defence, loss, optimiser, federation."""

import contextlib
import difflib
import inspect
from collections.abc import Callable, Iterable, Sequence
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
from fedveil.plain_json import parse_json
from fedveil.records.shards import count_batches
from fedveil.runs.config import Config, DataSettings, LimitSettings, ModelSettings, TrainingSettings
from fedveil.runs.loss_choice import check_choice
from fedveil.scheme import CrossEntropy, Loss, find_loss

RESNETS = ("resnet8", "resnet20", "resnet32", "resnet44", "resnet56")


def load_data(config: Config) -> Data:
    """The data set, with the options that it takes."""
    asked = config.data
    sharing = {"name", "labels", "clients", "split", "alpha", "column"}  # the rest are options of data sets
    options = asked.model_dump(exclude=sharing, exclude_defaults=True)
    if ":" in asked.name:
        found = load_own_data(asked.name, list(options))
    else:
        if asked.name == "digits" and not config.model.name.startswith("mlp"):
            options["flat"] = False
        found = datasets.load(asked.name, **options)
    if asked.labels is None:
        return found
    return datasets.keep_labels(found, datasets.parse_labels(asked.labels, len(found.classes)))


def client_parts(asked: DataSettings, seed: int, data: Data) -> list[Part]:
    """Each client's records."""
    rows = split(data, asked.clients, how=asked.split, seed=seed, alpha=asked.alpha, column=asked.column)
    return [data.train.take(r) for r in rows]


def build_model(config: Config, data: Data) -> nn.Module:
    """The named network for the data's shape, or what package.module:factory builds; repeatable by the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.training.seed)
        if ":" in config.model.name:
            return load_factory(config.model.name)
        shape, fix = record_shape(config.model.name, data), "choose a smaller --hidden or --width, or smaller records"
        with require_memory("model", f"the values of this {config.model.name}", fix):
            return named_model(config.model, shape, data.outputs)


def record_shape(name: str, data: Data) -> torch.Size:
    """The shape of one record, as networks of the library take it."""
    if not isinstance(data.train.inputs, Tensor) or not data.train.inputs.is_floating_point():
        what = f"{name} takes one tensor of floating numbers, {data!r} has others"
        raise BadArgument("model", what, "--model package.module:factory for a model of your own")
    return data.train.inputs.shape[1:]


def named_model(asked: ModelSettings, shape: torch.Size, outputs: int) -> nn.Module:
    """A network of the library, for records of a shape."""
    name, width = asked.name, asked.width
    _check_name(name)
    if name == "mlp":
        net = mlp(shape.numel(), outputs, layers=asked.layers, hidden=asked.hidden, bias=asked.bias)
        return net if len(shape) == 1 else nn.Sequential(nn.Flatten(), net)
    if len(shape) == 1:
        raise BadArgument("model", f"{name} takes images, and a record is {shape[0]} numbers in a row", "mlp")
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
    """Refuse a name that no network of the library has; the nearest one is named."""
    known = ("mlp", "cnn", "lenet", *RESNETS, "densenet")
    if name in known or (name.startswith("resnet") and name[6:].isdigit()):
        return
    near = difflib.get_close_matches(name, known, 1)
    every = f"{', '.join(known)} or package.module:factory"
    raise BadArgument(
        "model", f"there is no model {name!r}", f"{near[0]!r} is the nearest of {every}" if near else every
    )


def load_factory(spec: str) -> nn.Module:
    """The model that `package.module:factory` builds, or names."""
    model = _made(spec, "a model", "fedveil inspect my_package.models:net", nn.Module)
    if not isinstance(model, nn.Module):
        raise BadArgument(spec, f"gave {type(model).__name__}, not a torch.nn.Module")
    return model


def load_own_data(spec: str, options: Sequence[str] = ()) -> Data:
    """The data that `package.module:factory` loads: a `fedveil.data.Data`, or train and test in any form.

    That is (inputs, targets) of tensors, arrays or frames, a Dataset or a DataLoader; see `fedveil.data.from_records`.
    `options` are those that were given for data sets of the library, and that mean nothing here.
    """
    if options:
        flag = options[0].replace("_", "-")
        raise BadArgument(spec, f"--{flag} is for data sets of the library", "let the factory do it, and leave it out")
    found = _made(spec, "data", "fedveil train --data my_package.data:load --model my_package.models:net", Data)
    if isinstance(found, Data):
        return found
    if isinstance(found, tuple | list) and len(found) == 2:
        return datasets.from_records(spec, found[0], found[1])
    length = f" of {len(found)}" if isinstance(found, tuple | list) else ""
    fix = "return (train, test), each (inputs, targets), a Dataset or a DataLoader; or return fedveil.data.Data"
    raise BadArgument(spec, f"gave {type(found).__name__}{length}, not data", fix)


def _made(spec: str, kind: str, example: str, made: type) -> object:
    """What `package.module:factory` returns, or names if that is what it should return already."""
    found = imported(spec, kind, example)
    if isinstance(found, made):
        return found
    try:
        if not callable(found):
            raise TypeError(f"it is {type(found).__name__}")
        with contextlib.suppress(ValueError):  # built-in classes do not tell
            inspect.signature(found).bind()
    except TypeError as error:
        raise BadArgument(spec, f"cannot be called without arguments: {error}", "name a factory that can") from error
    return found()


def build_defence(config: Config) -> AnyDefence:
    """The named defence with its settings, private if that is asked for."""
    privacy = config.privacy
    defence = registry.build(config.defence.name, config.flat(), own_settings(config.defence.settings))
    if privacy.dp_clip is None or privacy.dp_noise is None:
        return defence
    return registry.add_privacy(defence, privacy.dp_clip, privacy.dp_noise, privacy.dp_delta)


def own_settings(words: Sequence[str]) -> dict[str, bool | int | float | str]:
    """NAME=VALUE as arguments of a user's defence; numbers, true and false are what they look like."""
    found: dict[str, bool | int | float | str] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name.isidentifier():
            raise BadArgument("--settings", f"{word!r} is not NAME=VALUE", "--settings strength=0.1 mode=fast")
        try:
            value = parse_json(word, text)
        except ValueError:
            value = text
        found[name] = value if isinstance(value, bool | int | float) else text
    return found


def build_limits(asked: LimitSettings) -> Limits | None:
    """The limits with what was given of them; None if nothing was."""
    given = asked.model_dump(exclude_none=True)
    return Limits(**given) if given else None


def settled(config: Config, data: Data) -> Config:
    """The configuration with the loss that suits the data, if it names none; refuses one that does not."""
    check_choice(config, data)
    if config.training.loss is not None:
        return config
    return config.changed(loss="cross_entropy" if data.classes else "squared_error")


def build_loss(asked: TrainingSettings) -> Loss | None:
    """The named loss with its settings; None for the one that suits the targets."""
    if asked.label_smoothing:
        return CrossEntropy(label_smoothing=asked.label_smoothing)
    return None if asked.loss is None else find_loss(asked.loss)


def build_optimizer(asked: TrainingSettings) -> Callable[[Iterable[Tensor]], torch.optim.Optimizer]:
    """The named optimiser with its settings."""
    lr, decay = asked.lr, asked.weight_decay
    if asked.optimizer == "sgd":
        return lambda p: torch.optim.SGD(p, lr, momentum=asked.momentum, weight_decay=decay)
    kind = torch.optim.AdamW if asked.optimizer == "adamw" else torch.optim.Adam
    return lambda p: kind(p, lr, weight_decay=decay)


def build_schedule(
    asked: TrainingSettings, rounds_per_epoch: int
) -> Callable[[torch.optim.Optimizer], LRScheduler] | None:
    """The named learning-rate schedule."""
    if asked.schedule == "constant":
        return None
    if asked.schedule == "plateau":
        return ReduceLROnPlateau
    return partial(CosineAnnealingLR, T_max=asked.epochs * (rounds_per_epoch if asked.schedule_every == "round" else 1))


def on_device(model: nn.Module, device: str) -> nn.Module:
    """The model on a device; a device that is not there is refused."""
    try:
        return model.to(torch.device(device))
    except (RuntimeError, AssertionError) as error:  # torch asserts where it was built without CUDA
        raise BadArgument("device", f"cannot use {device!r}: {str(error).splitlines()[0]}", "--device cpu") from error


def federation_of(
    config: Config, data: Data, defence: AnyDefence | None = None, make: Callable[..., Federation] = Federation
) -> Federation:
    """The federation that a configuration describes, or with another defence, before its first round.

    Args:
        config: describes it.
        data: what is learned from.
        defence: in place of the configuration's.
        make: a class derived from `Federation`, or one with further arguments.
    """
    config = settled(config, data)
    model, training = on_device(build_model(config, data), config.training.device), config.training
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
