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
NOTHING: Mapping[str, object] = {}


@dataclass(frozen=True)
class Record:
    """The entry of a defence in the registry. Classes and functions are given as `package.module:name`."""

    name: str  # the name used to look it up
    summary: str  # one line of help
    target: str  # its class, or a function that returns an instance
    settings: Mapping[str, str] = field(default_factory=dict)  # maps configuration keys to arguments
    attackers: str | None = None  # its `fedveil.attacks.registry.Attackers`, if another package defines them
    claim: str = ""  # what its authors promise


_VEIL = {n: n for n in ("groups", "additive", "multiplicative", "permute", "min_coverage", "decoys", "keep_noise")}
_LOCAL = {n: n for n in ("local_epochs", "local_lr", "local_batch", "local_momentum")}
_PPDL = {"ppdl": "setting", "fraction": "fraction", "sigma": "sigma", **_LOCAL}
_SPN = {"spn_weight": "weight", "spn_bits": "bits", "lr": "lr"}
_HERE = "fedveil.defences"
_EXACT = "the model that a client receives is useless to it, and training is unchanged"
_LARGEST = "no epsilon: only the largest changes are shared, truncated to gamma (Shokri and Shmatikov, 2015)"
_VECTOR = (
    "epsilon + noise_var x shared elements per message, for one element (Dwork and Roth, 2014; FLARE's accountant)"
)
_MESSAGE = "(epsilon, delta)-differential privacy of every message towards the server"
_CENTRAL = "(epsilon, delta)-differential privacy of every client, from the noise multiplier (McMahan et al., 2018)"
_NOISY = "Gaussian noise or selection hides gradients (Shokri and Shmatikov, 2015); no epsilon"
_SKETCH = "the true weights are hidden from clients (double-blind learning)"
_HEAD = "a secret head on every client hides its gradients"
BUILT_IN = (
    Record("plain", "no defence: clients receive the model and send gradients", f"{_HERE}.plain:Plain", _LOCAL),
    Record(
        "veil",
        "one-time noise on the model, removed from the clients' updates",
        f"{_HERE}.veil:Veil",
        _VEIL,
        claim=_EXACT,
    ),
    Record(
        "ppdl",
        "clients clip, select and add noise to their gradients",
        f"{_HERE}.ppdl:PPDL.from_setting",
        _PPDL,
        claim=_NOISY,
    ),
    Record(
        "dbcl", "clients train on a random sketch of the weights", f"{_HERE}.dbcl:DBCL", {"sketch": "q"}, claim=_SKETCH
    ),
    Record("spn", "a private head on every client (our re-implementation)", f"{_HERE}.spn:SPN", _SPN, claim=_HEAD),
)
_SVT = {"fraction": "fraction", "message_epsilon": "epsilon", "noise_var": "noise_var", "gamma": "gamma", "tau": "tau"}
_LOCAL_DP = {"message_epsilon": "epsilon", "message_delta": "delta"}
_CLIP = {"clipping_norm": "clipping_norm"}
DEPLOYED = (
    Record(
        "nvflare:PercentilePrivacy",
        "clients share only their largest changes, truncated (NVIDIA FLARE's filter)",
        f"{_HERE}.flare_filters:FlarePercentile",
        {"percentile": "percentile", "gamma": "gamma"},
        claim=_LARGEST,
    ),
    Record(
        "nvflare:SVTPrivacy",
        "clients share a random selection with Laplace noise (NVIDIA FLARE's filter)",
        f"{_HERE}.flare_filters:FlareSVT",
        _SVT,
        claim=_VECTOR,
    ),
    Record(
        "flower:LocalDpMod",
        "clients clip their update and add Gaussian noise (Flower's mod)",
        f"{_HERE}.flower_mods:FlowerLocalDp",
        {**_CLIP, "sensitivity": "sensitivity", **_LOCAL_DP},
        claim=_MESSAGE,
    ),
    Record(
        "flower:fixedclipping_mod",
        "clients clip their update, and the server adds noise (Flower's mod and strategy)",
        f"{_HERE}.flower_mods:FlowerClipping",
        {**_CLIP, "noise_multiplier": "noise_multiplier"},
        claim=_CENTRAL,
    ),
    Record(
        "topk",
        "clients send the largest elements of their update, and the rest later",
        f"{_HERE}.compression:TopK",
        {"fraction": "fraction"},
        claim="none: compression",
    ),
    Record("int8", "clients round their update to 8 bits", f"{_HERE}.compression:Int8", claim="none: compression"),
)
"""Deployed defences, and compression. Names with a package prefix stand for that package's code, if it is installed."""
INCLUDED = {record.name: record for record in (*BUILT_IN, *DEPLOYED)}
_KNOWN = dict(INCLUDED)  # defences from other packages are added on first use


def names() -> list[str]:
    """Return the names of all defences, including those registered by installed packages."""
    return list(dict.fromkeys([*INCLUDED, *list_installed(GROUP)]))


def refers_to_code(name: str) -> bool:
    """Return whether a name is `package.module:Name`, which runs code of another package when it is imported."""
    return ":" in name and name not in INCLUDED


def find(name: str) -> Record:
    """Return the record for a name, or for `package.module:Name`, which may be a record, a class or a function."""
    if name in _KNOWN:
        return _KNOWN[name]
    spec = list_installed(GROUP).get(name, name)
    if ":" not in spec:
        check_choice("defence", "defence", name, names())
    result = import_object(spec, "a defence", EXAMPLE)
    if isinstance(result, Record):
        record = dataclasses.replace(result, name=name)
    elif callable(result):
        record = Record(name, (inspect.getdoc(result) or name).partition("\n")[0], spec)
    else:
        raise BadArgument(spec, f"it is {type(result).__name__}, not a record, class or function", f"use {EXAMPLE}")
    _KNOWN[name] = record
    return record


def build(name: str, values: Mapping[str, object] = NOTHING, more: Mapping[str, object] = NOTHING) -> "AnyDefence":
    """Build a defence from the configuration values that apply to it; values of None are ignored.

    `more` contains further keyword arguments for its class.
    """
    from fedveil.defences.interface import Defence

    record = find(name)
    make = import_target(record)
    assert callable(make)
    arguments = {record.settings[key]: value for key, value in values.items() if key in record.settings}
    arguments = {key: value for key, value in arguments.items() if value is not None} | dict(more)
    try:
        with contextlib.suppress(ValueError):  # some built-in classes have no signature
            inspect.signature(make).bind(**arguments)
    except TypeError as error:
        fix = f"use {record.target}({', '.join(inspect.signature(make).parameters)})"
        raise BadArgument(name, f"its settings do not match: {error}", fix) from error
    if missing := sorted(getattr(make, "__abstractmethods__", ())):
        raise BadArgument(name, f"{record.target} does not implement {', '.join(missing)}")
    defence = make(**arguments)
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

    inner, result = build(defence) if isinstance(defence, str) else defence, privacy.resolve(default_rate)
    assert result.noise is not None
    if privacy.unit == "client":
        return Private(inner, result.clip, result.noise, delta=result.delta, budget=result.epsilon)
    return RecordPrivate(inner.for_records() if isinstance(defence, str) else inner, result)


def protect_records(defence: "AnyDefence", terms: "Values") -> "AnyDefence":
    """Client: add differential privacy for records to a defence, with the settings that a server sends."""
    from fedveil.defences.record_private import RecordPrivate
    from fedveil.privacy.settings import Privacy

    return RecordPrivate(defence, Privacy.from_terms(terms))


def build_for_client(name: str, settings: Mapping[str, object]) -> "AnyDefence":
    """Client: build the defence that a server asks for.

    A server can choose only defences that are installed on the client, and can set only the arguments listed in
    `remote_settings`, to plain values. The client controls everything else, such as randomness, files and code. A
    defence with secrets derived from a seed is refused.
    """
    check_choice(REQUEST, "defence", name, names())  # never import code that a server names
    kind = _find_class(name, find(name).target)
    attributes = vars(kind)  # without inherited attributes: each class must explicitly allow servers to use it
    if not {"codec", "remote_settings"} & attributes.keys():
        raise BadArgument(REQUEST, f"servers may not ask for {name}", "define codec or remote_settings in its class")
    allowed = attributes.get("remote_settings", ())
    for key, value in settings.items():
        if key not in allowed:
            fix = f"send only {', '.join(allowed)}" if allowed else "send no settings"
            raise BadArgument(REQUEST, f"a server cannot set {key[:40]!a} of {name}", fix)
        if not _is_plain(value):
            raise BadArgument(REQUEST, f"{key} of {name} must be a number, a short string or a short list of these")
    try:
        defence = kind(**settings)
    except FedveilError:
        raise
    except Exception as error:  # a class from another package may raise anything
        message = f"{name} cannot be built with the server's settings: {type(error).__name__}"
        raise BadArgument(REQUEST, message, "install the same packages on server and clients") from error
    refuse_repeatable(REQUEST, defence)
    return defence


def _is_plain(value: object) -> bool:
    items = value if type(value) is list else [value]
    plain = all(item is None or type(item) in (bool, int, float, str) for item in items)
    finite = not any(type(item) is float and not math.isfinite(item) for item in items)
    return plain and finite and len(repr(value)) <= MAX_SETTING_LENGTH


def refuse_repeatable(where: str, defence: "AnyDefence") -> None:
    """Refuse a defence with secrets derived from a seed."""
    if defence.repeatable:
        message = f"{defence.name} with a seed is for tests: seeded noise is not secret"
        raise BadArgument(where, message, "omit seed= and entropy=")


def find_record(defence: object) -> Record | None:
    """Return the record for the class of a defence, or for its nearest base class that has one."""
    records = [*_KNOWN.values(), *(find(name) for name in list_installed(GROUP))]
    unused = {record.name for record in DEPLOYED if record.target.partition(":")[0] not in sys.modules}
    for kind in type(defence).__mro__[:-1]:
        for record in records:
            if record.name not in unused and _import_target(record.target) is kind:
                return record
    return None


def import_target(record: Record) -> object:
    """Import the target of a record; the error for a missing package states the extra that installs it."""
    try:
        return import_object(record.target, "a defence", EXAMPLE)
    except BadArgument as error:
        extra, missing = record.name.partition(":")[0], error.__cause__
        if record.name not in INCLUDED or not isinstance(missing, ModuleNotFoundError):
            raise
        message = f"needs the package {str(missing.name).partition('.')[0]}, which is not installed"
        raise BadArgument(record.name, message, f"pip install 'fedveil[{extra}]'") from missing


def _import_target(target: str) -> object:
    """Import the target of a record; for a class method, return its class."""
    result = import_object(target, "a defence", EXAMPLE)
    return getattr(result, "__self__", result)


@lru_cache(maxsize=64)
def _find_class(name: str, target: str) -> "type[AnyDefence]":
    """Return the class of a defence; cached, because clients need it in every round."""
    from fedveil.defences.interface import Defence

    import_target(find(name))
    kind = _import_target(target)
    if not isinstance(kind, type) or not issubclass(kind, Defence):
        message = f"{target} is neither a subclass of Defence nor a class method of one"
        raise BadArgument(name, message, "register the class, so that clients can build it")
    return kind


def find_codec(defence: "AnyDefence") -> "AnyCodec":
    """Return the codec of a defence; raise an error if it has none and its messages cannot be sent."""
    codec = defence.base.codec
    if codec is None:
        fix = f"define its codec (fedveil.defences.Codec), or use one of {', '.join(names())}"
        raise BadArgument(defence.name, "its messages cannot be sent", fix)
    return codec
