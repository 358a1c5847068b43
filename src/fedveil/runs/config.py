"""A run as plain values: from flags, from a TOML file, into objects."""

import contextlib
import dataclasses
import difflib
import importlib
import inspect
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor, nn

from fedveil import data as datasets
from fedveil.data import Data
from fedveil.defences import DBCL, PPDL, SPN, Defence, Plain, Private, Veil
from fedveil.errors import BadArgument
from fedveil.models import cnn, densenet, lenet, mlp, resnet
from fedveil.scheme import LOSSES, CrossEntropy, Loss, find_loss

CHOICES: dict[str, tuple[str, ...]] = {
    "defence": ("plain", "veil", "ppdl", "dbcl", "spn"),
    "ppdl": ("sel", "noise", "both"),
    "loss": tuple(LOSSES),
    "optimizer": ("adam", "adamw", "sgd"),
    "schedule": ("constant", "cosine"),
    "split": ("iid", "dirichlet", "column"),
    "norm": ("batch", "none"),
    "shortcut": ("A", "B"),
}
LENETS = {"lenet": "relu", "lenet-sigmoid": "sigmoid"}


@dataclass(frozen=True)
class Config:
    """Everything that decides a run, but for the secrets."""

    data: str = "digits"
    path: str | None = None
    train_size: int | None = None
    test_size: int | None = None
    duration: bool = True
    task: str | None = None
    target: str | None = None
    size: int | None = None
    labels: str | None = None
    clients: int = 5
    split: str = "iid"
    alpha: float = 0.5
    column: str | None = None
    model: str = "mlp"
    layers: int = 3
    hidden: int = 50
    bias: bool = True
    width: int = 16
    norm: str = "batch"
    shortcut: str = "A"
    defence: str = "veil"
    groups: int = 1
    additive: float = 1.0
    multiplicative: float = 4.0
    permute: bool = True
    min_coverage: float = 0.0
    ppdl: str = "sel"
    fraction: float | None = None
    sigma: float | None = None
    sketch: int = 2
    spn_weight: float = 0.1
    spn_bits: int = 32
    rounding: int | None = None
    dp_clip: float | None = None
    dp_noise: float | None = None
    dp_delta: float = 1e-5
    loss: str = "squared_error"
    label_smoothing: float = 0.0
    decoys: int | None = None
    tolerance: float | None = None
    nodes: int | None = None
    optimizer: str = "adam"
    lr: float = 1e-3
    momentum: float = 0.9
    weight_decay: float = 0.0
    schedule: str = "constant"
    epochs: int = 20
    batch_size: int = 32
    whole_shard: bool = False
    participation: float = 1.0
    fuse: bool = True
    seed: int = 0
    device: str = "cpu"
    checkpoint_every: int = 0

    def changes(self) -> dict[str, Any]:
        """The values that are not the default."""
        own, default = dataclasses.asdict(self), dataclasses.asdict(Config())
        return {name: value for name, value in own.items() if value != default[name]}

    def flags(self) -> str:
        """The values that are not the default, as flags of `fedveil train`."""
        words = []
        for name, value in self.changes().items():
            flag = name.replace("_", "-")
            words.append(f"--{'' if value else 'no-'}{flag}" if isinstance(value, bool) else f"--{flag} {value}")
        return " ".join(words)


def kinds(of: type = Config) -> dict[str, type]:
    """The type of each value."""
    hints = get_type_hints(of)
    return {name: next((t for t in get_args(hint) if t is not type(None)), hint) for name, hint in hints.items()}


def configure(values: Mapping[str, Any], where: str = "configuration") -> Config:
    """A checked configuration; an unknown key is an error with the nearest valid one."""
    known = kinds()
    clean: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            fix = f"did you mean {near[0]!r}?" if near else "valid keys: " + ", ".join(known)
            raise BadArgument(where, f"there is no key {key!r}", fix)
        wanted = known[name]
        number = wanted is float and isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not number and type(value) is not wanted:
            raise BadArgument(where, f"{key} must be {wanted.__name__}, got {value!r}")
        if name in CHOICES and value not in CHOICES[name]:
            raise BadArgument(where, f"{key} must be one of {', '.join(CHOICES[name])}, got {value!r}")
        clean[name] = float(value) if number else value
    for name in ("clients", "epochs", "batch_size", "layers", "hidden", "width"):
        if clean.get(name, 1) < 1:
            raise BadArgument(where, f"{name} must be at least 1, got {clean[name]}")
    config = Config(**clean)
    asks_privacy(config, where)
    if config.rounding is not None and config.defence != "plain":
        what = f"rounding makes a control of plain training, not of {config.defence}"
        fix = "fedveil train --defence plain --rounding 1, or fedveil compare --defences plain,control"
        raise BadArgument(where, what, fix)
    return config


def asks_privacy(config: Config, where: str = "configuration") -> bool:
    """Whether differential privacy is asked for; half of it is an error."""
    if (config.dp_clip is None) != (config.dp_noise is None):
        given, missing = ("dp_clip", "dp_noise") if config.dp_noise is None else ("dp_noise", "dp_clip")
        raise BadArgument(where, f"{given} without {missing} protects nothing", "--dp-clip 1 --dp-noise 1, or neither")
    return config.dp_clip is not None


def read_toml(path: Path) -> dict[str, Any]:
    """The keys of a TOML file; tables only group them."""
    try:
        found = tomllib.loads(path.read_text())
    except OSError as error:
        raise BadArgument(str(path), f"cannot be read: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise BadArgument(str(path), f"is not TOML: {error}") from error
    flat: dict[str, Any] = {}
    for key, value in found.items():
        flat |= value if isinstance(value, dict) else {key: value}
    return flat


def load_data(config: Config) -> Data:
    """The data set, with the options that it takes."""
    names = ("train_size", "test_size", "task", "target", "size")
    options = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    if not config.duration:
        options["duration"] = False
    if ":" in config.data:
        found = load_own_data(config.data, [*options, *(["path"] if config.path is not None else [])])
    else:
        if config.data == "digits" and not config.model.startswith("mlp"):
            options["flat"] = False
        found = datasets.load(config.data, path=config.path, **options)
    if config.labels is None:
        return found
    return datasets.keep_labels(found, datasets.parse_labels(config.labels, len(found.classes)))


def build_model(config: Config, data: Data) -> nn.Module:
    """The named network for the data's shape, or what package.module:factory builds; repeatable by the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        if ":" in config.model:
            return load_factory(config.model)
        if not isinstance(data.train.inputs, Tensor) or not data.train.inputs.is_floating_point():
            what = f"{config.model} takes one tensor of floating numbers, {data!r} has others"
            raise BadArgument("model", what, "--model package.module:factory for a model of your own")
        shape = data.train.inputs.shape[1:]
        channels, outputs = (shape[0], data.outputs) if len(shape) == 3 else (1, data.outputs)
        if config.model == "mlp":
            inputs = shape.numel()
            net = mlp(inputs, outputs, layers=config.layers, hidden=config.hidden, bias=config.bias)
            return net if len(shape) == 1 else nn.Sequential(nn.Flatten(), net)
        if len(shape) == 1:
            raise BadArgument(
                "model", f"{config.model} takes images, {data.name} has rows of {shape[0]} numbers", "mlp"
            )
        if config.model == "cnn":
            return cnn(channels, outputs, width=config.width, size=shape[-1])
        if config.model in LENETS:
            return lenet(channels, outputs, size=shape[-1], activation=LENETS[config.model])
        if config.model == "densenet":
            return densenet(channels, outputs)
        if config.model.startswith("resnet") and config.model[6:].isdigit():
            norm, shortcut = config.norm, config.shortcut
            depth = int(config.model[6:])
            return resnet(depth, channels, outputs, width=config.width, norm=norm, shortcut=shortcut)  # type: ignore[arg-type]
    nets = "resnet8, resnet20, resnet32, resnet44, resnet56, densenet"
    fix = f"mlp, cnn, {', '.join(LENETS)}, {nets} or package.module:factory"
    raise BadArgument("model", f"there is no model {config.model!r}", fix)


def load_factory(spec: str) -> nn.Module:
    """The model that `package.module:factory` builds, or names."""
    model = _made(spec, "a model", "fedveil inspect my_package.models:net", nn.Module)
    if not isinstance(model, nn.Module):
        raise BadArgument(spec, f"gave {type(model).__name__}, not a torch.nn.Module")
    return model


def load_own_data(spec: str, options: Sequence[str] = ()) -> Data:
    """The data that `package.module:factory` loads: a `fedveil.data.Data`, or train and test as (inputs, targets).

    `options` are those that were given for data sets of the library, and that mean nothing here.
    """
    if options:
        flag = options[0].replace("_", "-")
        raise BadArgument(spec, f"--{flag} is for data sets of the library", "let the factory do it, and leave it out")
    found = _made(spec, "data", "fedveil train --data my_package.data:load --model my_package.models:net", Data)
    if isinstance(found, Data):
        return found
    if isinstance(found, tuple | list) and len(found) == 2:
        return datasets.from_tensors(spec, found[0], found[1])
    fix = "return fedveil.data.Data, or ((inputs, targets), (inputs, targets)) for training and test"
    raise BadArgument(spec, f"gave {type(found).__name__}, not data", fix)


def _made(spec: str, kind: str, example: str, made: type) -> Any:
    """What `package.module:factory` returns, or names if that is what it should return already."""
    path, _, name = spec.partition(":")
    if not path or not name:
        raise BadArgument(spec, f"{kind} is named as package.module:factory", example)
    try:
        found = getattr(importlib.import_module(path), name)
    except ImportError as error:
        raise BadArgument(spec, f"cannot import {path}: {error}", "run where `import " + path + "` works") from error
    except AttributeError as error:
        raise BadArgument(spec, f"module {path} has no {name!r}") from error
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


def build_defence(config: Config) -> Defence:
    """The named defence with its settings, private if that is asked for."""
    noise = config.groups, config.additive, config.multiplicative
    build: dict[str, Callable[[], Defence]] = {
        "plain": lambda: Plain(rounding=config.rounding),
        "veil": lambda: Veil(
            *noise,
            permute=config.permute,
            min_coverage=config.min_coverage,
            decoys=config.decoys,
            tolerance=config.tolerance,
            nodes=config.nodes,
        ),
        "ppdl": lambda: PPDL.named(config.ppdl, fraction=config.fraction, sigma=config.sigma),
        "dbcl": lambda: DBCL(config.sketch),
        "spn": lambda: SPN(config.spn_weight, config.spn_bits, lr=config.lr),
    }
    defence = build[config.defence]()
    if not asks_privacy(config):
        return defence
    assert config.dp_clip is not None
    assert config.dp_noise is not None
    return Private(defence, config.dp_clip, config.dp_noise, delta=config.dp_delta)


def build_loss(config: Config) -> Loss:
    """The named loss with its settings."""
    if not config.label_smoothing:
        return find_loss(config.loss)
    if config.loss != "cross_entropy":
        raise BadArgument("label_smoothing", f"{config.loss} has none", "--loss cross_entropy")
    return CrossEntropy(label_smoothing=config.label_smoothing)


def build_optimizer(config: Config) -> Callable[[Iterable[Tensor]], torch.optim.Optimizer]:
    """The named optimiser with its settings."""
    lr, decay = config.lr, config.weight_decay
    if config.optimizer == "sgd":
        return lambda p: torch.optim.SGD(p, lr, momentum=config.momentum, weight_decay=decay)
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    return lambda p: kind(p, lr, weight_decay=decay)


def build_schedule(
    config: Config,
) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None:
    """The named learning-rate schedule, which steps once an epoch."""
    if config.schedule == "constant":
        return None
    return lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.epochs)
