"""`fedveil inspect`, `train`, `compare`, `data` and `demo`."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from fedveil.cli.flags import add_config, read_config
from fedveil.cli.show import Progress, print_table
from fedveil.data import available, data_folder, get
from fedveil.errors import BadArgument
from fedveil.graph import analyse, as_dict
from fedveil.graph.inputs import Inputs
from fedveil.runs.config import CHOICES, load_factory
from fedveil.runs.folder import train
from fedveil.studies.compare import CONTROL
from fedveil.studies.compare import run_comparison as compare
from fedveil.studies.demo import run_comparison

DTYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}
KINDS = {**DTYPES, "float": torch.float32, "int": torch.int64, "bool": torch.bool}
INPUT = """sizes of one argument of forward without the batch, such as 3,32,32; once for each argument, in their order.
NAME=SIZES names a keyword argument, SIZES:TYPE says what it holds (float, int, bool, float32, float64, int64):
--input ids=128:int --input mask=128. Name all of them, or none. A number per record has no sizes:
--input length=:int"""


def parse_shape(text: str) -> tuple[int, ...]:
    """Sizes of one input, without the batch."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise BadArgument("--input", f"{text!r} is not a list of sizes", "--input 3,32,32 (one input, no batch)")
    return sizes


def parse_input(text: str, dtype: torch.dtype = torch.float32) -> tuple[str, torch.Tensor]:
    """The name of a keyword argument, or "", and two records of zeros for it, from [NAME=]SIZES[:TYPE]."""
    name, equals, form = text.rpartition("=")
    sizes, colon, kind = form.partition(":")
    if equals and not name.isidentifier():
        raise BadArgument("--input", f"{name!r} in {text!r} is no name of an argument", "--input ids=128:int")
    if colon and kind not in KINDS:
        raise BadArgument("--input", f"there is no type {kind!r} in {text!r}", f"one of {', '.join(KINDS)}")
    shape = () if not sizes and (equals or colon) else parse_shape(sizes)
    return name, torch.zeros((2, *shape), dtype=KINDS[kind] if colon else dtype)


def example_inputs(texts: Sequence[str], dtype: torch.dtype = torch.float32) -> Inputs:
    """What forward takes: positional arguments, or keyword arguments if they have names."""
    parsed = [parse_input(text, dtype) for text in texts]
    names = [name for name, _ in parsed if name]
    if not names:
        return tuple([tensor for _, tensor in parsed])
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice or len(names) < len(parsed):
        what = f"{twice} is there twice" if twice else "some arguments have names and some have none"
        raise BadArgument("--input", what, "--input ids=128:int --input mask=128")
    return dict(parsed)


def inspect(options: argparse.Namespace) -> None:
    """Print a model's plan."""
    model = load_factory(options.model).train(not options.eval)
    example = example_inputs(options.input, DTYPES[options.dtype])
    plan = analyse(model, example, head=options.head, min_coverage=options.min_coverage, public=options.public)
    print(json.dumps(as_dict(plan), indent=2) if options.json else plan)


def add_inspect(commands: Any) -> None:
    """`fedveil inspect`."""
    show = commands.add_parser("inspect", help="show which layers of a model can be masked, and how much of it")
    show.add_argument("model", help="package.module:factory, called without arguments, or a module there")
    show.add_argument("--input", required=True, action="append", metavar="[NAME=]SIZES[:TYPE]", help=INPUT)
    show.add_argument("--dtype", choices=DTYPES, default="float32", help="of the inputs without a type of their own")
    show.add_argument("--eval", action="store_true", help="analyse in evaluation mode")
    help_head = "exposed: no additive noise, clients read the true predictions"
    show.add_argument("--head", choices=("linear", "exposed"), default="linear", help=help_head)
    help_least = "fail if less than this share of the parameters' values can be covered, 0 to 1"
    show.add_argument("--min-coverage", type=float, default=0.0, help=help_least)
    help_public = "name, or beginning of a name, of parameters whose values clients know; may be repeated"
    show.add_argument("--public", action="append", default=[], metavar="NAME", help=help_public)
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
