"""Determine which configuration keys apply to the chosen data, model and defences, without importing torch."""

import dataclasses
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedveil.checks import check_choice
from fedveil.data.catalogue import CATALOGUE, find_source
from fedveil.defences import registry
from fedveil.errors import BadArgument
from fedveil.lookup import import_object
from fedveil.plain_json import parse_json
from fedveil.runs.settings import PRIVACY_KEYS, SECTION_OF, SECTIONS, Config, Value, format_flags, has_privacy

Scalar = bool | int | float | str
FAMILIES = ("mlp", "cnn", "lenet", "resnet")
NETWORKS = ("mlp", "cnn", "lenet", "resnet8", "resnet20", "resnet32", "resnet44", "resnet56")
_EXTRAS = {
    key: field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    for kind in SECTIONS.values()
    for key, field in kind.model_fields.items()
}
APPLIES_TO = {key: str(extra.get("only", "")).split() for key, extra in _EXTRAS.items()}
"""The data sets or models that each key applies to; empty for keys of defences and keys that apply to all."""
RARE_KEYS = frozenset(key for key, extra in _EXTRAS.items() if extra.get("rare"))
"""Keys that only `--help-all` shows."""

GRADIENTS_REASON = ", whose clients send gradients of a single step"
LOCAL_TRAINING_KEYS = ("optimizer", "lr", "momentum")
"""Keys whose defaults are different with local training (`fedveil.runs.build.choose_settings`)."""


@dataclass(frozen=True)
class Choices:
    """The data set, model and defences chosen for a command."""

    data: str
    model: str
    defences: tuple[str, ...]

    def accepts(self, key: str) -> bool:
        """Return whether a key applies to these choices; unknown names accept every key and are refused later."""
        section = SECTION_OF[key]
        if section == "defence" and key not in (section, "settings"):
            return any(key in defence_keys(name) for name in self.defences)
        family = "resnet" if self.model.startswith("resnet") else self.model
        name, known_names = (self.data, tuple(CATALOGUE)) if section == "data" else (family, FAMILIES)
        return not APPLIES_TO[key] or name in APPLIES_TO[key] or (name not in known_names and ":" not in name)

    def refuse_others(self, keys: Iterable[str], where: str) -> None:
        """Refuse keys that do not apply to these choices."""
        for key in keys:
            if key in SECTION_OF and not self.accepts(key):
                flag = f"--{key.replace('_', '-')}"
                choice = getattr(self, SECTION_OF[key], None) or ",".join(self.defences)
                message = f"{flag} does not apply to --{SECTION_OF[key]} {shlex.quote(choice)}"
                message += GRADIENTS_REASON if key.startswith("local_") else ""
                raise BadArgument(where, message, f"leave it out; it applies only to {', '.join(list_choices(key))}")


def check_flags(flags: Sequence[str], where: str) -> None:
    """Refuse a list flag that is repeated, because only the last one would count."""
    for flag in flags:
        name = f"--{flag.replace('_', '-')}"
        if isinstance(Config().flat().get(flag), tuple) and flags.count(flag) > 1:
            raise BadArgument(where, f"{name} is given twice", f"use {name} FIRST SECOND")


def list_choices(key: str) -> list[str]:
    """Return the data sets, models or defences that a key applies to; empty if it applies to all."""
    defences = registry.INCLUDED.values() if SECTION_OF[key] == "defence" else ()
    return [*APPLIES_TO[key], *(record.name for record in defences if key in record.settings)]


def defence_keys(name: str) -> frozenset[str]:
    """Return the configuration keys that a defence accepts; all keys for an unknown name."""
    if ":" not in name and name not in registry.names():
        return frozenset(SECTION_OF)
    return frozenset(registry.find(name).settings)


def settings_class(name: str) -> type | None:
    """Return the settings class of a defence from another package: the dataclass in its attribute `Settings`."""
    if name in registry.INCLUDED or (":" not in name and name not in registry.names()):
        return None
    result = getattr(import_object(registry.find(name).target, "a defence", registry.EXAMPLE), "Settings", None)
    if not (isinstance(result, type) and dataclasses.is_dataclass(result)):
        return None
    for field in dataclasses.fields(result):
        if field.name in SECTION_OF:
            message = f"its setting {field.name!r} has the same name as a key in [{SECTION_OF[field.name]}]"
            raise BadArgument(name, message, "rename the setting")
    return result


def parse_settings(assignments: Iterable[str]) -> dict[str, Scalar]:
    """Parse NAME=VALUE into keyword arguments; convert numbers, true and false."""
    result: dict[str, Scalar] = {}
    for assignment in assignments:
        name, separator, text = assignment.partition("=")
        if not separator or not name.isidentifier():
            raise BadArgument(
                "--settings", f"{assignment!r} is not NAME=VALUE", "use --settings strength=0.1 mode=fast"
            )
        try:
            value = parse_json(assignment, text)
        except ValueError:
            value = text
        result[name] = value if isinstance(value, bool | int | float) else text
    return result


def applicable_values(config: Config) -> dict[str, Value]:
    """Return the configuration values that apply to the chosen data, model and defence."""
    choices = Choices(config.data.name, config.model.name, (config.defence.name,))
    return {key: value for key, value in config.flat().items() if choices.accepts(key)}


def trains_locally(config: Config) -> bool:
    """Return whether clients train for local epochs; False if the defence does not support them."""
    return config.defence.local_epochs is not None and "local_epochs" in defence_keys(config.defence.name)


def dependent_keys(config: Config) -> tuple[str, ...]:
    """Return the keys whose defaults depend on other settings (`fedveil.runs.build.choose_settings`)."""
    return (*(PRIVACY_KEYS if has_privacy(config) else ()), *(LOCAL_TRAINING_KEYS if trains_locally(config) else ()))


def format_command(config: Config) -> str:
    """Format a configuration as flags for `fedveil train`."""
    changes = config.changed_values()
    if has_privacy(config) and config.privacy.unit == "record":
        changes |= {key: value for key, value in config.flat().items() if key in PRIVACY_KEYS}
    if trains_locally(config):
        changes |= {key: value for key, value in config.flat().items() if key in LOCAL_TRAINING_KEYS}
    return format_flags({key: changes[key] for key in applicable_values(config) if key in changes})


def check_names(config: Config) -> None:
    """Refuse an unknown data set, model or defence, and missing files, without importing torch."""
    if ":" not in config.data.name:
        find_source(config.data.name, config.data.path)
    check_network(config.model.name)
    if ":" not in config.defence.name:
        check_choice("defence", "defence", config.defence.name, registry.names())


def check_network(name: str) -> None:
    """Refuse a model name that is neither one of the library's networks nor a factory."""
    if ":" not in name:
        check_choice("model", "model", name, (*NETWORKS, "package.module:factory"))
