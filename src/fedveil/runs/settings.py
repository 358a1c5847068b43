"""The configuration of a run as plain values in sections. This module does not import torch."""

import difflib
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from fedveil.data.catalogue import OpenUnitInterval, PositiveInt, Task
from fedveil.defences.registry import INCLUDED
from fedveil.errors import BadArgument
from fedveil.plain_json import PYTHON, check_schema, read_json, read_toml

T = TypeVar("T")
Value: TypeAlias = bool | int | float | str | tuple[str, ...] | None
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
HalfOpenUnitInterval = Annotated[float, Field(ge=0, lt=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]
LossName = Literal[
    "absolute_error", "binary_cross_entropy", "cross_entropy", "hinge", "huber", "log_cosh", "poisson", "squared_error"
]
MetricName = Literal["accuracy", "auc", "balanced_accuracy", "f1", "loss", "mae", "mse", "r2"]
Aggregator = Literal[
    "mean", "median", "trimmed-mean", "geometric-median", "centred-clipping", "clipped-mean", "krum", "multi-krum"
]
IMAGE_DATA = "cifar10 cifar100 images lesion"
SIZED_DATA = f"digits {IMAGE_DATA}"
SCALED_DATA = "bank csv diabetes images"


def _key(default: T, description: str, only: str = "", *, rare: bool = False) -> T:
    """Declare a configuration key.

    Args:
        default: default value.
        description: help text.
        only: names of the data sets or models that the key applies to; empty if it applies to all.
        rare: whether only `--help-all` shows the key.
    """
    strict = False if isinstance(default, tuple) else None  # convert lists in a file to tuples
    extra: dict[str, JsonValue] = {"only": only, "rare": rare}
    result: T = Field(default, description=description, json_schema_extra=extra, strict=strict)
    return result


class Settings(BaseModel):
    """A section of the configuration. Unknown keys and wrong types are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class NamedSettings(Settings):
    """A section whose first key selects the data set, model or defence that the other keys configure."""

    @property
    def name(self) -> str:
        """The value of the first key."""
        return str(getattr(self, next(iter(type(self).model_fields))))


class DataSettings(NamedSettings):
    """The records, and how they are divided among clients."""

    data: str = _key("digits", "data set (see `fedveil data list`) or package.module:factory")
    path: str | None = _key(None, "file or folder to read; by default, files in FEDVEIL_DATA", f"bank csv {IMAGE_DATA}")
    train_size: PositiveInt | None = _key(None, "use only this many training records", SIZED_DATA)
    test_size: PositiveInt | None = _key(None, "use only this many test records", SIZED_DATA)
    duration: bool = _key(True, "use the duration of the call as an input; it nearly determines the target", "bank")
    task: Task | None = _key(None, "type of task; by default regression for bank, inferred for csv", "bank csv")
    target: str | None = _key(None, "the column to predict", "csv")
    delimiter: str | None = _key(None, "field delimiter, such as ; or tab; detected by default", "csv", rare=True)
    decimal: Literal[".", ","] = _key(".", "decimal mark in numbers", "csv", rare=True)
    missing: Literal["refuse", "drop", "impute"] = _key(
        "refuse", "refuse missing cells, drop incomplete records, or impute cells (median, or an extra category)", "csv"
    )
    ignore: tuple[str, ...] = _key((), "columns that are not inputs", "csv")
    categorical: tuple[str, ...] = _key((), "numeric columns to treat as categories", "csv")
    test_share: OpenUnitInterval | None = _key(
        None, "fraction of the records to test on, unless they are already divided; by default 0.2", "csv images"
    )
    validation: Literal["own"] | OpenUnitInterval | None = _key(
        None, "fraction of the training records to hold out; own: the data set's own records"
    )
    scaling: Literal["records", "public"] | None = _key(
        None,
        "standardise with statistics of the training records, or with public constants (default with privacy)",
        SCALED_DATA,
    )
    size: PositiveInt | None = _key(
        None, "side length of the images in pixels; by default 32, or 64 for lesion", IMAGE_DATA
    )
    labels: str | None = _key(None, "classes to train on, such as 0-4 or first-half; by default all", rare=True)
    clients: PositiveInt = _key(5, "number of clients to divide the training records among")
    split: Literal["iid", "dirichlet", "column"] = _key("iid", "how to divide the records among clients")
    alpha: PositiveFloat = _key(0.5, "for --split dirichlet: smaller values make clients differ more", rare=True)
    column: str | None = _key(None, "for --split column: divide the records by the values in this column", rare=True)


class ModelSettings(NamedSettings):
    """The network."""

    model: str = _key("mlp", "mlp, cnn, lenet, resnet8 to resnet56, or package.module:factory")
    layers: PositiveInt = _key(3, "number of hidden layers", "mlp")
    hidden: PositiveInt = _key(50, "number of units per hidden layer", "mlp")
    bias: bool = _key(True, "add a bias to each layer", "mlp")
    width: PositiveInt = _key(16, "number of channels in the first layer", "cnn resnet")
    activation: Literal["relu", "sigmoid"] = _key("relu", "activation function", "lenet")
    norm: Literal["batch", "group", "none"] = _key(
        "batch", "normalise over the batch or over groups of channels; by default group with privacy", "resnet"
    )
    shortcut: Literal["A", "B"] = _key("A", "shortcuts: zero padding (A) or convolutions (B)", "resnet", rare=True)


class DefenceSettings(NamedSettings):
    """The defence, which protects clients from one another."""

    defence: str = _key("veil", "plain, veil, ppdl, dbcl, spn, an installed defence, or package.module:Class")
    groups: PositiveInt = _key(1, "number of groups of outputs with independent additive noise")
    additive: PositiveFloat = _key(1.0, "scale of the additive noise on the final layer")
    multiplicative: Annotated[float, Field(ge=1)] = _key(4.0, "maximum factor X for hidden units; the minimum is 1/X")
    permute: bool = _key(True, "secretly permute hidden units")
    min_coverage: Annotated[float, Field(ge=0, le=1)] = _key(
        0.0, "refuse a model if less than this fraction of its parameter values can be perturbed", rare=True
    )
    decoys: PositiveInt | None = _key(None, "number of false offsets to send; by default 2, or 0 for squared error")
    keep_noise: bool = _key(
        False, "draw factors, permutation and direction once per run, not once per round (fedveil help veil)", rare=True
    )
    local_epochs: PositiveInt | None = _key(
        None, "number of local epochs per round (FedAvg); by default, clients send one gradient"
    )
    local_lr: PositiveFloat | None = _key(None, "learning rate of local training; by default 0.1", rare=True)
    local_batch: PositiveInt | None = _key(None, "number of records per local step; by default batch_size", rare=True)
    local_momentum: HalfOpenUnitInterval | None = _key(None, "momentum of local training; by default 0", rare=True)
    ppdl: Literal["sel", "noise", "both"] = _key("sel", "send selected entries (sel), add noise (noise), or both")
    fraction: Fraction | None = _key(None, "fraction of the gradient's entries to send; by default 0.1, or 1 for noise")
    sigma: NonNegativeFloat | None = _key(None, "standard deviation of the noise; by default 0.01, or 0 for sel")
    sketch: Annotated[int, Field(ge=2)] = _key(2, "number of inputs per bucket of the sketch")
    percentile: Annotated[float, Field(ge=0, le=100)] = _key(10.0, "send only elements above this percentile")
    gamma: PositiveFloat | None = _key(
        None, "maximum magnitude of an element; by default, as in FLARE, 0.01, or 1e-5 for SVT"
    )
    tau: NonNegativeFloat = _key(1e-6, "threshold of the selection, at most gamma")
    noise_var: PositiveFloat = _key(0.1, "budget of each shared element; its noise has scale 2 gamma / noise_var")
    clipping_norm: PositiveFloat = _key(1.0, "maximum norm of an update")
    sensitivity: PositiveFloat | None = _key(None, "sensitivity to calibrate the noise to; by default clipping_norm")
    message_epsilon: PositiveFloat | None = _key(None, "claimed epsilon of a message; by default 10, or 0.1 for SVT")
    message_delta: OpenUnitInterval = _key(1e-5, "claimed delta of a message")
    noise_multiplier: NonNegativeFloat = _key(1.0, "noise multiplier (standard deviation on the sum / clipping_norm)")
    spn_weight: float = _key(0.1, "weight of the private head's loss")
    spn_bits: PositiveInt = _key(32, "number of bits in the code of each class")
    settings: tuple[str, ...] = _key((), "additional arguments for the defence's class, as NAME=VALUE", rare=True)


class TrainingSettings(Settings):
    """The training loop."""

    loss: LossName | None = _key(None, "loss; by default cross_entropy for classes, otherwise squared_error")
    label_smoothing: HalfOpenUnitInterval = _key(0.0, "for cross_entropy: amount of label smoothing", rare=True)
    optimizer: Literal["adam", "adamw", "sgd"] = _key("adam", "the server's optimizer (sgd with local_epochs)")
    lr: PositiveFloat = _key(1e-3, "the server's learning rate (1 with local_epochs)")
    momentum: HalfOpenUnitInterval = _key(0.9, "for sgd: momentum (0 with local_epochs)", rare=True)
    weight_decay: NonNegativeFloat = _key(0.0, "weight decay", rare=True)
    schedule: Literal["constant", "cosine", "plateau"] = _key(
        "constant", "learning-rate schedule; plateau follows --monitor"
    )
    schedule_every: Literal["epoch", "round"] = _key("epoch", "how often a cosine schedule changes the rate", rare=True)
    clip_norm: PositiveFloat | None = _key(None, "clip the gradient to this norm; no clipping by default")
    epochs: PositiveInt = _key(20, "number of passes over the records of the largest client")
    patience: PositiveInt | None = _key(None, "stop after this number of evaluations without improvement")
    monitor: MetricName | None = _key(None, "metric that chooses the best model; by default accuracy, loss or mse")
    mode: Literal["min", "max"] | None = _key(None, "whether the smallest or the largest value is best", rare=True)
    track_test: bool = _key(False, "with validation, also evaluate the test records after each epoch", rare=True)
    batch_size: PositiveInt = _key(32, "number of records that each client uses per round")
    whole_shard: bool = _key(False, "use all of a client's records in every round")
    participation: Fraction = _key(1.0, "fraction of the clients that take part in each round")
    fuse: bool = _key(True, "compute all clients' gradients in one pass if samples are independent", rare=True)
    seed: int = _key(0, "seed for the initial model and the order of records and clients")
    device: str = _key("cpu", "device to compute on: cpu, cuda, cuda:1, ...")
    checkpoint_every: Annotated[int, Field(ge=0)] = _key(
        0, "number of rounds between checkpoints; 0 for one per epoch", rare=True
    )


NEEDS_NOISE = ("clip", "rate", "noise_by", "unit")
PRIVACY_KEYS = ("rate", "epochs", "clip", "lr", "schedule", "schedule_every", "layers", "norm", "multiplicative")
"""Keys whose defaults are different with differential privacy (`fedveil.runs.build.choose_settings`)."""


class PrivacySettings(Settings):
    """Differential privacy (docs/defences/privacy.md), and secure aggregation."""

    epsilon: PositiveFloat | None = _key(None, "privacy budget, from which the noise is computed")
    noise: NonNegativeFloat | None = _key(None, "noise multiplier (standard deviation / clipping norm)")
    clip: PositiveFloat = _key(1.0, "clip the gradient of each record or client to this norm")
    delta: OpenUnitInterval = _key(1e-5, "delta of the privacy guarantee", rare=True)
    unit: Literal["record", "client"] = _key("record", "unit of protection: a record or a client", rare=True)
    rate: Fraction | None = _key(
        None,
        "sampling probability of a record; by default derived from batch_size, or else 1,024 / all records",
        rare=True,
    )
    noise_by: Literal["server", "clients"] = _key("server", "who adds the noise", rare=True)
    colluding: PositiveInt = _key(1, "number of clients that may collude and reveal their noise", rare=True)
    vanishing: Annotated[int, Field(ge=0)] = _key(0, "number of clients that may drop out of a sum", rare=True)
    secure_aggregation: bool = _key(False, "mask updates so that the server sees only their sum")


class LimitSettings(Settings):
    """Limits on each client, and how gradients are combined; without limits, clients are trusted (docs/hostile.md)."""

    aggregator: Aggregator | None = _key(None, "how to combine gradients; by default, their mean", rare=True)
    hostile: Annotated[int, Field(ge=0)] | None = _key(None, "number of hostile clients tolerated per round", rare=True)
    max_records: PositiveInt | None = _key(None, "maximum number of records counted for a client", rare=True)
    max_share: Fraction | None = _key(None, "maximum weight of a client in the mean", rare=True)
    max_norm: PositiveFloat | None = _key(None, "refuse gradients whose norm exceeds this value", rare=True)
    norm_factor: Annotated[float, Field(ge=1)] | None = _key(
        None, "refuse gradients whose norm exceeds the round's median by this factor", rare=True
    )


class Config(BaseModel):
    """All settings that determine a run, except secrets."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    defence: DefenceSettings = DefenceSettings()
    training: TrainingSettings = TrainingSettings()
    privacy: PrivacySettings = PrivacySettings()
    limits: LimitSettings = LimitSettings()

    def flat(self) -> dict[str, Value]:
        """Return the values by key."""
        return {key: value for section in self.model_dump().values() for key, value in section.items()}

    def explicit_values(self) -> dict[str, Value]:
        """Return the values that were set explicitly; all others are defaults."""
        sections = self.model_dump(exclude_unset=True).values()
        return {key: value for section in sections for key, value in section.items()}

    def changed(self, **values: Value) -> "Config":
        """Return a validated copy with the given values replaced."""
        return configure(self.explicit_values() | values)

    def changed_values(self) -> dict[str, Value]:
        """Return the values that differ from the defaults."""
        default = Config().flat()
        return {key: value for key, value in self.flat().items() if value != default[key]}

    @property
    def title(self) -> str:
        """The data, model and defence, in a form suitable for a folder name."""
        return f"{self.data.name}-{self.model.name}-{self.defence.name}".replace(":", ".")


SECTIONS: dict[str, type[Settings]] = {name: type(field.default) for name, field in Config.model_fields.items()}
SECTION_OF = {key: section for section, kind in SECTIONS.items() for key in kind.model_fields}
"""The section of each key."""
CODE_KEYS = ("data", "model", "defence")
"""Keys that may refer to code, as package.module:name."""


def format_flags(values: Mapping[str, Value]) -> str:
    """Format values as flags; values that are None are left out."""
    words: list[str] = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{flag}")
        elif isinstance(value, tuple):
            words += [f"--{flag}", *value]
        elif value is not None:
            words += [f"--{flag}", str(value)]
    return shlex.join(words)


def _group_by_section(values: Mapping[str, object], where: str) -> dict[str, dict[str, object]]:
    """Group keys by section; refuse a key that is unknown, in the wrong section or repeated."""
    result: dict[str, dict[str, object]] = {section: {} for section in SECTIONS}
    for section, section_values in values.items():
        is_section = isinstance(section_values, Mapping)
        if is_section and section not in SECTIONS:
            matches = difflib.get_close_matches(section, SECTIONS, 1) or list(SECTIONS)
            raise BadArgument(where, f"there is no section [{section}]", f"use [{'] or ['.join(matches)}]")
        for raw_key, value in (
            section_values.items() if isinstance(section_values, Mapping) else [(section, section_values)]
        ):
            key = section if is_section and raw_key == "name" else raw_key.replace("-", "_")
            if key not in SECTION_OF:
                matches = difflib.get_close_matches(key, SECTION_OF, 1)
                names = ", ".join(SECTION_OF)
                fix = f"use {matches[0]!r} in [{SECTION_OF[matches[0]]}]" if matches else f"use one of {names}"
                raise BadArgument(where, f"there is no key {raw_key!r}", fix)
            expected_section = SECTION_OF[key]
            if is_section and section != expected_section:
                raise BadArgument(where, f"{raw_key!r} is in section [{section}]", f"move it to [{expected_section}]")
            if key in result[expected_section]:
                raise BadArgument(where, f"{raw_key!r} is given twice", f"keep the one in [{expected_section}]")
            result[expected_section][key] = value
    return result


def configure(values: Mapping[str, object], where: str = "configuration") -> Config:
    """Build a validated configuration from sections or keys; the error for an invalid value states the rule."""
    sections = _group_by_section(values, where)
    try:
        config = Config.model_validate(
            {name: SECTIONS[name].model_validate(section) for name, section in sections.items()}
        )
    except ValidationError as error:
        raise BadArgument(where, *explain(error)) from None
    _check_combinations(config, where)
    return config


def explain(error: ValidationError) -> tuple[str, str | None]:
    """Describe the first invalid value, and how to fix it."""
    first = error.errors()[0]
    key, rule = ".".join(map(str, first["loc"])) or "it", first["msg"].removeprefix("Input should be ")
    is_quoted = rule in ("a valid integer", "a valid number", "a valid boolean") and isinstance(first["input"], str)
    fix = f"write {key} without quotes" if is_quoted else None
    return f"{key} must be {rule}, got {first['input']!r}", fix


def _check_combinations(config: Config, where: str) -> None:
    """Refuse values that contradict one another."""
    privacy, training = config.privacy, config.training
    if not has_privacy(config):
        changed = [name for name in NEEDS_NOISE if getattr(privacy, name) != PrivacySettings.model_fields[name].default]
        if changed:
            fix = "add --epsilon 3"
            raise BadArgument(where, f"{changed[0]} has no effect without epsilon or noise", fix)
    elif (
        config.defence.name == "veil"
        and privacy.unit == "record"
        and config.explicit_values().get("multiplicative", 1.0) != 1
    ):
        message = (
            f"multiplicative = {config.defence.multiplicative:g} changes the norms of the gradients, which are clipped"
        )
        raise BadArgument(where, message, "leave multiplicative out: with privacy per record, the factors are 1")
    if training.mode and not training.monitor:
        raise BadArgument(where, "mode has no effect without monitor", "add --monitor accuracy")
    if training.track_test and config.data.validation is None:
        raise BadArgument(where, "track_test has no effect without validation", "add --validation 0.1")
    if training.label_smoothing and training.loss not in (None, "cross_entropy"):
        raise BadArgument(where, f"label_smoothing does not apply to {training.loss}", "leave it out")


def has_privacy(config: Config) -> bool:
    """Return whether a configuration uses differential privacy."""
    return config.privacy.epsilon is not None or config.privacy.noise is not None


def refuse_code(values: Mapping[str, object], where: str, named_keys: Collection[str] = ()) -> None:
    """Refuse values in a file that refer to code, except for keys that the user also gave on the command line."""
    for key in CODE_KEYS:
        value = values.get(key)
        if (
            key not in named_keys
            and isinstance(value, str)
            and ":" in value
            and not (key == "defence" and value in INCLUDED)
        ):
            message = (
                f"{key} = {value!r} refers to code that would run when imported, and this file could come from anyone"
            )
            fix = f"pass --{key} {shlex.quote(value)} or --trust-code on the command line, or trust_code=True in Python"
            raise BadArgument(where, message, fix)


def read_file(path: Path) -> dict[str, object]:
    """Read the sections of a TOML file or a run's config.json without validating them; leave out null values."""
    if path.suffix != ".json":
        return dict(read_toml(path))
    result = check_schema(read_json(path), str(path))
    if PYTHON in result:
        message = "this run was started by a Python program, so Fedveil cannot repeat it"
        fix = "run the program again; fedveil audit, fedveil status and load_model(folder) accept the folder"
        raise BadArgument(str(path), message, fix)
    for key, value in result.items():
        if isinstance(value, dict):
            result[key] = {name: item for name, item in value.items() if item is not None}
    return result


def read_values(path: Path) -> dict[str, object]:
    """Read the values in a file by key, without validating them."""
    sections = _group_by_section(read_file(path), str(path))
    return {key: value for section in sections.values() for key, value in section.items()}
