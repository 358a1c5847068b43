"""Every defence, one record each: its class, its settings, its serialiser, its attackers.

Nothing is imported before it is used. A package of your own enters its defences in the group "fedveil.defences" of
entry points, or they are named as `package.module:Name`.
"""

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedveil.checks import one_of
from fedveil.errors import BadArgument, FedveilError
from fedveil.lookup import imported, installed

if TYPE_CHECKING:
    from fedveil.defences.interface import Defence
    from fedveil.defences.plain import PlainMessages

GROUP = "fedveil.defences"
EXAMPLE = "my_package.defences:Mine"
ASK = "ask"
LONGEST_SETTING = 2**12  # characters of a setting that a server sends
NOTHING: Mapping[str, Any] = {}
GENERIC_ROUNDS = 6
GENERIC: Mapping[str, str] = {  # attackers that know nothing of a defence, by label
    "broadcasts averaged": "fedveil.attacks.generic:averaged",
    "outputs calibrated": "fedveil.attacks.generic:calibrated",
}


@dataclass(frozen=True)
class Record:
    """What the rest of the library knows about a defence. Code is named as `package.module:name`."""

    name: str  # by which it is found
    summary: str  # one line of help
    target: str  # its class, or a function that makes one
    settings: Mapping[str, str] = field(default_factory=dict)  # key of a configuration -> argument of the target
    messages: str | None = None  # serialiser of its broadcasts and updates, an object like `PlainMessages`
    attackers: Mapping[str, str] = field(default_factory=dict)  # adaptive ones, by label
    generic: Collection[str] = tuple(GENERIC)  # labels of generic ones that also run
    strongest: tuple[str, ...] = ()  # labels of the strongest of them, which long attacks are run with
    rounds: int = 1  # broadcasts that its own attackers collect
    rebuilders: Mapping[str, str] = field(default_factory=dict)  # rebuild a record from broadcasts, by label
    rebuild_rounds: int = 2  # broadcasts that these collect
    leaks: Mapping[str, str] = field(default_factory=dict)  # gradients that an adaptive attacker derives, by label
    shadows: str | None = None  # the defence whose shadow models serve for this one; None: its own

    @property
    def collected(self) -> int:
        """Broadcasts that its attackers collect, generic ones included."""
        return max(self.rounds, GENERIC_ROUNDS) if self.generic else self.rounds


_VEIL = ("groups", "additive", "multiplicative", "permute", "min_coverage", "decoys", "keep_noise")
BUILT_IN = (
    Record(
        "plain",
        "no defence: clients get the model and send gradients",
        "fedveil.defences.plain:Plain",
        messages="fedveil.defences.plain:MESSAGES",
        generic=(),
    ),
    Record(
        "veil",
        "one-time noise on the model, removed from what clients send",
        "fedveil.defences.veil:Veil",
        settings={name: name for name in _VEIL},
        messages="fedveil.defences.veil:MESSAGES",
        generic=(),  # its own are stronger
        attackers={
            "offset removed": "fedveil.attacks.veil:centred",
            "two broadcasts, no data": "fedveil.attacks.broadcasts:two_broadcasts",
            "six broadcasts, no data": "fedveil.attacks.broadcasts:six_broadcasts",
            "own labels": "fedveil.attacks.veil:calibrated",
        },
        strongest=("own labels", "two broadcasts, no data"),
        rounds=6,
        rebuilders={"two broadcasts, own records": "fedveil.attacks.first_layer:record_under_a_veil"},
        leaks={"V-diff, two broadcasts": "fedveil.attacks.canonical_gradient:from_canonical_difference"},
        shadows="plain",
    ),
    Record(
        "ppdl",
        "clients clip, select and noise their gradients",
        "fedveil.defences.ppdl:PPDL.named",
        settings={"ppdl": "setting", "fraction": "fraction", "sigma": "sigma"},
        messages="fedveil.defences.ppdl:MESSAGES",
        generic=(),  # clients have the model
        rebuilders={"rounds stacked": "fedveil.attacks.ppdl:stacked"},
        rebuild_rounds=6,
        leaks={"V-diff, masked": "fedveil.attacks.leaks:from_masked_difference"},
    ),
    Record(
        "dbcl",
        "clients train on a random sketch of the weights",
        "fedveil.defences.dbcl:DBCL",
        settings={"sketch": "q"},
        messages="fedveil.defences.dbcl:MESSAGES",
        attackers={"sketches stacked": "fedveil.attacks.dbcl:stacked"},
        generic=(),  # the mean of two sketches is no sketch, and calibration adds nothing (docs/audit.md)
        strongest=("sketches stacked",),
        rounds=6,
        rebuilders={"sketches stacked": "fedveil.attacks.dbcl:record"},
        rebuild_rounds=6,
    ),
    Record(
        "spn",
        "a private head at every client (our re-implementation)",
        "fedveil.defences.spn:SPN",
        settings={"spn_weight": "weight", "spn_bits": "bits", "lr": "lr"},
        messages="fedveil.defences.spn:MESSAGES",
        generic=(),  # clients have the model
    ),
)
_KNOWN = {record.name: record for record in BUILT_IN}  # and those of other packages, once they were found


def attackers_of(record: Record) -> dict[str, str]:
    """Its own adaptive attackers and the generic ones, by label."""
    return {**record.attackers, **{label: GENERIC[label] for label in record.generic}}


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


def build(name: str, values: Mapping[str, object] = NOTHING, more: Mapping[str, object] = NOTHING) -> "Defence":
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
        what = f"{record.target} gave {type(defence).__name__}, which does not have the methods of a defence"
        raise BadArgument(name, what, "derive it from fedveil.defences.Defence")
    return defence


def build_for_client(name: str, settings: Mapping[str, Any]) -> "tuple[PlainMessages, Defence]":
    """Client: a defence that a server asks for, and the serialiser of its messages.

    Servers choose among the defences that are installed here, and set what the serialiser lists in `settings`, with
    plain values. All else stays the client's: seeds and sources of noise, files, code. A defence whose secrets follow
    from a seed is refused.
    """
    one_of(ASK, "defence", name, names())  # never imports what a server names
    messages = messages_of(find(name), name)
    for key, value in settings.items():
        if key not in messages.settings:
            known = ", ".join(messages.settings) or "nothing"
            raise BadArgument(ASK, f"a server cannot set {key[:40]!a} of {name}", f"send no settings but: {known}")
        if not _is_plain(value):
            raise BadArgument(ASK, f"{key} of {name} is neither a number nor a short text nor a short list of these")
    try:
        defence = messages.build(**settings)
    except FedveilError:
        raise
    except Exception as error:  # whatever a class of another package makes of such values
        what = f"{name} cannot be built with the server's settings: {type(error).__name__}"
        raise BadArgument(ASK, what, "install the same packages on server and clients") from error
    refuse_repeatable(ASK, defence)
    return messages, defence


def _is_plain(value: object) -> bool:
    items = value if type(value) is list else [value]
    plain = all(item is None or type(item) in (bool, int, float, str) for item in items)
    finite = not any(type(item) is float and not math.isfinite(item) for item in items)
    return plain and finite and len(repr(value)) <= LONGEST_SETTING


def refuse_repeatable(where: str, defence: "Defence") -> None:
    """Refuse a client's defence whose secrets follow from a seed."""
    if defence.repeatable:
        what = f"{defence.name} with a seed is for tests: on a network its secrets are none"
        raise BadArgument(where, what, "leave seed= and entropy= out of the defence")


def _records() -> Iterator[Record]:
    yield from list(_KNOWN.values())
    yield from (find(name) for name in installed(GROUP))


def record_of(defence: object) -> Record | None:
    """The record of an object's class, or of the nearest class that it derives from."""
    for kind in type(defence).__mro__[:-1]:
        for record in _records():
            target: Any = imported(record.target, "a defence", EXAMPLE)
            if getattr(target, "__self__", target) is kind:  # a class method stands for its class
                return record
    return None


def messages_of(record: Record | None, name: str) -> "PlainMessages":
    """The serialiser of a defence's messages."""
    if record is None or record.messages is None:
        fix = f"fedveil.defences.registry.Record(..., messages=...); those of {', '.join(names())} can travel"
        raise BadArgument(name, "no serialiser is registered for it", fix)
    found: Any = imported(record.messages, "how a defence's messages travel", f"{EXAMPLE}_MESSAGES")
    return found  # type: ignore[no-any-return]
