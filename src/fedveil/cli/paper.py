"""`fedveil reproduce`."""

import argparse
import textwrap
from pathlib import Path
from typing import Any

from fedveil.cli.show import Cells, print_table, print_words
from fedveil.studies.attack import Shown
from fedveil.studies.paper import EXHIBITS, reproduce
from fedveil.studies.paper.plan import SCALES, read_plan


def add_reproduce(commands: Any) -> None:
    """`fedveil reproduce NAME...`: the paper's tables and figures."""
    command = commands.add_parser("reproduce", allow_abbrev=False, help="the paper's tables and figures, ours beside")
    command.add_argument("names", nargs="+", metavar="NAME", help=f"all, or some of {', '.join(EXHIBITS)}")
    help_scale = "quick: minutes, embedded data; cpu: two cores, up to two hours a table; paper: its own, for a GPU"
    command.add_argument("--scale", choices=SCALES, default="quick", help=help_scale)
    command.add_argument("--device", default="cpu", help="to compute on (default cpu)")
    command.add_argument("--out", type=Path, help="folder of the results; a stopped run goes on there")
    command.add_argument("--workers", type=int, help="processes side by side (default: one a core)")
    command.set_defaults(run=run_reproduce)


def run_reproduce(options: argparse.Namespace) -> None:
    """Compute what is not there yet, print each table, say where the page is."""
    folder = options.out or Path("runs") / f"paper-{options.scale}"

    def done(name: str, shown: Shown) -> None:
        plan = read_plan(name, options.scale)
        print(f"\n{plan.title}\n{textwrap.fill(plan.about, 110)}\n")
        if shown.rows:
            print_table(shown.header, shown.rows)
        print(f"\n{textwrap.fill(shown.note, 110)}")
        print_words(shown)

    with Cells() as cells:
        page = reproduce(
            options.names,
            options.scale,
            folder,
            workers=options.workers,
            device=options.device,
            show=cells.show,
            on_done=done,
        )
    print(f"\nreport: {page}")
