"""Flags from annotated functions and classes, by tyro."""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar, Union, get_type_hints

import tyro
from pydantic import ValidationError
from tyro import conf
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from fedveil.cli.commands import COMMANDS
from fedveil.errors import FedveilError
from fedveil.runs.choices import owners, parse_settings
from fedveil.runs.config import DefenceSettings, Settings, Value, explain

C = TypeVar("C")
MARKERS = (conf.DisallowNone, conf.OmitArgPrefixes, conf.OmitSubcommandPrefixes, conf.PositionalRequiredArgs)
HELP_ALL = "--help-all"
Switch = Annotated[bool, conf.FlagCreatePairsOff]
Json = Annotated[Switch, conf.arg(name="json", help="print the result as JSON")]


@dataclasses.dataclass(frozen=True)
class FlagSet:
    """The keys of the configuration that are flags of a command.

    Attributes:
        accepts: returns whether a key is a flag.
        own: settings class of the defence, whose fields are flags too.
        named: whether a help text says which data sets, models or defences a key is for.
    """

    accepts: Callable[[str], bool] = lambda key: True
    own: type | None = None
    named: bool = False

    def describe(self, key: str, text: str | None) -> str:
        """Return the help of a key."""
        names = owners(key) if self.named else []
        return f"{', '.join(names)}: {text}" if names else str(text)

    def registry(self) -> ConstructorRegistry:
        """Return the rule by which tyro makes flags of a section of the configuration."""
        found = ConstructorRegistry()
        found.struct_rule(self.section_rule)
        return found

    def section_rule(self, info: StructTypeInfo) -> StructConstructorSpec | None:
        """Return the flags of a section, whose bad values are refused with their flag."""
        kind = info.type
        if not (isinstance(kind, type) and issubclass(kind, Settings)):
            return None
        base = {name: getattr(info.default, name) for name in kind.model_fields}
        own = self.own_fields(base["settings"]) if kind is DefenceSettings and self.own else []

        def build(**values: Value) -> Settings:
            if own and self.own:
                given = {one.name: (values.pop(one.name), one.default) for one in dataclasses.fields(self.own)}
                values["settings"] = tuple(
                    f"{name}={value}" for name, (value, usual) in given.items() if value != usual
                )
            try:
                return kind.model_validate(base | values)
            except ValidationError as error:
                what, fix = explain(error)
                flag, _, rest = what.partition(" ")
                raise FedveilError(f"--{flag.replace('_', '-')}", rest, fix) from None

        build.__doc__, hints, fields = kind.__doc__, get_type_hints(kind), []
        for name, field in kind.model_fields.items():
            key = field.serialization_alias or name
            if self.accepts(key) and not (own and key == "settings"):
                hint: Any = Annotated[(hints[name], field, *field.metadata)]
                fields.append(StructFieldSpec(name, hint, base[name], self.describe(key, field.description)))
        return StructConstructorSpec(build, (*fields, *own))

    def own_fields(self, settings: Sequence[str]) -> list[StructFieldSpec]:
        """Return the flags of the settings class of a defence."""
        assert self.own
        values, hints = parse_settings(settings), get_type_hints(self.own)
        return [
            StructFieldSpec(one.name, hints[one.name], values.get(one.name, one.default), one.metadata.get("help"))
            for one in dataclasses.fields(self.own)
        ]


EVERYTHING = FlagSet()


def parse(start: C, prog: str, words: Sequence[str], about: str, shown: FlagSet = EVERYTHING) -> C:
    """Return a command with the values of its flags; help, and flags that tyro refuses, raise SystemExit."""
    return tyro.cli(
        type(start),
        prog=prog,
        args=words,
        description=about,
        default=start,
        config=MARKERS,
        registry=shown.registry(),
    )


def find_command(name: str) -> Any:
    """Return what runs a command: a function whose parameters are flags, or a `FederationCommand`."""
    module, _, kind = COMMANDS[name][0].partition(":")
    return getattr(importlib.import_module(f"fedveil.cli.{module}"), kind)


def run_command(name: str, words: Sequence[str]) -> None:
    """Run a command with its flags."""
    command, prog, (_, summary, example) = find_command(name), f"fedveil {name}", COMMANDS[name]
    about = f"{summary[0].upper()}{summary[1:]}.\n\nExample: {prog} {example}"
    if isinstance(command, type):
        command.parse(prog, words, about).run()  # type: ignore[attr-defined]
    else:
        words = ["--help" if word == HELP_ALL else word for word in words]
        tyro.cli(command, prog=prog, args=words, description=about, config=MARKERS)


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], conf.arg(help="the shell to complete in")]) -> None:
    """Print the script, with the commands and flags of everything that is installed."""
    kinds: list[Any] = []
    for name, (_, summary, _) in COMMANDS.items():
        command = find_command(name)
        if isinstance(command, type):
            starts: dict[str, object] = command.starts()  # type: ignore[attr-defined]
            own = [
                Annotated[type(one), conf.subcommand(label or name, description=summary, default=one)]
                for label, one in starts.items()
            ]
            command = own[0] if len(own) == 1 else _choose(name, own)
        else:
            command = Annotated[Any, conf.subcommand(name, description=summary, constructor=command)]
        kinds.append(command)
    every: Any = Union[tuple(kinds)]  # noqa: UP007
    words = ["--tyro-print-completion", shell]
    tyro.cli(every, prog="fedveil", args=words, config=MARKERS, registry=EVERYTHING.registry())


def _choose(name: str, kinds: Sequence[Any]) -> Any:
    """Return a subcommand with one subcommand per kind."""

    def choose(command: Any) -> None:
        """Choose one of them."""

    choose.__annotations__["command"] = Union[tuple(kinds)]  # noqa: UP007
    return Annotated[Any, conf.subcommand(name, constructor=choose)]
