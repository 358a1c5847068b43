"""Describe a defence as plain values, and build it again from them."""

import contextlib
import copy
from collections.abc import Callable, Mapping
from typing import cast

from pydantic import JsonValue

from fedveil.defences.interface import AnyDefence, Defence
from fedveil.defences.registry import find_record
from fedveil.errors import BadArgument
from fedveil.lookup import import_object
from fedveil.privacy.settings import Privacy

CLASS, ARGUMENTS = "class", "arguments"
FIX = "pass the defence: fedveil.audit(folder, defence=...)"


def describe_defence(defence: AnyDefence) -> dict[str, JsonValue]:
    """Return a defence's names, class and arguments; arguments are None if they are not plain values.

    `base` is the name of the registered defence that defines the messages, without differential privacy.
    """
    record = find_record(defence.requested)
    try:
        result = _describe(defence)
    except TypeError:
        result = {CLASS: class_name(type(defence)), ARGUMENTS: None}
    return {"name": defence.name, "base": record.name if record else defence.requested.name, **result}


def class_name(kind: type) -> str:
    """Return a class as `package.module:Name`."""
    return f"{kind.__module__}:{kind.__qualname__}"


def _describe(value: object) -> dict[str, JsonValue]:
    arguments = value.arguments() if isinstance(value, Defence) else vars(value)
    return {CLASS: class_name(type(value)), ARGUMENTS: {name: _plain(argument) for name, argument in arguments.items()}}


def _plain(value: object) -> JsonValue:
    if isinstance(value, Defence | Privacy):
        return _describe(value)
    if value is None or type(value) in (bool, int, float, str):
        return cast(JsonValue, value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} is not a plain value")


def build_from_description(values: Mapping[str, object], where: str, *, trust_code: bool = False) -> AnyDefence:
    """Build the defence that a description specifies.

    Args:
        values: the description, from `describe_defence`.
        where: its origin, for error messages.
        trust_code: whether to import a class of another package, which runs that package's code.
    """
    result = _build(values, where, trust_code)
    if not isinstance(result, Defence):
        raise BadArgument(where, f"its defence is {result!r:.60}, which is not a defence", FIX)
    return result


def _build(values: Mapping[str, object], where: str, trust_code: bool) -> object:
    spec, arguments = str(values.get(CLASS)), values.get(ARGUMENTS)
    if not spec.startswith("fedveil.") and not trust_code:
        message = f"its defence is {spec}, and importing it runs that package's code"
        raise BadArgument(where, message, "use --trust-code, or trust_code=True in Python")
    if not isinstance(arguments, dict):
        raise BadArgument(where, f"the arguments of {spec} are not known", FIX)
    kind = import_object(spec, "a defence", "my_package.defences:Mine")
    if not (isinstance(kind, type) and issubclass(kind, Defence | Privacy)):
        raise BadArgument(where, f"{spec} is neither a defence nor privacy settings", FIX)
    built = {
        name: _build(value, where, trust_code) if isinstance(value, dict) else value
        for name, value in arguments.items()
    }
    make = cast(Callable[..., object], kind)  # type: ignore[explicit-any]
    try:
        return make(**built)
    except TypeError as error:
        raise BadArgument(where, f"{spec} cannot be built: {error}", FIX) from error


def adapt_to_simulation(values: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the description of a defence for a simulation: without a budget, and with noise added by the server.

    The noise in a sum stays the same. An audit may then observe rounds after the budget of the run is spent.
    """
    result = {name: adapt_to_simulation(value) if isinstance(value, dict) else value for name, value in values.items()}
    spends = result.get("noise") is not None
    changes: dict[str, JsonValue] = {"budget": None, "epsilon": None} if spends else {}
    return result | {name: value for name, value in (changes | {"noise_by": "server"}).items() if name in result}


def copy_defence(defence: AnyDefence) -> AnyDefence:
    """Return a defence with the same settings for a simulation, which spends no privacy budget of the original.

    A defence whose arguments are not plain values is copied with its state.
    """
    with contextlib.suppress(BadArgument):
        return build_from_description(adapt_to_simulation(describe_defence(defence)), defence.name, trust_code=True)
    return copy.deepcopy(defence)
