"""Commands on a federation: flags over the values of a file over defaults, parsed in two steps."""

import itertools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Self, TypeVar

from tyro import conf

from fedveil.cli.flags import EVERYTHING, HELP_ALL, FlagSet, Switch, parse
from fedveil.errors import BadArgument
from fedveil.runs.choices import RARE, Choices, settings_class
from fedveil.runs.config import ABSENT, Config, Value, configure, flatten, read_file, refuse_code

TABLES = (".csv", ".tsv", ".tab", ".xls", ".xlsx", ".parquet")
HELP = ("-h", "--help", HELP_ALL)
TRUST = "import the code that the file or the run's folder names as package.module:name; only if you know what it does"
MORE = f"`{HELP_ALL}` also lists advanced flags, and those of other data sets, models and defences."
SIZES = ("train_size", "test_size")  # a default for one data set means nothing to another


@dataclass(frozen=True)
class FederationCommand:
    """A command on a federation."""

    defence_flag: ClassVar[str] = ""  # of a command on several defences, with commas between them
    file: Annotated[
        Path | None,
        conf.Positional,
        conf.arg(metavar="[FILE]", help="run.toml, or the config.json of a run; flags override it"),
    ] = None
    config: Annotated[Config, conf.arg(name="")] = Config()  # noqa: RUF009
    trust_code: Annotated[Switch, conf.arg(help=TRUST)] = False
    given: Annotated[tuple[str, ...], conf.Suppress] = ()  # names of the flags on the command line

    @classmethod
    def parse(cls, prog: str, words: Sequence[str], about: str = "") -> Self:
        """Return the command with the values of its flags."""
        return parse_command(cls(), prog, words, about)

    @classmethod
    def starts(cls) -> dict[str, "FederationCommand"]:
        """Return the command with its defaults, by the name of each variant."""
        return {"": cls()}

    @property
    def defaults(self) -> Mapping[str, Value]:
        """Values of the configuration that differ from its defaults."""
        return {}

    @property
    def defences(self) -> tuple[str, ...]:
        """Names of the defences."""
        return (self.config.defence.name,)

    def run(self) -> None:
        """Run the command."""
        raise NotImplementedError

    def file_values(self) -> dict[str, object]:
        """Return the values of the file; a command on several defences ignores its defence."""
        if self.file and self.file.suffix.lower() in TABLES:
            fix = f"use --data csv --path {shlex.quote(str(self.file))} --target COLUMN"
            raise BadArgument(str(self.file), "it is a table of records, not the configuration of a run", fix)
        found = flatten(read_file(self.file), str(self.file)) if self.file and not self.file.is_dir() else {}
        return {key: value for key, value in found.items() if key != "defence" or not self.defence_flag}


C = TypeVar("C", bound=FederationCommand)


def parse_command(start: C, prog: str, words: Sequence[str], about: str) -> C:
    """Return a command with the values of its flags and of its file.

    The first parse accepts every flag, for the file and the choice of data, model and defences. The second accepts the
    flags of these choices only, and has the file's values as defaults.
    """
    quiet = [word for word in words if word not in HELP]
    flags = flag_names(words)
    _check_flags(prog, flags)
    own = own_settings(last_value(quiet, f"--{start.defence_flag or 'defence'}").split(","))
    hidden = "defence" if start.defence_flag else ""
    first = parse(start, prog, quiet, about, replace(EVERYTHING, accepts=lambda key: key != hidden, own=own))
    values = first.file_values()
    if not first.trust_code:
        refuse_code(values, str(first.file), flags)
    usual = {**Config().flat(), **start.defaults}
    chosen = {
        key: first.config.flat()[key] if key in flags else values.get(key, usual[key]) for key in ("data", "model")
    }
    defences = first.defences if start.defence_flag or "defence" in flags else (str(values.get("defence", "veil")),)
    choices = Choices(str(chosen["data"]), str(chosen["model"]), defences)
    choices.refuse_others(flags, prog)
    _check_file(first, values, choices)
    left_out = () if chosen["data"] == usual["data"] else SIZES
    below = {key: value for key, value in start.defaults.items() if key not in left_out} | values
    start = replace(start, config=configure(below, str(first.file or prog)))
    shown = FlagSet(lambda key: key != hidden and choices.accepts(key), own or own_settings(defences))
    found = parse(start, prog, quiet, about, shown)
    if len(quiet) < len(words):
        _print_help(start, prog, about, shown, everything=HELP_ALL in words)
    return replace(found, config=configure(found.config.flat(), str(first.file or prog)), given=tuple(flags))


def _print_help(start: FederationCommand, prog: str, about: str, shown: FlagSet, everything: bool) -> None:
    """Print the flags that apply except for rare ones, or all flags, and exit."""
    if everything:
        more = replace(shown, accepts=lambda key: shown.accepts(key) or key != "defence", named=True)
        parse(start, prog, ["--help"], about, more)
    accepts = lambda key: key not in RARE and shown.accepts(key)  # noqa: E731
    parse(start, prog, ["--help"], f"{about}\n\n{MORE}", replace(shown, accepts=accepts))


def own_settings(defences: Sequence[str]) -> type | None:
    """Return the first settings class of some defences."""
    return next((found for name in defences if name and (found := settings_class(name))), None)


def flag_names(words: Sequence[str]) -> list[str]:
    """Return the keys of the flags on a command line."""
    flags = [word.partition("=")[0].removeprefix("--") for word in words if word.startswith("--")]
    return [flag.removeprefix("no-").replace("-", "_") for flag in flags]


def last_value(words: Sequence[str], flag: str) -> str:
    """Return the last value of a flag on a command line, or nothing."""
    found = [after for word, after in itertools.pairwise([*words, ""]) if word == flag]
    found += [word.partition("=")[2] for word in words if word.startswith(f"{flag}=")]
    return found[-1] if found else ""


def _check_flags(prog: str, flags: Sequence[str]) -> None:
    """Refuse flags that are missing on purpose, and a list that is given in parts, of which the last would win."""
    default = Config().flat()
    for flag in flags:
        name = f"--{flag.replace('_', '-')}"
        if flag in ABSENT:
            fix = "use --whole-shard, or neither"
            raise BadArgument(prog, f"there is no {name}: {ABSENT[flag].partition(';')[0]}", fix)
        if isinstance(default.get(flag), tuple) and flags.count(flag) > 1:
            raise BadArgument(prog, f"{name} is given twice", f"use {name} FIRST SECOND")


def _check_file(command: FederationCommand, values: Mapping[str, object], choices: Choices) -> None:
    """Refuse keys of a file that have no meaning for its choices nor for those of the flags."""
    if command.file is None or command.file.suffix == ".json":  # which the program wrote
        return
    defence = str(values.get("defence", ""))
    defences = choices.defences if ":" in defence else (defence or choices.defences[0],)  # never imports what it names
    own = Choices(str(values.get("data", choices.data)), str(values.get("model", choices.model)), defences)
    own.refuse_others([key for key in values if not choices.accepts(key)], str(command.file))
