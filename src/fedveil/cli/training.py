"""`fedveil inspect`, `train`, `data` and `schema`."""

import itertools
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from tyro.conf import Positional, UseAppendAction, arg

from fedveil.cli.flags import Federated, Json, Switch
from fedveil.cli.show import live, rounds
from fedveil.cli.stops import INTERRUPTED, TERMINATED, Stopped, Terminated, catch_sigterm, end_at_once
from fedveil.errors import BadArgument
from fedveil.plain_json import to_json
from fedveil.runs.config import Config

Several = Annotated[tuple[str, ...], UseAppendAction]
INPUT = (
    "sizes of one argument of forward without the batch, such as 3,32,32; once for each argument, in their order. "
    "NAME=SIZES names a keyword argument, SIZES:TYPE says what it holds (float, int, bool, float32, float64, int64), "
    "as in ids=128:int. Name all of them, or none. A number per record has no sizes: length=:int"
)
HEAD = "exposed: no additive noise, clients read the true predictions"
LEAST = "fail if less than this share of the parameters' values can be covered, 0 to 1"
SHARES = ("scaled", "signed", "moved", "bare", "revealed")  # of the model's values, by what a veil does to them
OUT = "folder of the run; by default runs/DATA-MODEL-DEFENCE-SEED, with a number behind it if there is a run already"
RESUME = "continue the run in the folder, by default the last one there, with its own flags; --epochs may be larger"
PUBLIC = "name, or beginning of a name, of parameters whose values clients know"


def inspect(
    model: Annotated[str, arg(metavar="MODEL", help="package.module:factory, called without arguments, or a module")],
    input: Annotated[Several, arg(metavar="[NAME=]SIZES[:TYPE]", help=INPUT, help_behavior_hint="(required)")] = (),
    dtype: Annotated[Literal["float32", "float64", "int64"], arg(help="of inputs without their own")] = "float32",
    eval: Annotated[Switch, arg(help="analyse in evaluation mode")] = False,
    head: Annotated[Literal["linear", "exposed"], arg(help=HEAD)] = "linear",
    min_coverage: Annotated[float, arg(help=LEAST)] = 0.0,
    public: Annotated[Several, arg(metavar="NAME", help=PUBLIC)] = (),
    as_json: Json = False,
) -> None:
    """Print a model's plan."""
    from fedveil.cli.inputs import example_inputs
    from fedveil.graph import analyse, as_dict
    from fedveil.runs.build import load_factory

    if not input:
        raise BadArgument("--input", "no input is given", "--input 3,32,32, once for each argument of forward")
    network, example = load_factory(model).train(not eval), example_inputs(input, dtype)
    plan = analyse(network, example, head=head, min_coverage=min_coverage, public=public)
    print(to_json(as_dict(plan), indent=2) if as_json else plan)


@dataclass(frozen=True)
class Train(Federated):
    """`fedveil train`."""

    out: Annotated[Path | None, arg(help=OUT)] = None
    resume: Annotated[Switch, arg(help=RESUME)] = False
    as_json: Json = False

    @classmethod
    def read(cls, prog: str, words: Sequence[str], about: str) -> Self:
        """The command; one that resumes has the values of its folder below its flags."""
        found = super().read(prog, words, about)
        with end_at_once():
            import fedveil.runs.folder  # noqa: F401
        if not found.resume or found.file:
            return found
        folder = found.out or default_folder(found.config, resume=True)
        own = folder / "config.json"
        return replace(super().read(prog, [str(own), *words], about), out=folder) if own.is_file() else found

    def __call__(self) -> None:
        """Train, with a live line on a terminal; whoever stops it is told how to continue."""
        folder = self.out or default_folder(self.config, self.resume)
        try:
            with catch_sigterm():
                self._train(folder)
        except KeyboardInterrupt as end:
            code = TERMINATED if isinstance(end, Terminated) else INTERRUPTED
            raise Stopped(how_to_continue(folder), code) from end

    def _train(self, folder: Path) -> None:
        from fedveil.runs.build import load_data
        from fedveil.runs.folder import holds_run, train

        if self.file and self.file.is_dir():
            own = f"{self.file / 'config.json'}"
            fix = f"{own} to repeat the run in it, and {own} --out {self.file} --resume to go on with it"
            raise BadArgument(str(self.file), "it is a folder, not a file", fix)
        if self.resume and not holds_run(folder):
            raise BadArgument(str(folder), "there is no run to go on with", "leave out --resume, or another --out")
        data = load_data(self.config)
        for note in data.notes:
            print(f"{data.name}: {note}", file=sys.stderr)
        with live() as show:
            take = rounds(show, self.config.training.epochs)
            summary = train(self.config, folder, resume=self.resume, on_round=take, data=data)
        if self.as_json:
            print(to_json(summary))
            return
        for name, value in in_words({**summary, "report": folder / "report.html"}).items():
            print(f"{name:<14} {value:.6g}" if isinstance(value, float) else f"{name:<14} {value}")


def how_to_continue(folder: Path) -> str:
    """Which round of a run that was stopped is on disk, and the command that resumes it."""
    from fedveil.federation import checkpoint
    from fedveil.runs.folder import read_config

    found = checkpoint.found_in(folder)
    header = checkpoint.header(found[0]) if found else None
    if header is None:
        return "no round was complete; run the same command again"
    words = ["fedveil", "train", "--resume", "--out", str(folder)]
    try:
        read_config(folder)
    except BadArgument:  # it names code, as the user did
        words.append("--trust-code")
    values = folder / checkpoint.MODEL
    if values.is_file() and checkpoint.round_of_values(values) >= header.round:
        return f"training is finished; this writes the report: {shlex.join(words)}"
    return f"round {header.round} is saved, and this resumes after it: {shlex.join(words)}"


def in_words(summary: Mapping[str, Any]) -> dict[str, Any]:
    """A summary for people: the shares of a veil in one line, names without underscores."""
    parts = ", ".join(f"{name} {100 * summary[name]:.1f} %" for name in SHARES if name in summary)
    metric = next((name for name in ("accuracy", "loss", "mse") if name in summary), "")
    words = {"best": f"best {metric}", "best_model": "best model", "largest_error": "gradient error"}
    if "rmse" in summary:
        words |= {"mse": "mse, scaled", "rmse": "rmse, in units", "best": "best, scaled"}
    found: dict[str, Any] = {}
    for name, value in summary.items():
        if name == SHARES[0]:
            found["veil"] = parts
        elif name not in SHARES:
            found[words.get(name, name)] = value
    return found


def default_folder(config: Config, resume: bool) -> Path:
    """The first folder of its name that holds no run yet; to resume, the last one that does."""
    from fedveil.runs.folder import holds_run

    first = Path("runs") / f"{config.title}-{config.training.seed}"
    folder = last = first
    for number in itertools.count(2):
        if not holds_run(folder):
            break
        last, folder = folder, first.with_name(f"{first.name}-{number}")
    return last if resume else folder


def data(
    what: Annotated[Literal["list", "get"], arg(help="list what there is, or get one; a stopped download goes on")],
    name: Annotated[str | None, Positional, arg(metavar="[NAME]", help="of the data set to get")] = None,
    to: Annotated[Path | None, arg(help="folder for it; by default FEDVEIL_DATA, or the cache")] = None,
) -> None:
    """List data sets, or download one."""
    from fedveil.data import available, data_folder, get

    if what == "list":
        for entry in available():
            where = f"  [{entry.where}]" if entry.where else ""
            print(f"{entry.name:<10} {entry.state:<9} {entry.description}{where}")
        return
    if name is None:
        raise BadArgument("fedveil data get", "no data set is named", "fedveil data list prints their names")
    with live() as show:
        print(get(name, to or data_folder(), lambda got, of: show(name, got / (of or got), f"{got / 1e6:.1f} MB")))


def schema() -> None:
    """Print the schema."""
    print(json.dumps(Config.model_json_schema(), indent=2))
