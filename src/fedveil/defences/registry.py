"""The registry of defences: the class and the settings of each.

Defences are imported on first use. Other packages can register defences as entry points in the group
"fedveil.defences". A defence can also be referred to as `package.module:Name`.
"""

import contextlib
import dataclasses
import inspect
import math
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
ASK = "ask"
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


_VEIL = {n: n for n in ("groups", "additive", "multiplicative", "permute", "min_coverage", "decoys", "keep_noise")}
_LOCAL = {n: n for n in ("local_epochs", "local_lr", "local_batch", "local_momentum")}
_PPDL = {"ppdl": "setting", "fraction": "fraction", "sigma": "sigma", **_LOCAL}
_SPN = {"spn_weight": "weight", "spn_bits": "bits", "lr": "lr"}
_HERE = "fedveil.defences"
BUILT_IN = (
    Record("plain", "no defence: clients receive the model and send gradients", f"{_HERE}.plain:Plain", _LOCAL),
    Record("veil", "one-time noise on the model, removed from the clients' updates", f"{_HERE}.veil:Veil", _VEIL),
    Record("ppdl", "clients clip, select and add noise to their gradients", f"{_HERE}.ppdl:PPDL.from_setting", _PPDL),
    Record("dbcl", "clients train on a random sketch of the weights", f"{_HERE}.dbcl:DBCL", {"sketch": "q"}),
    Record("spn", "a private head on every client (our re-implementation)", f"{_HERE}.spn:SPN", _SPN),
)
_KNOWN = {record.name: record for record in BUILT_IN}  # defences from other packages are added on first use


def names() -> list[str]:
    """Return the names of all defences, including those registered by installed packages."""
    return list(dict.fromkeys([*(record.name for record in BUILT_IN), *list_installed(GROUP)]))


def find(name: str) -> Record:
    """Return the record for a name, or for `package.module:Name`, which may be a record, a class or a function."""
    if name in _KNOWN:
        return _KNOWN[name]
    spec = list_installed(GROUP).get(name, name)
    if ":" not in spec:
        check_choice("defence", "defence", name, names())
    found = import_object(spec, "a defence", EXAMPLE)
    if isinstance(found, Record):
        record = dataclasses.replace(found, name=name)
    elif callable(found):
        record = Record(name, (inspect.getdoc(found) or name).partition("\n")[0], spec)
    else:
        raise BadArgument(spec, f"it is {type(found).__name__}, not a record, class or function", f"use {EXAMPLE}")
    _KNOWN[name] = record
    return record


def build(name: str, values: Mapping[str, object] = NOTHING, more: Mapping[str, object] = NOTHING) -> "AnyDefence":
    """Build a defence from the configuration values that apply to it; values of None are ignored.

    `more` contains further keyword arguments for its class.
    """
    from fedveil.defences.interface import Defence

    record = find(name)
    make = import_object(record.target, "a defence", EXAMPLE)
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
        what = f"{record.target} returned {type(defence).__name__}, which is not a defence"
        raise BadArgument(name, what, "make it a subclass of fedveil.defences.Defence")
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

    own, found = build(defence) if isinstance(defence, str) else defence, privacy.resolve(default_rate)
    assert found.noise is not None
    if privacy.unit == "client":
        return Private(own, found.clip, found.noise, delta=found.delta, budget=found.epsilon)
    return RecordPrivate(own.for_records() if isinstance(defence, str) else own, found)


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
    check_choice(ASK, "defence", name, names())  # never import code that a server names
    kind = _find_class(name, find(name).target)
    own = vars(kind)  # without inherited attributes: each class must explicitly allow servers to use it
    if not {"codec", "remote_settings"} & own.keys():
        raise BadArgument(ASK, f"servers may not ask for {name}", "define codec or remote_settings in its class")
    allowed = own.get("remote_settings", ())
    for key, value in settings.items():
        if key not in allowed:
            fix = f"send only {', '.join(allowed)}" if allowed else "send no settings"
            raise BadArgument(ASK, f"a server cannot set {key[:40]!a} of {name}", fix)
        if not _is_plain(value):
            raise BadArgument(ASK, f"{key} of {name} must be a number, a short string or a short list of these")
    try:
        defence = kind(**settings)
    except FedveilError:
        raise
    except Exception as error:  # a class from another package may raise anything
        what = f"{name} cannot be built with the server's settings: {type(error).__name__}"
        raise BadArgument(ASK, what, "install the same packages on server and clients") from error
    refuse_repeatable(ASK, defence)
    return defence


def _is_plain(value: object) -> bool:
    items = value if type(value) is list else [value]
    plain = all(item is None or type(item) in (bool, int, float, str) for item in items)
    finite = not any(type(item) is float and not math.isfinite(item) for item in items)
    return plain and finite and len(repr(value)) <= MAX_SETTING_LENGTH


def refuse_repeatable(where: str, defence: "AnyDefence") -> None:
    """Refuse a defence with secrets derived from a seed."""
    if defence.repeatable:
        what = f"{defence.name} with a seed is for tests: seeded noise is not secret"
        raise BadArgument(where, what, "omit seed= and entropy=")


def find_record(defence: object) -> Record | None:
    """Return the record for the class of a defence, or for its nearest base class that has one."""
    records = [*_KNOWN.values(), *(find(name) for name in list_installed(GROUP))]
    for kind in type(defence).__mro__[:-1]:
        for record in records:
            if _import_target(record.target) is kind:
                return record
    return None


def _import_target(target: str) -> object:
    """Import the target of a record; for a class method, return its class."""
    found = import_object(target, "a defence", EXAMPLE)
    return getattr(found, "__self__", found)


@lru_cache(maxsize=64)
def _find_class(name: str, target: str) -> "type[AnyDefence]":
    """Return the class of a defence; cached, because clients need it in every round."""
    from fedveil.defences.interface import Defence

    kind = _import_target(target)
    if not isinstance(kind, type) or not issubclass(kind, Defence):
        what = f"{target} is neither a subclass of Defence nor a class method of one"
        raise BadArgument(name, what, "register the class, so that clients can build it")
    return kind


def find_codec(defence: "AnyDefence") -> "AnyCodec":
    """Return the codec of a defence; raise an error if it has none and its messages cannot be sent."""
    codec = defence.base.codec
    if codec is None:
        fix = f"define its codec (fedveil.defences.Codec), or use one of {', '.join(names())}"
        raise BadArgument(defence.name, "its messages cannot be sent", fix)
    return codec
