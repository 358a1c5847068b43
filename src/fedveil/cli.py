"""The command line: results to stdout, messages to stderr; exit 0 as asked, 2 for misuse."""

import argparse
import difflib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from fedveil.data import available, data_folder, get
from fedveil.errors import BadArgument, FedveilError
from fedveil.experiments.attack import Shown, defences_of
from fedveil.experiments.attack import run_attack as attack
from fedveil.experiments.attacks import ATTACKS
from fedveil.experiments.audit import AUDIT, SUITE
from fedveil.experiments.compare import CONTROL
from fedveil.experiments.compare import run_comparison as compare
from fedveil.experiments.demo import run_comparison
from fedveil.experiments.harden import harden
from fedveil.federation.config import CHOICES, Config, configure, kinds, load_factory, read_toml
from fedveil.federation.evaluate import METRICS
from fedveil.federation.run import read_config as read_folder
from fedveil.federation.run import train
from fedveil.graph import analyse, as_dict
from fedveil.report import Text

DTYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}


def parse_shape(text: str) -> tuple[int, ...]:
    """Sizes of one input, without the batch."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise BadArgument("--input", f"{text!r} is not a list of sizes", "--input 3,32,32 (one input, no batch)")
    return sizes


def inspect(options: argparse.Namespace) -> None:
    """Print a model's plan."""
    model = load_factory(options.model).train(not options.eval)
    inputs = [torch.zeros((2, *parse_shape(shape)), dtype=DTYPES[options.dtype]) for shape in options.input]
    plan = analyse(model, inputs, head=options.head)
    print(json.dumps(as_dict(plan), indent=2) if options.json else plan)


def add_inspect(commands: Any) -> None:
    """`fedveil inspect`."""
    show = commands.add_parser("inspect", help="show which noise each part of a model lets through")
    show.add_argument("model", help="package.module:factory, called without arguments, or a module there")
    help_input = "sizes of one input without the batch, such as 3,32,32; once for each argument of forward"
    show.add_argument("--input", required=True, action="append", metavar="SIZES", help=help_input)
    show.add_argument("--dtype", choices=DTYPES, default="float32", help="of the inputs")
    show.add_argument("--eval", action="store_true", help="analyse in evaluation mode")
    help_head = "exposed: no additive noise, clients read the true predictions"
    show.add_argument("--head", choices=("linear", "exposed"), default="linear", help=help_head)
    show.add_argument("--json", action="store_true", help="for machines")
    show.set_defaults(run=inspect)


def add_train(commands: Any) -> None:
    """`fedveil train`: a flag for each value of a configuration."""
    command = commands.add_parser("train", allow_abbrev=False, help="train together, from flags or a TOML file")
    add_config(command)
    command.add_argument("--out", type=Path, help="run folder (default runs/DATA-MODEL-DEFENCE-SEED)")
    command.add_argument("--resume", action="store_true", help="go on with the run in the folder")
    command.add_argument("--json", action="store_true", help="print the summary for machines")
    command.set_defaults(run=run_train)


def add_config(command: Any, without: Sequence[str] = ()) -> None:
    """A TOML file, and a flag for each value of a configuration."""
    command.add_argument("file", nargs="?", type=Path, help="run.toml; flags override it")
    add_values(command, {name: kind for name, kind in kinds().items() if name not in without})


def add_values(command: Any, values: Mapping[str, type]) -> None:
    """A flag for each value."""
    for name, kind in values.items():
        flag, options = "--" + name.replace("_", "-"), {"default": None, "dest": name}
        if kind is bool:
            command.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
        else:
            command.add_argument(flag, type=kind, choices=CHOICES.get(name), **options)


def read_config(options: argparse.Namespace, where: str, defaults: Mapping[str, Any] | None = None) -> Config:
    """The configuration of a command line."""
    values = dict(defaults or {}) | (read_toml(options.file) if options.file else {})
    values |= {name: value for name in kinds() if (value := getattr(options, name, None)) is not None}
    return configure(values, str(options.file or where))


def add_compare(commands: Any) -> None:
    """`fedveil compare`: the flags of `fedveil train`, several defences, several seeds."""
    command = commands.add_parser("compare", allow_abbrev=False, help="the same federation under several defences")
    add_config(command)
    known = ",".join([*CHOICES["defence"], CONTROL])
    command.add_argument("--defences", default="plain,control,veil,ppdl,dbcl,spn", help=f"some of {known}")
    command.add_argument("--seeds", type=int, default=3, help="runs of each, from --seed on (default 3)")
    command.add_argument("--out", type=Path, help="folder of the report (default runs/compare-DATA-MODEL)")
    command.add_argument("--json", action="store_true", help="print the table for machines")
    command.set_defaults(run=run_compare)


def run_compare(options: argparse.Namespace) -> None:
    """Run them one after another, and print the table."""
    config = read_config(options, "fedveil compare")
    folder = options.out or Path("runs") / f"compare-{config.data}-{config.model}".replace(":", ".")
    names = [name for name in options.defences.split(",") if name]
    command = f"fedveil compare {config.flags()} --defences {options.defences} --seeds {options.seeds} --out {folder}"
    header, rows = compare(config, names, options.seeds, folder, lambda n, label: Progress(n, label), command)
    if options.json:
        print(json.dumps([dict(zip(header, row, strict=True)) for row in rows]))
        return
    print_table(header, rows)
    print(f"\nreport: {folder / 'report.html'}\nrepeat: {command}")


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns below one another."""
    widths = [max(len(row[k]) for row in [header, *rows]) for k in range(len(header))]
    for row in [header, *rows]:
        cells = [cell.ljust(w) if k < 2 else cell.rjust(w) for k, (cell, w) in enumerate(zip(row, widths, strict=True))]
        print("  ".join(cells).rstrip())


def add_attack(commands: Any) -> None:
    """`fedveil attack NAME`: the flags of `fedveil train`, the attack's own, several defences."""
    attacks = commands.add_parser("attack", help="what a curious participant learns").add_subparsers(
        dest="attack", required=True
    )
    for experiment in ATTACKS.values():
        command = attacks.add_parser(experiment.name, allow_abbrev=False, help=experiment.summary)
        add_config(command, without=["defence"])
        command.add_argument("--defence", help=f"all (default), or some of {','.join(CHOICES['defence'])}")
        command.add_argument(
            "--run", type=Path, dest="folder", help="attack the federation that a run left in a folder"
        )
        add_values(command.add_argument_group("the attack"), kinds(experiment.settings))
        command.add_argument("--out", type=Path, help="folder of the results; a stopped attack goes on there")
        command.add_argument("--workers", type=int, help="processes side by side (default: one a core)")
        command.add_argument("--json", action="store_true", help="print the table for machines")
        command.set_defaults(run=run_attack)


def run_attack(options: argparse.Namespace) -> None:
    """Attack, and print the table."""
    experiment = ATTACKS[options.attack]
    where = f"fedveil attack {experiment.name}"
    defaults = dict(experiment.defaults)
    if options.folder and options.defence:
        raise BadArgument(where, "a run has its own defence", "leave out --defence, or --run")
    config = read_folder(options.folder) if options.folder else read_without_defence(options, where, defaults)
    asked = {name: value for name in kinds(experiment.settings) if (value := getattr(options, name)) is not None}
    settings = experiment.settings(**asked)
    defences = [config.defence] if options.folder else defences_of(options.defence or "all")
    folder = options.out or (options.folder or Path("runs")) / f"attack-{experiment.name}"
    source = f"--run {options.folder}"
    if not options.folder:
        changed = config.changes() | {name: getattr(config, name) for name in defaults}
        flags = [flag_of(name, value) for name, value in changed.items() if value is not None and name != "defence"]
        source = f"{' '.join(flags)} --defence {','.join(defences)}"
    own = " ".join(flag_of(name, value) for name, value in asked.items())
    command = " ".join(f"{where} {source} {own} --out {folder}".split())
    with Cells() as cells:
        shown = attack(
            experiment,
            config,
            settings,
            defences,
            folder,
            run=options.folder,
            workers=options.workers,
            show=cells.show,
            command=command,
        )
    if options.json:
        print(json.dumps([dict(zip(shown.header, row, strict=True)) for row in shown.rows]))
        return
    print_table(shown.header, shown.rows)
    print(f"\n{shown.note}\nreport: {folder / 'report.html'}\nrepeat: {command}")


def flag_of(name: str, value: object) -> str:
    """A value as a flag."""
    flag = name.replace("_", "-")
    return f"--{'' if value else 'no-'}{flag}" if isinstance(value, bool) else f"--{flag} {value}"


def read_without_defence(options: argparse.Namespace, where: str, defaults: Mapping[str, Any]) -> Config:
    """The configuration, in which each defence is put later; sizes for one data set mean nothing to another."""
    data = options.data or (read_toml(options.file) if options.file else {}).get("data", defaults.get("data"))
    if data != defaults.get("data"):
        defaults = {name: value for name, value in defaults.items() if name not in ("train_size", "test_size")}
    named, options.defence = options.defence, None
    config = read_config(options, where, defaults)
    options.defence = named
    return config


def add_audit(commands: Any) -> None:
    """`fedveil audit`: what a participant learns, and what hardens the veil."""
    command = commands.add_parser("audit", allow_abbrev=False, help="what a participant that thinks learns")
    command.add_argument("file", nargs="?", type=Path, help="a run's folder, or run.toml; flags override it")
    add_values(command, {name: kind for name, kind in kinds().items() if name != "defence"})
    command.add_argument("--defence", help=f"all (default), or some of {','.join(CHOICES['defence'])}")
    command.add_argument("--trials", type=int, default=20, help="records that the attacker tries to rebuild")
    command.add_argument("--harden", action="store_true", help="measure what hardens the veil instead")
    command.add_argument("--seeds", type=int, default=5, help="runs of each setting with --harden (default 5)")
    command.add_argument("--out", type=Path, help="folder of the results; a stopped audit goes on there")
    command.add_argument("--workers", type=int, help="processes side by side (default: one a core)")
    command.set_defaults(run=run_audit)


def run_audit(options: argparse.Namespace) -> None:
    """Audit a run, a configuration, or, without any, the standard suite."""
    folder = options.out or Path("runs/hardening" if options.harden else "runs/audit")
    if options.harden:
        command = f"fedveil audit --harden --seeds {options.seeds} --trials {options.trials} --out {folder}"
        with Cells() as cells:
            rest = {"workers": options.workers, "show": cells.show, "command": command}
            shown = harden(folder, seeds=options.seeds, trials=options.trials, **rest)
        print_shown(shown, folder, command)
        return
    run = options.file if options.file and options.file.is_dir() else None
    if run and options.defence:
        raise BadArgument("fedveil audit", "a run has its own defence", "leave out --defence, or the folder")
    if run or options.file or any(getattr(options, name, None) is not None for name in kinds() if name != "defence"):
        config = read_folder(run) if run else read_without_defence(options, "fedveil audit", AUDIT.defaults)
        audit_one(options, config, run, options.out or (run / "audit" if run else folder))
        return
    for name, values in SUITE.items():
        config = configure(dict(values))
        print(f"{name}\n")
        if config.data in missing_data():
            print(f"left out: fedveil data get {config.data}, or set FEDVEIL_DATA\n")
            continue
        audit_one(options, config, None, folder / name.replace(", ", "-").replace(" ", "-"))
        print()


def missing_data() -> set[str]:
    """Data sets that are not on this machine."""
    return {entry.name for entry in available() if entry.state == "missing"}


def audit_one(options: argparse.Namespace, config: Config, run: Path | None, folder: Path) -> None:
    """Audit one federation under its defences, and print table and verdict."""
    defences = [config.defence] if run else defences_of(options.defence or "all")
    changed = config.changes() | {name: getattr(config, name) for name in ("data", *AUDIT.defaults)}
    flags = [flag_of(name, value) for name, value in changed.items() if name != "defence"]
    source = str(run) if run else f"{' '.join(flags)} --defence {','.join(defences)}"
    command = f"fedveil audit {source} --trials {options.trials} --out {folder}"
    with Cells() as cells:
        shown = attack(
            AUDIT,
            config,
            AUDIT.settings(options.trials),
            defences,
            folder,
            run=run,
            workers=options.workers,
            show=cells.show,
            command=command,
        )
    print_shown(shown, folder, command)


def print_shown(shown: Shown, folder: Path, command: str) -> None:
    """The table, the paragraphs, and where the page is."""
    print_table(shown.header, shown.rows)
    for section in shown.sections:
        if isinstance(section, Text):
            print("", section.title, *(f"  {line}" for line in section.paragraphs), sep="\n")
    print(f"\n{shown.note}\nreport: {folder / 'report.html'}\nrepeat: {command}")


class Cells:
    """A live line on stderr for parts that are computed side by side."""

    def __init__(self) -> None:
        form = "{percentage:3.0f}% |{bar}| {n:.1f}/{total} parts [{elapsed}]{postfix}"
        self._bar = tqdm(total=0, disable=None, bar_format=form, file=sys.stderr)
        self._done: dict[str, float] = {}
        self._what: dict[str, str] = {}

    def __enter__(self) -> "Cells":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, name: str, share: float, what: str) -> None:
        """Take in how far a part is."""
        self._done[name], self._what[name] = share, what
        if share >= 1:
            del self._what[name]
        self._bar.total = len(self._done)
        self._bar.set_postfix_str("; ".join(f"{cell}: {doing}" for cell, doing in self._what.items()), refresh=False)
        self._bar.update(sum(self._done.values()) - self._bar.n)


def run_train(options: argparse.Namespace) -> None:
    """Train, with a live line on a terminal."""
    config = read_config(options, "fedveil train")
    folder = options.out or Path("runs") / f"{config.data}-{config.model}-{config.defence}-{config.seed}".replace(
        ":", "."
    )
    with Progress(config.epochs) as progress:
        summary = train(config, folder, resume=options.resume, on_round=progress.show)
    if options.json:
        print(json.dumps(summary))
        return
    for name, value in summary.items():
        print(f"{name:<14} {value:.6g}" if isinstance(value, float) else f"{name:<14} {value}")
    print(f"{'report':<14} {folder / 'report.html'}")


class Progress:
    """A live line on stderr: epochs, the metric, time left. Nothing where stderr is not a terminal."""

    def __init__(self, epochs: int, label: str = "") -> None:
        form = "{desc} {percentage:3.0f}% |{bar}| epoch {n:.1f}/{total} [{elapsed}<{remaining}]{postfix}"
        self._bar = tqdm(total=epochs, desc=label, disable=None, bar_format=form, leave=True, file=sys.stderr)
        self._found: dict[str, str] = {}

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, record: dict[str, Any]) -> None:
        """Take a round's record in."""
        self._bar.update(record["epoch"] - self._bar.n)
        found = {name: f"{record[name]:.4f}" for name in METRICS if name in record}
        if found:
            self._bar.set_postfix(found, refresh=False)


def parser() -> argparse.ArgumentParser:
    """All commands and options."""
    top = argparse.ArgumentParser(
        prog="fedveil", description="Federated learning on a model that no client is ever sent."
    )
    commands = top.add_subparsers(dest="command", required=True)
    add_inspect(commands)
    add_train(commands)
    add_compare(commands)
    add_attack(commands)
    add_audit(commands)
    add_data(commands)
    demo = commands.add_parser("demo", help="train digits with five clients, plain and veiled, and compare")
    demo.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the report (default runs/demo)")
    demo.set_defaults(run=run_demo)
    return top


def add_data(commands: Any) -> None:
    """`fedveil data`."""
    data = commands.add_parser("data", help="list data sets, or download one").add_subparsers(
        dest="what", required=True
    )
    listing = data.add_parser("list", help="what there is and where it was found")
    listing.set_defaults(run=run_data_list)
    fetch = data.add_parser("get", help="download a data set; an interrupted download goes on")
    fetch.add_argument("name")
    fetch.add_argument("--to", type=Path, help="folder (default: FEDVEIL_DATA, or the cache)")
    fetch.set_defaults(run=run_data_get)


def run_data_list(options: argparse.Namespace) -> None:
    """A line a data set."""
    for entry in available():
        print(f"{entry.name:<10} {entry.state:<9} {entry.description}" + (f"  [{entry.where}]" if entry.where else ""))


def run_data_get(options: argparse.Namespace) -> None:
    """Download with a bar."""
    with tqdm(unit="B", unit_scale=True, disable=None, desc=options.name, file=sys.stderr) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        print(get(options.name, options.to or data_folder(), show))


def run_demo(options: argparse.Namespace) -> None:
    """The product's first impression."""
    torch.set_num_threads(1)  # matrices this small gain nothing from more, and lose much on a busy machine
    for line in run_comparison(options.out, lambda epochs, label: Progress(epochs, label)):
        print(line, flush=True)


def nearest(flag: str) -> str:
    """The option of `fedveil train` that a user may have meant."""
    near = difflib.get_close_matches(flag.lstrip("-").replace("-", "_"), kinds(), 1)
    return f"did you mean --{near[0].replace('_', '-')}?" if near else "fedveil COMMAND --help lists them"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # models of the working directory are found too
    options, unknown = parser().parse_known_args(arguments)
    try:
        if unknown:
            raise BadArgument(f"fedveil {options.command}", f"there is no option {unknown[0]!r}", nearest(unknown[0]))
        options.run(options)
    except FedveilError as error:
        print(f"fedveil: {error}", file=sys.stderr)
        return 2
    return 0
