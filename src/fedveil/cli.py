"""The command line: results to stdout, messages to stderr; exit 0 as asked, 2 for misuse."""

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from fedveil.errors import BadArgument, FedveilError
from fedveil.graph import analyse, as_dict

DTYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}


def load_factory(spec: str) -> nn.Module:
    """The model that `package.module:factory` builds, or names; modules of the working directory are found too."""
    path, _, name = spec.partition(":")
    if not path or not name:
        raise BadArgument(spec, "a model is named as package.module:factory", "fedveil inspect my_package.models:net")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(path), name)
    except ImportError as error:
        raise BadArgument(spec, f"cannot import {path}: {error}", "run where `import " + path + "` works") from error
    except AttributeError as error:
        raise BadArgument(spec, f"module {path} has no {name!r}") from error
    try:
        model = found if isinstance(found, nn.Module) else found()
    except TypeError as error:
        raise BadArgument(spec, f"cannot be called without arguments: {error}", "name a factory that can") from error
    if not isinstance(model, nn.Module):
        raise BadArgument(spec, f"gave {type(model).__name__}, not a torch.nn.Module")
    return model


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


def parser() -> argparse.ArgumentParser:
    """All commands and options."""
    top = argparse.ArgumentParser(
        prog="fedveil", description="Federated learning on a model that no client is ever sent."
    )
    commands = top.add_subparsers(dest="command", required=True)
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
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    options = parser().parse_args(arguments)
    try:
        options.run(options)
    except FedveilError as error:
        print(f"fedveil: {error}", file=sys.stderr)
        return 2
    return 0
