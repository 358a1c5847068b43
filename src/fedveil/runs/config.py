"""A run as plain values, in sections: from flags, from a TOML file, from a run's folder. No torch is needed for it."""

import difflib
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError
from tyro.conf import arg

from fedveil.errors import BadArgument
from fedveil.plain_json import read_json, read_toml

Value: TypeAlias = bool | int | float | str | tuple[str, ...] | None
Positive = Annotated[int, Field(ge=1)]
LossName = Literal[
    "absolute_error",
    "binary_cross_entropy",
    "cross_entropy",
    "hinge",
    "huber",
    "log_cosh",
    "poisson",
    "squared_error",
]


def _name(flag: str, default: str, description: str) -> Any:
    """The field `name` of a section, whose key and flag is the section's own name."""
    return Field(
        default, validation_alias=AliasChoices(flag, "name"), serialization_alias=flag, description=description
    )


class Settings(BaseModel):
    """A section: unknown keys and wrong types are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, populate_by_name=True)


class DataSettings(Settings):
    """What is learned from, and who holds it."""

    name: Annotated[str, arg(name="data")] = _name(
        "data",
        "digits",
        "a data set (fedveil data list), or package.module:factory, which returns fedveil.data.Data, or training and "
        "test records: each (inputs, targets), a torch Dataset or a DataLoader",
    )
    path: str | None = Field(None, description="file or folder of the data; by default where FEDVEIL_DATA has it")
    train_size: Positive | None = Field(None, description="training records to take; by default all")
    test_size: Positive | None = Field(None, description="test records to take; by default all")
    duration: bool = Field(True, description="bank: keep the length of the call, which nearly gives the answer away")
    task: str | None = Field(
        None, description="bank, csv: regression or classification; csv: by default words and two integers are classes"
    )
    target: str | None = Field(None, description="csv: the column to predict")
    delimiter: str | None = Field(None, description="csv: between fields, such as ; or tab; by default found")
    decimal: Literal[".", ","] = Field(".", description="csv: decimal mark of numbers")
    missing: Literal["refuse", "drop", "impute"] = Field(
        "refuse", description="csv: refuse missing cells, drop their records, or impute them (median, own category)"
    )
    ignore: tuple[str, ...] = Field((), description="csv: columns to leave out", strict=False)
    categorical: tuple[str, ...] = Field((), description="csv: columns of numbers that are categories", strict=False)
    test_share: float | None = Field(
        None, gt=0, lt=1, description="csv, images without test/: share of the records to test on; by default 0.2"
    )
    size: Positive | None = Field(None, description="images: side in pixels")
    labels: str | None = Field(None, description="classes to train on, such as 0-4 or first-half; by default all")
    clients: Positive = Field(5, description="clients that share the training records")
    split: Literal["iid", "dirichlet", "column"] = Field("iid", description="how the records are shared among clients")
    alpha: float = Field(0.5, gt=0, description="split dirichlet: smaller values give clients more different classes")
    column: str | None = Field(None, description="split column: a client gets all records of a value")


class ModelSettings(Settings):
    """The network."""

    name: Annotated[str, arg(name="model")] = _name(
        "model", "mlp", "mlp, cnn, lenet, resnet8 to resnet56, densenet, or package.module:factory"
    )
    layers: Positive = Field(3, description="mlp: hidden layers")
    hidden: Positive = Field(50, description="mlp: units per hidden layer")
    bias: bool = Field(True, description="mlp: layers have biases")
    width: Positive = Field(16, description="cnn, resnet: channels of the first layer")
    activation: Literal["relu", "sigmoid"] = Field("relu", description="lenet: activation function")
    norm: Literal["batch", "none"] = Field("batch", description="resnet: batch normalisation or none")
    shortcut: Literal["A", "B"] = Field("A", description="resnet: shortcuts by padding (A) or by 1 x 1 convolution (B)")


class DefenceSettings(Settings):
    """What protects clients from one another."""

    name: Annotated[str, arg(name="defence")] = _name(
        "defence", "veil", "plain, veil, ppdl, dbcl, spn, an installed one, or package.module:Class"
    )
    groups: Positive = Field(1, description="veil: groups of outputs with their own additive noise (the paper's m)")
    additive: float = Field(1.0, gt=0, description="veil: size of the additive noise on the final layer")
    multiplicative: float = Field(4.0, ge=1, description="veil: factors of hidden units lie between 1/x and x")
    permute: bool = Field(True, description="veil: also permute hidden units secretly")
    min_coverage: float = Field(
        0.0, ge=0, le=1, description="veil: refuse a model if less than this share of its values can be covered"
    )
    decoys: Positive | None = Field(
        None, description="veil: false offsets beside the true one; by default 2, and none for squared error"
    )
    keep_noise: bool = Field(
        False, description="veil: draw factors, permutation and direction once, not in every round (docs: limits)"
    )
    ppdl: Literal["sel", "noise", "both"] = Field("sel", description="ppdl: select, add noise, or both")
    fraction: float | None = Field(None, gt=0, le=1, description="ppdl: share of the gradient that is sent")
    sigma: float | None = Field(None, ge=0, description="ppdl: standard deviation of the noise")
    sketch: int = Field(2, ge=2, description="dbcl: inputs per bucket of a sketch")
    spn_weight: float = Field(0.1, description="spn: weight of the private head's loss")
    spn_bits: Positive = Field(32, description="spn: bits of a class's code")
    rounding: int | None = Field(
        None, description="plain: a seed makes it a rounding baseline, plain training with one rounding error more"
    )
    settings: tuple[str, ...] = Field((), description="settings of a defence of your own, as NAME=VALUE", strict=False)


class TrainingSettings(Settings):
    """How the model is trained."""

    loss: LossName | None = Field(
        None, description="what clients minimise; by default cross_entropy for classes, squared_error for numbers"
    )
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="cross_entropy: share spread over all classes")
    optimizer: Literal["adam", "adamw", "sgd"] = Field("adam", description="the server's optimiser")
    lr: float = Field(1e-3, gt=0, description="learning rate")
    momentum: float = Field(0.9, ge=0, lt=1, description="sgd: momentum")
    weight_decay: float = Field(0.0, ge=0, description="weight decay")
    schedule: Literal["constant", "cosine", "plateau"] = Field(
        "constant", description="learning rate: constant, cosine to 0, or a tenth after 10 evaluations without progress"
    )
    schedule_every: Literal["epoch", "round"] = Field("epoch", description="cosine: how often the rate changes")
    clip_norm: float | None = Field(None, gt=0, description="longest gradient that the optimiser gets")
    epochs: Positive = Field(20, description="passes of the largest client over its records")
    patience: Positive | None = Field(None, description="stop early after so many evaluations without a better one")
    batch_size: Positive = Field(32, description="records that a client takes in a round")
    whole_shard: bool = Field(False, description="clients go through all their records in a round")
    participation: float = Field(1.0, gt=0, le=1, description="share of the clients in a round")
    fuse: bool = Field(True, description="compute clients in one pass where nothing ties samples together")
    seed: int = Field(0, description="of the model's start, the order of records and the choice of clients")
    device: str = Field("cpu", description="where to compute: cpu, cuda, cuda:1 ...")
    checkpoint_every: int = Field(0, ge=0, description="rounds between checkpoints; 0 writes one per epoch")


class PrivacySettings(Settings):
    """What the server may see: differential privacy (both clip and noise, or neither), secure aggregation."""

    dp_clip: float | None = Field(None, gt=0, description="longest gradient of a client")
    dp_noise: float | None = Field(None, ge=0, description="standard deviation of the noise on the sum, over dp_clip")
    dp_delta: float = Field(1e-5, gt=0, lt=1, description="delta at which epsilon is given")
    secure_aggregation: bool = Field(False, description="clients mask their updates, and the server sees sums only")


class LimitSettings(Settings):
    """Bounds on each client, and how gradients are combined; without any, clients are trusted (docs/hostile.md)."""

    aggregator: (
        Literal[
            "mean",
            "median",
            "trimmed-mean",
            "geometric-median",
            "centred-clipping",
            "clipped-mean",
            "krum",
            "multi-krum",
        ]
        | None
    ) = Field(None, description="how clients' gradients become one; by default their mean")
    hostile: int | None = Field(None, ge=0, description="hostile clients of a round that the rule must withstand")
    max_records: Positive | None = Field(None, description="records that a client may count for, whatever it claims")
    max_share: float | None = Field(None, gt=0, le=1, description="largest share of a client in the mean")
    max_norm: float | None = Field(None, gt=0, description="longest gradient of a client; longer ones are refused")
    norm_factor: float | None = Field(None, ge=1, description="longest gradient of a client, in medians of the round")


class Config(BaseModel):
    """Everything that decides a run, but for the secrets."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    defence: DefenceSettings = DefenceSettings()
    training: TrainingSettings = TrainingSettings()
    privacy: PrivacySettings = PrivacySettings()
    limits: LimitSettings = LimitSettings()

    def nested(self) -> dict[str, dict[str, Value]]:
        """By section and key, as in a TOML file and in config.json."""
        return self.model_dump(by_alias=True)

    def flat(self) -> dict[str, Value]:
        """By key, as flags have them."""
        return {key: value for section in self.nested().values() for key, value in section.items()}

    def changed(self, **values: Value) -> "Config":
        """The same configuration with other values, checked."""
        return configure(self.flat() | values)

    def changes(self) -> dict[str, Value]:
        """The values that are not the default."""
        default = Config().flat()
        return {key: value for key, value in self.flat().items() if value != default[key]}

    def flags(self) -> str:
        """The values that are not the default, as flags of `fedveil train`."""
        return flags_of(self.changes())

    @property
    def title(self) -> str:
        """Data, model and defence, for the name of a folder."""
        return f"{self.data.name}-{self.model.name}-{self.defence.name}".replace(":", ".")


SECTIONS: dict[str, type[Settings]] = {name: type(field.default) for name, field in Config.model_fields.items()}
HOME = {(section if name == "name" else name): section for section, of in SECTIONS.items() for name in of.model_fields}
"""The section of each key."""


def flags_of(values: Mapping[str, Value]) -> str:
    """Values as flags; None, which is no value, is left out."""
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


ABSENT = {
    "local_epochs": (
        "clients send gradients of a masked model, which only the server can step, so there are no local epochs; "
        "whole_shard lets a client go through all its records in a round"
    )
}
"""What users look for and do not find, and why."""


def _near(key: str) -> str:
    if key in ABSENT:
        return ABSENT[key]
    near = difflib.get_close_matches(key, HOME, 1)
    return f"did you mean {near[0]!r}, of [{HOME[near[0]]}]?" if near else "valid keys: " + ", ".join(HOME)


def _by_section(values: Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """Keys put into their sections; one that is unknown, elsewhere at home or given twice is refused."""
    found: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for section, group in values.items():
        inside = isinstance(group, Mapping)
        if inside and section not in SECTIONS:
            near = difflib.get_close_matches(section, SECTIONS, 1) or list(SECTIONS)
            raise BadArgument(where, f"there is no section [{section}]", f"did you mean [{'], ['.join(near)}]?")
        for raw, value in group.items() if inside else [(section, group)]:
            key = section if inside and raw == "name" else raw.replace("-", "_")
            if key not in HOME:
                raise BadArgument(where, f"there is no key {raw!r}", _near(key))
            home = HOME[key]
            if inside and section != home:
                raise BadArgument(where, f"{raw!r} is in section [{section}]", f"it belongs to [{home}]")
            if key in found[home]:
                raise BadArgument(where, f"{raw!r} is given twice", f"keep the one in [{home}]")
            found[home][key] = value
    return found


def keys_of(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Sections or keys as keys alone; values are not checked."""
    return {key: value for section in _by_section(values, where).values() for key, value in section.items()}


def configure(values: Mapping[str, Any], where: str = "configuration") -> Config:
    """A checked configuration, from sections or from keys alone; a bad value is an error that says what is allowed."""
    sections = _by_section(values, where)
    try:
        config = Config(**{section: SECTIONS[section](**own) for section, own in sections.items()})  # type: ignore[arg-type]
    except ValidationError as error:
        raise BadArgument(where, *explained(error)) from None
    check(config, where)
    return config


def explained(error: ValidationError) -> tuple[str, str | None]:
    """What is wrong with the first bad value, and what would do."""
    first = error.errors()[0]
    key, rule = ".".join(map(str, first["loc"])) or "it", first["msg"].removeprefix("Input should be ")
    if first["type"] == "extra_forbidden":
        return f"there is no key {key!r}", _near(key)
    wanted = {"a valid integer": "int", "a valid number": "float", "a valid string": "str", "a valid boolean": "bool"}
    quoted = rule in wanted and wanted[rule] != "str" and isinstance(first["input"], str)
    fix = f"write {key} without quotes" if quoted else None
    return f"{key} must be {wanted.get(rule, rule)}, got {first['input']!r}", fix


def check(config: Config, where: str) -> None:
    """Refuse values that do not go together."""
    privacy, defence = config.privacy, config.defence
    if (privacy.dp_clip is None) != (privacy.dp_noise is None):
        given, missing = ("dp_clip", "dp_noise") if privacy.dp_noise is None else ("dp_noise", "dp_clip")
        raise BadArgument(where, f"{given} without {missing} protects nothing", "--dp-clip 1 --dp-noise 1, or neither")
    if defence.rounding is not None and defence.name != "plain":
        what = f"rounding makes a baseline of plain training, not of {defence.name}"
        fix = "fedveil train --defence plain --rounding 1, or fedveil compare --defences plain,baseline"
        raise BadArgument(where, what, fix)
    if config.training.label_smoothing and config.training.loss not in (None, "cross_entropy"):
        raise BadArgument(where, f"label_smoothing: {config.training.loss} has none", "--loss cross_entropy")


PAPER: Mapping[str, Value] = {"loss": "squared_error"}
"""What studies of the paper start from: its loss. Data of users' own are trained on as `fedveil train` does."""
OWN_DATA = ("csv", "images")


def of_users(name: str) -> bool:
    """Whether a data set is the user's own."""
    return name in OWN_DATA or ":" in name


CODE = ("data", "model", "defence")
"""Keys that may name code, as package.module:name."""


def refuse_code(values: Mapping[str, Any], where: str, named: Collection[str] = ()) -> None:
    """Refuse keys and values from elsewhere that name code, but for those keys that the user has named."""
    for key in CODE:
        value = values.get(key)
        if key not in named and isinstance(value, str) and ":" in value:
            what = f"{key} = {value!r} names code: to import it is to run it, and this file may be from anyone"
            fix = f"--{key} {shlex.quote(value)} or --trust-code on the command line, trust_code=True in Python"
            raise BadArgument(where, what, fix)


RETIRED = ("nodes", "tolerance")  # keys of earlier versions, which interpolated losses


def read_file(path: Path) -> dict[str, Any]:
    """The sections and keys of a TOML file, or of a run's config.json, not yet checked; null means not given."""
    return _given(path, read_json(path)) if path.suffix == ".json" else read_toml(path)


def _given(path: Path, values: Any) -> dict[str, Any]:
    """What a JSON file gives values for; keys of earlier versions may be there as long as they were not used."""
    if not isinstance(values, dict):
        raise BadArgument(str(path), f"holds a {type(values).__name__}, not sections", "the config.json of a run")
    for key in RETIRED:
        if values.get(key) is not None:
            raise BadArgument(str(path), f"the run used {key!r}, which is gone", "start it anew; decoys do the same")
    found = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found[key] = {name: own for name, own in value.items() if own is not None}
        elif value is not None and key not in RETIRED:
            found[key] = value
    return found
