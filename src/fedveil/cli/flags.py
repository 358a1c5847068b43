"""Flags from annotated functions and classes, by tyro; below them the values of a file, and below those defaults."""

import importlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_type_hints

import tyro
from pydantic import ValidationError
from tyro import conf
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from fedveil.cli.commands import COMMANDS
from fedveil.errors import BadArgument, FedveilError
from fedveil.runs.config import (
    ABSENT,
    Config,
    Settings,
    Value,
    configure,
    explained,
    keys_of,
    of_users,
    read_file,
    refuse_code,
)

TABLES = (".csv", ".tsv", ".tab", ".xls", ".xlsx", ".parquet")
HELP = ("-h", "--help")
TRUST = "import the code that the file or the run's folder names as package.module:name; only if you know what it does"
MARKERS = (conf.DisallowNone, conf.OmitArgPrefixes, conf.OmitSubcommandPrefixes, conf.PositionalRequiredArgs)
RULES = ConstructorRegistry()
Switch = Annotated[bool, conf.FlagCreatePairsOff]
Json = Annotated[Switch, conf.arg(name="json", help="print the result for machines")]


@RULES.struct_rule
def section_rule(info: StructTypeInfo) -> StructConstructorSpec | None:
    """A section of the configuration, whose bad values are refused with their flag and in our own words."""
    kind = info.type
    if not (isinstance(kind, type) and issubclass(kind, Settings)):
        return None

    def build(**values: Value) -> Settings:
        try:
            return kind(**values)
        except ValidationError as error:
            what, fix = explained(error)
            flag, _, rest = what.partition(" ")
            raise FedveilError(f"--{flag.replace('_', '-')}", rest, fix) from None

    build.__doc__, hints, fields = kind.__doc__, get_type_hints(kind), []
    for name, of in kind.model_fields.items():
        hint: Any = Annotated[(hints[name], of, *of.metadata)]
        default = getattr(info.default, name)
        several = name == "name" and (default == "all" or "," in default)
        text = f"all, or with commas between them: {of.description}" if several else of.description
        fields.append(StructFieldSpec(name, hint, default, text))
    return StructConstructorSpec(build, tuple(fields))


def parse(kind: Any, prog: str, words: Sequence[str], about: str = "", default: Any = tyro.MISSING_NONPROP) -> Any:
    """An object of a class, or what a function returns; help, and what tyro refuses, ends in SystemExit."""
    return tyro.cli(kind, prog=prog, args=words, description=about, default=default, config=MARKERS, registry=RULES)


def find(name: str) -> Any:
    """What does a command: a function whose parameters are flags, or a class of commands on federations."""
    module, _, kind = COMMANDS[name][0].partition(":")
    return getattr(importlib.import_module(f"fedveil.cli.{module}"), kind)


def run_command(name: str, words: Sequence[str]) -> None:
    """Run a command with its flags."""
    command, prog, (_, summary, example) = find(name), f"fedveil {name}", COMMANDS[name]
    about = f"{summary[0].upper()}{summary[1:]}.\n\nExample: {prog} {example}"
    if isinstance(command, type):
        command.read(prog, words, about)()  # type: ignore[attr-defined]
    else:
        parse(command, prog, words, about)


def _check_flags(prog: str, flags: Sequence[str]) -> None:
    """Refuse flags that are missing on purpose, and a list that is given in parts, of which the last would win."""
    usual = Config().flat()
    for flag in flags:
        name = f"--{flag.replace('_', '-')}"
        if flag in ABSENT:
            raise BadArgument(
                prog, f"there is no {name}: {ABSENT[flag].partition(';')[0]}", "--whole-shard, or neither"
            )
        if isinstance(usual.get(flag), tuple) and flags.count(flag) > 1:
            raise BadArgument(prog, f"{name} is given twice", f"{name} FIRST SECOND")


@dataclass(frozen=True)
class Federated:
    """A command on a federation: flags over the values of a file over defaults. Calling it does what was asked."""

    defaults: ClassVar[Mapping[str, Value]] = {}
    file: Annotated[
        Path | None,
        conf.Positional,
        conf.arg(metavar="[FILE]", help="run.toml, or the config.json of a run; flags override it"),
    ] = None
    config: Annotated[Config, conf.arg(name="")] = Config()  # noqa: RUF009
    trust_code: Annotated[Switch, conf.arg(help=TRUST)] = False
    given: Annotated[tuple[str, ...], conf.Suppress] = ()  # names of the flags on the command line

    @classmethod
    def read(cls, prog: str, words: Sequence[str], about: str) -> Self:
        """The command; it is parsed again when the file or the data set that it names brings other defaults."""
        quiet = [word for word in words if word not in HELP]
        flags = [word.partition("=")[0].removeprefix("--") for word in words if word.startswith("--")]
        flags = [flag.removeprefix("no-").replace("-", "_") for flag in flags]
        _check_flags(prog, flags)
        values, found = None, cls(config=configure(cls.defaults))
        while values != (wanted := found.below()):
            values, start = wanted, cls(config=configure(wanted, str(found.file or prog)))
            found = parse(cls, prog, quiet, about, start)
        if len(quiet) < len(words):
            parse(cls, prog, words, about, start)
        if not found.trust_code:
            refuse_code(found.in_file(), str(found.file), flags)
        return replace(found, config=configure(found.config.flat(), str(found.file or prog)), given=tuple(flags))

    def in_file(self) -> dict[str, Value]:
        """The values of the file."""
        if self.file and self.file.suffix.lower() in TABLES:
            fix = f"--data csv --path {shlex.quote(str(self.file))} --target COLUMN; run.toml names flags of a command"
            raise BadArgument(str(self.file), "it is a table of records, not the configuration of a run", fix)
        given = keys_of(read_file(self.file), str(self.file)) if self.file and not self.file.is_dir() else {}
        if "defence" in self.defaults:  # several defences, which only the flag names
            given.pop("defence", None)
        return given

    def below(self) -> dict[str, Value]:
        """The values below the flags: the file's over the defaults."""
        usual = self.defaults.get("data", self.config.data.name) == self.config.data.name
        without = set() if usual else {"train_size", "test_size"}  # sizes for one data set mean nothing to another
        if self.file or of_users(self.config.data.name):
            without |= {"loss"}  # as `fedveil train` chooses it
        return {name: value for name, value in self.defaults.items() if name not in without} | self.in_file()


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], conf.arg(help="the shell that completes")]) -> None:
    """Print the script, with the commands and flags of everything that is installed."""
    kinds = []
    for name, (_, summary, _) in COMMANDS.items():
        found = find(name)
        shape = found.shape() if hasattr(found, "shape") else found
        kinds.append(Annotated[Any, conf.subcommand(name, description=summary, constructor=shape)])
    parse(Union[tuple(kinds)], "fedveil", ["--tyro-print-completion", shell])  # noqa: UP007
