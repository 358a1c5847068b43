"""Every defence, one record each: its class and its settings.

Nothing is imported before it is used. A package of your own enters its defences in the group "fedveil.defences" of
entry points, or they are named as `package.module:Name`.
"""

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedveil.checks import one_of
from fedveil.errors import BadArgument, FedveilError
from fedveil.lookup import imported, installed

if TYPE_CHECKING:
    from fedveil.defences.interface import AnyCodec, AnyDefence

GROUP = "fedveil.defences"
EXAMPLE = "my_package.defences:Mine"
ASK = "ask"
LONGEST_SETTING = 2**12  # characters of a setting that a server sends
NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Record:
    """A defence as the rest of the library knows it. Code is named as `package.module:name`."""

    name: str  # by which it is found
    summary: str  # one line of help
    target: str  # its class, or a function that makes one
    settings: Mapping[str, str] = field(default_factory=dict)  # key of a configuration -> argument of the target
    attackers: str | None = None  # its attackers, if another package has them: a `fedveil.attacks.registry.Attackers`


_VEIL = ("groups", "additive", "multiplicative", "permute", "min_coverage", "decoys", "keep_noise")
BUILT_IN = (
    Record(
        "plain",
        "no defence: clients get the model and send gradients",
        "fedveil.defences.plain:Plain",
    ),
    Record(
        "veil",
        "one-time noise on the model, removed from what clients send",
        "fedveil.defences.veil:Veil",
        settings={name: name for name in _VEIL},
    ),
    Record(
        "ppdl",
        "clients clip, select and noise their gradients",
        "fedveil.defences.ppdl:PPDL.named",
        settings={"ppdl": "setting", "fraction": "fraction", "sigma": "sigma"},
    ),
    Record(
        "dbcl",
        "clients train on a random sketch of the weights",
        "fedveil.defences.dbcl:DBCL",
        settings={"sketch": "q"},
    ),
    Record(
        "spn",
        "a private head at every client (our re-implementation)",
        "fedveil.defences.spn:SPN",
        settings={"spn_weight": "weight", "spn_bits": "bits", "lr": "lr"},
    ),
)
_KNOWN = {record.name: record for record in BUILT_IN}  # and those of other packages, once they were found


def names() -> list[str]:
    """The names of all defences: the library's, then those of installed packages."""
    return list(dict.fromkeys([*(record.name for record in BUILT_IN), *installed(GROUP)]))


def find(name: str) -> Record:
    """The record of a defence: by its name, or by `package.module:Name` of a record, a class or a function."""
    if name in _KNOWN:
        return _KNOWN[name]
    spec = installed(GROUP).get(name, name)
    if ":" not in spec:
        one_of("defence", "defence", name, names())
    found = imported(spec, "a defence", EXAMPLE)
    if isinstance(found, Record):
        record = dataclasses.replace(found, name=name)
    elif callable(found):
        record = Record(name, (inspect.getdoc(found) or name).partition("\n")[0], spec)
    else:
        raise BadArgument(spec, f"is {type(found).__name__}: neither a record nor a class nor a function", EXAMPLE)
    _KNOWN[name] = record
    return record


def build(name: str, values: Mapping[str, object] = NOTHING, more: Mapping[str, object] = NOTHING) -> "AnyDefence":
    """A defence with those of a configuration's values that it has a setting for, unless they are None.

    `more` are further arguments of its class, by their own names.
    """
    from fedveil.defences.interface import Defence

    record = find(name)
    make: Any = imported(record.target, "a defence", EXAMPLE)
    arguments = {record.settings[key]: value for key, value in values.items() if key in record.settings}
    arguments = {key: value for key, value in arguments.items() if value is not None} | dict(more)
    try:
        with contextlib.suppress(ValueError):  # built-in classes do not tell
            inspect.signature(make).bind(**arguments)
    except TypeError as error:
        fix = f"{record.target}({', '.join(inspect.signature(make).parameters)})"
        raise BadArgument(name, f"its settings do not fit: {error}", fix) from error
    if inspect.isabstract(make):
        raise BadArgument(name, f"{record.target} lacks {', '.join(sorted(make.__abstractmethods__))}")
    defence = make(**arguments)
    if not isinstance(defence, Defence):
        what = f"{record.target} gave {type(defence).__name__}, which is not a defence"
        raise BadArgument(name, what, "derive it from fedveil.defences.Defence")
    return defence


def add_privacy(defence: "AnyDefence", clip: float, noise: float, delta: float) -> "AnyDefence":
    """Return a defence with differential privacy for clients on top."""
    from fedveil.defences.private import Private

    return Private(defence, clip, noise, delta=delta)


def build_for_client(name: str, settings: Mapping[str, object]) -> "AnyDefence":
    """Client: build the defence that a server asks for.

    Servers choose among the defences that are installed here, and may set what a defence lists in `remote_settings`,
    with plain values. All else stays the client's: seeds and sources of noise, files, code. A defence whose secrets
    follow from a seed is refused.
    """
    one_of(ASK, "defence", name, names())  # never imports what a server names
    kind = _find_class(find(name))
    own = vars(kind)  # not inherited: a class has to say itself that servers may ask for it, and what they may set
    if not {"codec", "remote_settings"} & own.keys():
        raise BadArgument(ASK, f"{name} is not for servers to ask for", "define codec or remote_settings in its class")
    allowed = own.get("remote_settings", ())
    for key, value in settings.items():
        if key not in allowed:
            known = ", ".join(allowed) or "nothing"
            raise BadArgument(ASK, f"a server cannot set {key[:40]!a} of {name}", f"send no settings but: {known}")
        if not _is_plain(value):
            raise BadArgument(ASK, f"{key} of {name} is neither a number nor a short text nor a short list of these")
    try:
        defence = kind(**settings)
    except FedveilError:
        raise
    except Exception as error:  # whatever a class of another package makes of such values
        what = f"{name} cannot be built with the server's settings: {type(error).__name__}"
        raise BadArgument(ASK, what, "install the same packages on server and clients") from error
    refuse_repeatable(ASK, defence)
    return defence


def _is_plain(value: object) -> bool:
    items = value if type(value) is list else [value]
    plain = all(item is None or type(item) in (bool, int, float, str) for item in items)
    finite = not any(type(item) is float and not math.isfinite(item) for item in items)
    return plain and finite and len(repr(value)) <= LONGEST_SETTING


def refuse_repeatable(where: str, defence: "AnyDefence") -> None:
    """Refuse a defence whose secrets follow from a seed."""
    if defence.repeatable:
        what = f"{defence.name} with a seed is for tests: seeded noise is not secret"
        raise BadArgument(where, what, "leave seed= and entropy= out of the defence")


def _records() -> Iterator[Record]:
    yield from list(_KNOWN.values())
    yield from (find(name) for name in installed(GROUP))


def find_record(defence: object) -> Record | None:
    """The record of an object's class, or of the nearest class that it derives from."""
    for kind in type(defence).__mro__[:-1]:
        for record in _records():
            target: Any = imported(record.target, "a defence", EXAMPLE)
            if getattr(target, "__self__", target) is kind:  # a class method stands for its class
                return record
    return None


def _find_class(record: Record) -> "type[AnyDefence]":
    """Return the class of a defence; a class method stands for its class."""
    from fedveil.defences.interface import Defence

    target = imported(record.target, "a defence", EXAMPLE)
    kind = getattr(target, "__self__", target)
    if not isinstance(kind, type) or not issubclass(kind, Defence):
        what = f"{record.target} is neither a class that derives from Defence nor a class method of one"
        raise BadArgument(record.name, what, "register the class, so that clients can build it")
    return kind


def find_codec(defence: "AnyDefence") -> "AnyCodec":
    """Return the codec of a defence; one without cannot be used over a network or under secure aggregation."""
    codec = defence.base.codec
    if codec is None:
        fix = f"give it a codec (fedveil.defences.Codec); {', '.join(names())} have one"
        raise BadArgument(defence.name, "its messages cannot travel", fix)
    return codec
