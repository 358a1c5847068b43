"""The command line: results to stdout, messages to stderr; exit 0 as asked, 2 for misuse."""

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from fedveil.cli.curious import add_attack, add_audit
from fedveil.cli.paper import add_reproduce
from fedveil.cli.training import add_compare, add_data, add_inspect, add_train, run_demo
from fedveil.errors import BadArgument, FedveilError
from fedveil.runs.config import kinds

__all__ = ["main"]


def parser() -> argparse.ArgumentParser:
    """All commands and options."""
    top = argparse.ArgumentParser(
        prog="fedveil", description="Federated learning on a covered model, and attacks that measure what it hides."
    )
    commands = top.add_subparsers(dest="command", required=True)
    add_inspect(commands)
    add_train(commands)
    add_compare(commands)
    add_attack(commands)
    add_audit(commands)
    add_reproduce(commands)
    add_data(commands)
    demo = commands.add_parser("demo", help="train digits with five clients, plain and veiled, and compare")
    demo.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the report (default runs/demo)")
    demo.set_defaults(run=run_demo)
    return top


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
