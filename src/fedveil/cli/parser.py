"""Parse flags with tyro, which derives them from annotated functions and classes."""

import itertools
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, Union, get_type_hints

import tyro
from pydantic import ValidationError
from tyro import conf
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from fedveil.cli.commands import COMMANDS, find_command
from fedveil.defences.registry import refers_to_code
from fedveil.errors import BadArgument, FedveilError
from fedveil.runs.choices import RARE_KEYS, Choices, check_flags, list_choices, settings_class
from fedveil.runs.settings import Config, DefenceSettings, Settings, Value, configure, explain, read_values, refuse_code

C = TypeVar("C")
MARKERS = (conf.DisallowNone, conf.OmitArgPrefixes, conf.OmitSubcommandPrefixes, conf.PositionalRequiredArgs)
HELP_ALL = "--help-all"
HIDE_DEFAULT = conf.arg(help_behavior_hint="")
Switch = Annotated[bool, conf.FlagCreatePairsOff, conf.arg(help_behavior_hint="")]
Json = Annotated[Switch, conf.arg(name="json", help="print the result as JSON", help_behavior_hint="")]
TABLE_SUFFIXES = (".csv", ".tsv", ".tab", ".xls", ".xlsx", ".parquet")
HELP_FLAGS = ("-h", "--help", HELP_ALL)
FILE_HELP = "TOML file or config.json of a run; flags override its values (attack and audit also accept a run's folder)"
TRUST_HELP = "let the file or run import code; use only if you trust it"
HELP_ALL_HINT = f"`{HELP_ALL}` also lists advanced flags and the flags of other data sets, models and defences."
SIZE_KEYS = ("train_size", "test_size")  # their defaults for one data set do not apply to another


@dataclass(frozen=True)
class FlagSet:
    """The configuration keys that a command accepts as flags.

    Attributes:
        accepts: function that returns whether a key is a flag.
        settings: settings class of the defence; its fields are flags that replace --settings.
        show_owners: whether the help text of a key lists the data sets, models or defences that it applies to.
    """

    accepts: Callable[[str], bool] = lambda key: True
    settings: type | None = None
    show_owners: bool = False

    def registry(self) -> ConstructorRegistry:
        """Return a registry whose rules convert sections of the configuration and options of attacks to flags."""
        result = ConstructorRegistry()
        result.struct_rule(self.section_rule)
        result.struct_rule(option_rule)
        return result

    def section_rule(self, info: StructTypeInfo) -> StructConstructorSpec | None:
        """Return the flags of a section; the error for an invalid value names its flag."""
        section_class = info.type
        if not (isinstance(section_class, type) and issubclass(section_class, Settings)):
            return None
        current_values = {name: getattr(info.default, name) for name in section_class.model_fields}
        settings = self.settings if section_class is DefenceSettings else None
        defaults = {setting.name: setting.default for setting in fields(settings)} if settings else {}

        def build(**values: Value) -> Settings:
            if settings:
                setting_values = {name: values.pop(name) for name in defaults}
                changed = {name: value for name, value in setting_values.items() if value != defaults[name]}
                values["settings"] = tuple(f"{name}={value}" for name, value in changed.items())
            try:
                return section_class.model_validate(current_values | values)
            except ValidationError as error:
                message, fix = explain(error)
                flag, _, requirement = message.partition(" ")
                raise FedveilError(f"--{flag.replace('_', '-')}", requirement, fix) from None

        build.__doc__, hints, specs = section_class.__doc__, get_type_hints(section_class), []
        for key, field in section_class.model_fields.items():
            if self.accepts(key) and not (settings and key == "settings"):
                names = list_choices(key) if self.show_owners else []
                help_text = f"{', '.join(names)}: {field.description}" if names else field.description
                hint: Any = Annotated[hints[key], HIDE_DEFAULT] if current_values[key] is None else hints[key]
                specs.append(StructFieldSpec(key, hint, current_values[key], help_text))
        if settings:
            hints = get_type_hints(settings)
            specs += [_field_spec(setting, hints[setting.name], setting.default) for setting in fields(settings)]
        return StructConstructorSpec(build, tuple(specs))


def _field_spec(field: "Field[Any]", hint: Any, default: Any) -> StructFieldSpec:
    """Return the flag of a dataclass field; a default of None is not shown."""
    shown_hint: Any = Annotated[hint, HIDE_DEFAULT] if default is None else hint
    return StructFieldSpec(field.name, shown_hint, default, field.metadata.get("help"))


def option_rule(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Return the flags of an attack's options."""
    kind = info.type
    if not (isinstance(kind, type) and is_dataclass(kind)) or not all(
        "help" in field.metadata for field in fields(kind)
    ):
        return None
    hints = get_type_hints(kind)
    specs = [_field_spec(field, hints[field.name], getattr(info.default, field.name)) for field in fields(kind)]
    return StructConstructorSpec(kind, tuple(specs))


ALL_FLAGS = FlagSet()


def parse(start: C, prog: str, words: Sequence[str], description: str, flag_set: FlagSet = ALL_FLAGS) -> C:
    """Parse the flags of a command; raise SystemExit for --help and for flags that tyro rejects."""
    kind, rules = type(start), flag_set.registry()
    return tyro.cli(kind, prog=prog, args=words, description=description, default=start, config=MARKERS, registry=rules)


@dataclass(frozen=True)
class FederationCommand:
    """A command that trains, compares or attacks a federation."""

    defence_flag: ClassVar[str] = ""  # flag that lists several defences; empty if there is only one defence
    file: Annotated[Path | None, conf.Positional, conf.arg(metavar="[FILE]", help=FILE_HELP, help_behavior_hint="")] = (
        None
    )
    config: Annotated[Config, conf.arg(name="")] = Config()  # noqa: RUF009
    trust_code: Annotated[Switch, conf.arg(help=TRUST_HELP)] = False
    used_flags: Annotated[tuple[str, ...], conf.Suppress] = ()  # names of the flags on the command line

    @classmethod
    def parse(cls, prog: str, words: Sequence[str], description: str = "") -> Self:
        """Parse the flags of the command."""
        return parse_command(cls(), prog, words, description)

    @classmethod
    def variants(cls) -> dict[str, "FederationCommand"]:
        """Return each variant of the command with its defaults, by name."""
        return {"": cls()}

    @property
    def defaults(self) -> Mapping[str, Value]:
        """The configuration values whose defaults differ for this command."""
        return {}

    @property
    def defences(self) -> tuple[str, ...]:
        """Names of the defences."""
        return (self.config.defence.name,)

    def file_values(self) -> dict[str, object]:
        """Return the values in the file; a command with several defences ignores the file's defence."""
        if self.file and self.file.suffix.lower() in TABLE_SUFFIXES:
            fix = f"use --data csv --path {shlex.quote(str(self.file))} --target COLUMN"
            raise BadArgument(str(self.file), "this is a table of records, not the configuration of a run", fix)
        result = read_values(self.file) if self.file and not self.file.is_dir() else {}
        return {key: value for key, value in result.items() if key != "defence" or not self.defence_flag}


F = TypeVar("F", bound=FederationCommand)


def parse_command(start: F, prog: str, words: Sequence[str], description: str) -> F:
    """Parse the flags of a command; flags override the values in its file, which override its defaults.

    Flags that do not apply to the chosen data, model and defences are refused only after parsing, so that the error can
    list the choices that they apply to.
    """
    other_words = [word for word in words if word not in HELP_FLAGS]
    flags = flag_names(words)
    check_flags(flags, prog)
    settings = find_settings_class(last_value(other_words, f"--{start.defence_flag or 'defence'}").split(","))
    hidden_key = "defence" if start.defence_flag else ""
    result = parse(start, prog, other_words, description, FlagSet(lambda key: key != hidden_key, settings))
    values, where = result.file_values(), str(result.file or prog)
    if not result.trust_code:
        refuse_code(values, where, flags)
    flag_values = {key: value for key, value in result.config.flat().items() if key in flags}
    defaults = {**Config().flat(), **start.defaults}
    is_other_data = flag_values.get("data", values.get("data", defaults["data"])) != defaults["data"]
    base_values = {
        key: value for key, value in start.defaults.items() if not (is_other_data and key in SIZE_KEYS)
    } | values
    base = configure(base_values, where)
    if settings:
        flag_values["settings"] = (*base.defence.settings, *result.config.defence.settings)
    config = configure(base.explicit_values() | flag_values, where)
    result = replace(result, config=config, used_flags=tuple(flags))
    choices = Choices(config.data.name, config.model.name, result.defences)
    choices.refuse_others(flags, prog)
    _check_file(result, values, choices)
    if len(other_words) < len(words):
        flag_set = FlagSet(
            lambda key: key != hidden_key and choices.accepts(key), settings or find_settings_class(result.defences)
        )
        _print_help(replace(start, config=base), prog, description, flag_set, show_all=HELP_ALL in words)
    return result


def _print_help(start: FederationCommand, prog: str, description: str, flag_set: FlagSet, show_all: bool) -> None:
    """Print all flags, or only those that apply and are not rare, and exit."""
    if show_all:
        all_flags = replace(flag_set, accepts=lambda key: flag_set.accepts(key) or key != "defence", show_owners=True)
        parse(start, prog, ["--help"], description, all_flags)
    accepts = lambda key: key not in RARE_KEYS and flag_set.accepts(key)  # noqa: E731
    parse(start, prog, ["--help"], f"{description}\n\n{HELP_ALL_HINT}", replace(flag_set, accepts=accepts))


def find_settings_class(defences: Sequence[str]) -> type | None:
    """Return the settings class of the first defence that has one."""
    return next((result for name in defences if name and (result := settings_class(name))), None)


def flag_names(words: Sequence[str]) -> list[str]:
    """Return the keys of the flags on a command line."""
    flags = [word.partition("=")[0].removeprefix("--") for word in words if word.startswith("--")]
    return [flag.removeprefix("no-").replace("-", "_") for flag in flags]


def last_value(words: Sequence[str], flag: str) -> str:
    """Return the last value of a flag on a command line, or an empty string."""
    values = [next_word for word, next_word in itertools.pairwise([*words, ""]) if word == flag]
    values += [word.partition("=")[2] for word in words if word.startswith(f"{flag}=")]
    return values[-1] if values else ""


def _check_file(command: FederationCommand, values: Mapping[str, object], choices: Choices) -> None:
    """Refuse keys in a file that apply neither to the choices in the file nor to those on the command line."""
    if command.file is None or command.file.suffix == ".json":  # config.json was written by Fedveil
        return
    defence = str(values.get("defence", ""))
    # do not import code that the file refers to
    defences = choices.defences if refers_to_code(defence) else (defence or choices.defences[0],)
    file_choices = Choices(str(values.get("data", choices.data)), str(values.get("model", choices.model)), defences)
    file_choices.refuse_others([key for key in values if not choices.accepts(key)], str(command.file))


def run_command(name: str, words: Sequence[str]) -> None:
    """Run a command with its flags."""
    command, prog, (_, summary, example) = find_command(name), f"fedveil {name}", COMMANDS[name]
    description = f"{summary[0].upper()}{summary[1:]}.\n\nExample: {prog} {example}"
    if isinstance(command, type):
        command.parse(prog, words, description).run()  # type: ignore[attr-defined]
    else:
        words = ["--help" if word == HELP_ALL else word for word in words]
        tyro.cli(command, prog=prog, args=words, description=description, config=MARKERS)


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], conf.arg(help="shell that will run the script")],
) -> None:
    """Print a completion script with all commands and flags, including those of installed packages."""
    subcommands: list[Any] = []
    for name, (_, summary, _) in COMMANDS.items():
        command = find_command(name)
        if isinstance(command, type):
            variants: dict[str, object] = command.variants()  # type: ignore[attr-defined]
            options = [
                Annotated[type(variant), conf.subcommand(label or name, description=summary, default=variant)]
                for label, variant in variants.items()
            ]
            command = options[0] if len(options) == 1 else _choose(name, options)
        else:
            command = Annotated[Any, conf.subcommand(name, description=summary, constructor=command)]
        subcommands.append(command)
    union: Any = Union[tuple(subcommands)]  # noqa: UP007
    words = ["--tyro-print-completion", shell]
    tyro.cli(union, prog="fedveil", args=words, config=MARKERS, registry=ALL_FLAGS.registry())


def _choose(name: str, subcommands: Sequence[Any]) -> Any:
    """Return a command that groups the given subcommands."""

    def choose(command: Any) -> None:
        """Choose a subcommand."""

    choose.__annotations__["command"] = Union[tuple(subcommands)]  # noqa: UP007
    return Annotated[Any, conf.subcommand(name, constructor=choose)]
