"""The registry of defences: the class and the settings of each.

Defences are imported on first use. Other packages can register defences as entry points in the group
"fedveil.defences". A defence can also be referred to as `package.module:Name`.
"""

import contextlib
import dataclasses
import inspect
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from fedveil.checks import check_choice
from fedveil.errors import BadArgument, FedveilError
from fedveil.lookup import import_object, list_installed

if TYPE_CHECKING:
    from fedveil.defences.interface import AnyCodec, AnyDefence
    from fedveil.privacy.settings import Privacy
    from fedveil.wire import Values

GROUP = "fedveil.defences"
EXAMPLE = "my_package.defences:Mine"
REQUEST = "request"
MAX_SETTING_LENGTH = 2**12  # maximum number of characters in a setting sent by a server
NO_VALUES: Mapping[str, object] = {}


@dataclass(frozen=True)
class Record:
    """The entry of a defence in the registry. Classes and functions are given as `package.module:name`."""

    name: str  # the name used to look up the defence
    summary: str  # one line of help
    target: str  # the class, or a function that returns an instance
    settings: Mapping[str, str] = field(default_factory=dict)  # maps configuration keys to arguments
    attackers: str | None = None  # the `fedveil.attacks.registry.Attackers`, if another package defines them
    claim: str = ""  # the guarantee that the authors promise


_VEIL_SETTINGS = {
    n: n for n in ("groups", "additive", "multiplicative", "permute", "min_coverage", "decoys", "keep_noise")
}
_LOCAL_SETTINGS = {n: n for n in ("local_epochs", "local_lr", "local_batch", "local_momentum")}
_PPDL_SETTINGS = {"ppdl": "setting", "fraction": "fraction", "sigma": "sigma", **_LOCAL_SETTINGS}
_SPN_SETTINGS = {"spn_weight": "weight", "spn_bits": "bits", "lr": "lr"}
_PACKAGE = "fedveil.defences"
_VEIL_CLAIM = "the model that a client receives is useless to it, and training is unchanged"
_PERCENTILE_CLAIM = "no epsilon: only the largest changes are shared, truncated to gamma (Shokri and Shmatikov, 2015)"
_SVT_CLAIM = (
    "epsilon + noise_var x shared elements per message, for one element (Dwork and Roth, 2014; FLARE's accountant)"
)
_LOCAL_DP_CLAIM = "(epsilon, delta)-differential privacy of every message towards the server"
_CLIPPING_CLAIM = (
    "(epsilon, delta)-differential privacy of every client, from the noise multiplier (McMahan et al., 2018)"
)
_PPDL_CLAIM = "Gaussian noise or selection hides gradients (Shokri and Shmatikov, 2015); no epsilon"
_DBCL_CLAIM = "the true weights are hidden from clients (double-blind learning)"
_SPN_CLAIM = "a secret head on every client hides its gradients"
BUILT_IN = (
    Record(
        "plain", "no defence: clients receive the model and send gradients", f"{_PACKAGE}.plain:Plain", _LOCAL_SETTINGS
    ),
    Record(
        "veil",
        "one-time noise on the model, removed from the clients' updates",
        f"{_PACKAGE}.veil:Veil",
        _VEIL_SETTINGS,
        claim=_VEIL_CLAIM,
    ),
    Record(
        "ppdl",
        "clients clip, select and add noise to their gradients",
        f"{_PACKAGE}.ppdl:PPDL.from_setting",
        _PPDL_SETTINGS,
        claim=_PPDL_CLAIM,
    ),
    Record(
        "dbcl",
        "clients train on a random sketch of the weights",
        f"{_PACKAGE}.dbcl:DBCL",
        {"sketch": "q"},
        claim=_DBCL_CLAIM,
    ),
    Record(
        "spn",
        "a private head on every client (our re-implementation)",
        f"{_PACKAGE}.spn:SPN",
        _SPN_SETTINGS,
        claim=_SPN_CLAIM,
    ),
)
_SVT_SETTINGS = {
    "fraction": "fraction",
    "message_epsilon": "epsilon",
    "noise_var": "noise_var",
    "gamma": "gamma",
    "tau": "tau",
}
_LOCAL_DP_SETTINGS = {"message_epsilon": "epsilon", "message_delta": "delta"}
_CLIPPING_SETTINGS = {"clipping_norm": "clipping_norm"}
DEPLOYED = (
    Record(
        "nvflare:PercentilePrivacy",
        "clients share only their largest changes, truncated (NVIDIA FLARE's filter)",
        f"{_PACKAGE}.flare_filters:FlarePercentile",
        {"percentile": "percentile", "gamma": "gamma"},
        claim=_PERCENTILE_CLAIM,
    ),
    Record(
        "nvflare:SVTPrivacy",
        "clients share a random selection with Laplace noise (NVIDIA FLARE's filter)",
        f"{_PACKAGE}.flare_filters:FlareSVT",
        _SVT_SETTINGS,
        claim=_SVT_CLAIM,
    ),
    Record(
        "flower:LocalDpMod",
        "clients clip their update and add Gaussian noise (Flower's mod)",
        f"{_PACKAGE}.flower_mods:FlowerLocalDp",
        {**_CLIPPING_SETTINGS, "sensitivity": "sensitivity", **_LOCAL_DP_SETTINGS},
        claim=_LOCAL_DP_CLAIM,
    ),
    Record(
        "flower:fixedclipping_mod",
        "clients clip their update, and the server adds noise (Flower's mod and strategy)",
        f"{_PACKAGE}.flower_mods:FlowerClipping",
        {**_CLIPPING_SETTINGS, "noise_multiplier": "noise_multiplier"},
        claim=_CLIPPING_CLAIM,
    ),
    Record(
        "topk",
        "clients send the largest elements of their update, and the rest later",
        f"{_PACKAGE}.compression:TopK",
        {"fraction": "fraction"},
        claim="none: compression",
    ),
    Record("int8", "clients round their update to 8 bits", f"{_PACKAGE}.compression:Int8", claim="none: compression"),
)
"""Deployed defences, and compression. Names with a package prefix stand for that package's code, if it is installed."""
INCLUDED = {record.name: record for record in (*BUILT_IN, *DEPLOYED)}
_RECORDS = dict(INCLUDED)  # defences from other packages are added on first use


def names() -> list[str]:
    """Return the names of all defences, including those registered by installed packages."""
    return list(dict.fromkeys([*INCLUDED, *list_installed(GROUP)]))


def refers_to_code(name: str) -> bool:
    """Return whether a name is `package.module:Name`, which runs code of another package when it is imported."""
    return ":" in name and name not in INCLUDED


def find(name: str) -> Record:
    """Return the record for a name, or for `package.module:Name`, which may be a record, a class or a function."""
    if name in _RECORDS:
        return _RECORDS[name]
    spec = list_installed(GROUP).get(name, name)
    if ":" not in spec:
        check_choice("defence", "defence", name, names())
    target = import_object(spec, "a defence", EXAMPLE)
    if isinstance(target, Record):
        record = dataclasses.replace(target, name=name)
    elif callable(target):
        record = Record(name, (inspect.getdoc(target) or name).partition("\n")[0], spec)
    else:
        raise BadArgument(spec, f"expected a record, class or function, got {type(target).__name__}", f"use {EXAMPLE}")
    _RECORDS[name] = record
    return record


def build(
    name: str, values: Mapping[str, object] = NO_VALUES, extra_arguments: Mapping[str, object] = NO_VALUES
) -> "AnyDefence":
    """Build a defence from the configuration values that apply to it; values of None are ignored.

    `extra_arguments` contains further keyword arguments for the defence's class.
    """
    from fedveil.defences.interface import Defence

    record = find(name)
    constructor = import_target(record)
    assert callable(constructor)
    arguments = {record.settings[key]: value for key, value in values.items() if key in record.settings}
    arguments = {key: value for key, value in arguments.items() if value is not None} | dict(extra_arguments)
    try:
        with contextlib.suppress(ValueError):  # some built-in classes have no signature
            inspect.signature(constructor).bind(**arguments)
    except TypeError as error:
        fix = f"use {record.target}({', '.join(inspect.signature(constructor).parameters)})"
        raise BadArgument(name, f"the settings do not match: {error}", fix) from error
    if missing_methods := sorted(getattr(constructor, "__abstractmethods__", ())):
        raise BadArgument(name, f"{record.target} does not implement {', '.join(missing_methods)}")
    defence = constructor(**arguments)
    if not isinstance(defence, Defence):
        message = f"{record.target} returned {type(defence).__name__}, which is not a defence"
        raise BadArgument(name, message, "make it a subclass of fedveil.defences.Defence")
    return defence


def add_privacy(defence: "str | AnyDefence", privacy: "Privacy", default_rate: float) -> "AnyDefence":
    """Add differential privacy to a defence.

    Args:
        defence: the defence; if given by name, the variant that suits the guarantee is used.
        privacy: the settings of differential privacy.
        default_rate: the sampling rate to use if `privacy` does not have one.
    """
    from fedveil.defences.private import Private
    from fedveil.defences.record_private import RecordPrivate

    inner, settings = build(defence) if isinstance(defence, str) else defence, privacy.resolve(default_rate)
    assert settings.noise is not None
    if privacy.unit == "client":
        return Private(inner, settings.clip, settings.noise, delta=settings.delta, budget=settings.epsilon)
    return RecordPrivate(inner.for_records() if isinstance(defence, str) else inner, settings)


def protect_records(defence: "AnyDefence", terms: "Values") -> "AnyDefence":
    """Client: add differential privacy for records to a defence, with the settings that a server sends."""
    from fedveil.defences.record_private import RecordPrivate
    from fedveil.privacy.settings import Privacy

    return RecordPrivate(defence, Privacy.from_terms(terms))


def build_for_client(name: str, settings: Mapping[str, object]) -> "AnyDefence":
    """Client: build the defence that a server asks for.

    A server can choose only defences that are installed on the client, and can set only the arguments listed in
    `remote_settings`, and only to plain values. The client controls everything else, such as randomness, files and
    code. A defence with secrets derived from a seed is refused.
    """
    check_choice(REQUEST, "defence", name, names())  # never import code that a server names
    defence_class = _find_class(name, find(name).target)
    attributes = vars(defence_class)  # without inherited attributes: each class must itself allow servers to use it
    if not {"codec", "remote_settings"} & attributes.keys():
        raise BadArgument(REQUEST, f"servers may not ask for {name}", "define codec or remote_settings in its class")
    allowed_settings = attributes.get("remote_settings", ())
    for key, value in settings.items():
        if key not in allowed_settings:
            fix = f"send only {', '.join(allowed_settings)}" if allowed_settings else "send no settings"
            raise BadArgument(REQUEST, f"a server cannot set {key[:40]!a} of {name}", fix)
        if not _is_plain(value):
            raise BadArgument(REQUEST, f"{key} of {name} must be a number, a short string or a short list of these")
    try:
        defence = defence_class(**settings)
    except FedveilError:
        raise
    except Exception as error:  # a class from another package may raise any exception
        message = f"{name} cannot be built with the server's settings: {type(error).__name__}"
        raise BadArgument(REQUEST, message, "install the same packages on server and clients") from error
    refuse_repeatable(REQUEST, defence)
    return defence


def _is_plain(value: object) -> bool:
    items = value if type(value) is list else [value]
    are_plain = all(item is None or type(item) in (bool, int, float, str) for item in items)
    are_finite = not any(type(item) is float and not math.isfinite(item) for item in items)
    return are_plain and are_finite and len(repr(value)) <= MAX_SETTING_LENGTH


def refuse_repeatable(where: str, defence: "AnyDefence") -> None:
    """Refuse a defence with secrets derived from a seed."""
    if defence.repeatable:
        message = f"{defence.name} with a seed is for tests: seeded noise is not secret"
        raise BadArgument(where, message, "omit seed= and entropy=")


def find_record(defence: object) -> Record | None:
    """Return the record for the class of a defence, or for the nearest base class that has a record."""
    records = [*_RECORDS.values(), *(find(name) for name in list_installed(GROUP))]
    unused_names = {record.name for record in DEPLOYED if record.target.partition(":")[0] not in sys.modules}
    for base_class in type(defence).__mro__[:-1]:
        for record in records:
            if record.name not in unused_names and _import_target(record.target) is base_class:
                return record
    return None


def import_target(record: Record) -> object:
    """Import the target of a record; the error for a missing package states the extra that installs it."""
    try:
        return import_object(record.target, "a defence", EXAMPLE)
    except BadArgument as error:
        extra, cause = record.name.partition(":")[0], error.__cause__
        if record.name not in INCLUDED or not isinstance(cause, ModuleNotFoundError):
            raise
        message = f"the defence needs the package {str(cause.name).partition('.')[0]}, which is not installed"
        raise BadArgument(record.name, message, f"run pip install 'fedveil[{extra}]'") from cause


def _import_target(target: str) -> object:
    """Import the target of a record; for a class method, return its class."""
    result = import_object(target, "a defence", EXAMPLE)
    return getattr(result, "__self__", result)


@lru_cache(maxsize=64)
def _find_class(name: str, target: str) -> "type[AnyDefence]":
    """Return the class of a defence; cached, because clients need it in every round."""
    from fedveil.defences.interface import Defence

    import_target(find(name))
    defence_class = _import_target(target)
    if not isinstance(defence_class, type) or not issubclass(defence_class, Defence):
        message = f"{target} is neither a subclass of Defence nor a class method of one"
        raise BadArgument(name, message, "register the class, so that clients can build it")
    return defence_class


def find_codec(defence: "AnyDefence") -> "AnyCodec":
    """Return the codec of a defence; raise an error if it has none, because its messages cannot be sent."""
    codec = defence.base.codec
    if codec is None:
        fix = f"define its codec (fedveil.defences.Codec), or use one of {', '.join(names())}"
        raise BadArgument(defence.name, "the defence has no codec, so its messages cannot be sent", fix)
    return codec
