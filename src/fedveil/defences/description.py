"""Describe defences as plain values, and build defences from these descriptions."""

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
        where: the origin of the description, for error messages.
        trust_code: whether to import classes from other packages, which runs their code.
    """
    result = _build(values, where, trust_code)
    if not isinstance(result, Defence):
        raise BadArgument(where, f"expected a defence, got {result!r:.60}", FIX)
    return result


def _build(values: Mapping[str, object], where: str, trust_code: bool) -> object:
    spec, arguments = str(values.get(CLASS)), values.get(ARGUMENTS)
    if not spec.startswith("fedveil.") and not trust_code:
        message = f"importing the defence {spec} runs code from another package"
        raise BadArgument(where, message, "use --trust-code, or trust_code=True in Python")
    if not isinstance(arguments, dict):
        raise BadArgument(where, f"the arguments of {spec} are not known", FIX)
    defence_class = import_object(spec, "a defence", "my_package.defences:Mine")
    if not (isinstance(defence_class, type) and issubclass(defence_class, Defence | Privacy)):
        raise BadArgument(where, f"{spec} is neither a defence nor privacy settings", FIX)
    built_arguments = {
        name: _build(value, where, trust_code) if isinstance(value, dict) else value
        for name, value in arguments.items()
    }
    constructor = cast(Callable[..., object], defence_class)  # type: ignore[explicit-any]
    try:
        return constructor(**built_arguments)
    except TypeError as error:
        raise BadArgument(where, f"{spec} cannot be built: {error}", FIX) from error


def adapt_to_simulation(values: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the description of a defence for a simulation: without a budget, and with noise added by the server.

    The noise in a sum stays the same. An audit may then observe rounds after the budget of the run is spent.
    """
    result = {name: adapt_to_simulation(value) if isinstance(value, dict) else value for name, value in values.items()}
    has_noise = result.get("noise") is not None
    changes: dict[str, JsonValue] = {"budget": None, "epsilon": None} if has_noise else {}
    return result | {name: value for name, value in (changes | {"noise_by": "server"}).items() if name in result}


def copy_defence(defence: AnyDefence) -> AnyDefence:
    """Copy a defence for a simulation, without spending the original's privacy budget.

    A defence whose arguments are not plain values is copied with its state.
    """
    with contextlib.suppress(BadArgument):
        return build_from_description(adapt_to_simulation(describe_defence(defence)), defence.name, trust_code=True)
    return copy.deepcopy(defence)
