"""`fedveil inspect`: print which parts of a model can be perturbed, given the shapes and types of its inputs."""

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import UseAppendAction, arg

from fedveil.cli.parser import Json, Switch
from fedveil.errors import BadArgument
from fedveil.files import require_memory
from fedveil.plain_json import to_json

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.graph.inputs import Inputs

Repeatable = Annotated[tuple[str, ...], UseAppendAction]
TYPES = {name: name for name in ("float32", "float64", "int64", "bool")} | {"float": "float32", "int": "int64"}
INPUT_HELP = (
    "sizes of one argument of forward, without the batch size, such as 3,32,32; repeat for each argument, in order. "
    "NAME=SIZES names a keyword argument, SIZES:TYPE sets the type (float, int, bool, float32, float64, int64), "
    "as in ids=128:int. Name all arguments or none. For one number per record, leave out the sizes, as in length=:int"
)
HEAD_HELP = "linear: add noise to the final layer; exposed: add none, so that clients see the true predictions"
COVERAGE_HELP = "fail if less than this fraction (0 to 1) of the model's parameter values can be perturbed"
PUBLIC_HELP = "name or prefix of parameters whose values clients know"


def inspect(
    model: Annotated[str, arg(metavar="MODEL", help="package.module:name of a model, or of a function that builds it")],
    input: Annotated[
        Repeatable, arg(metavar="[NAME=]SIZES[:TYPE]", help=INPUT_HELP, help_behavior_hint="(required)")
    ] = (),
    dtype: Annotated[Literal["float32", "float64", "int64"], arg(help="type of inputs without :TYPE")] = "float32",
    eval: Annotated[Switch, arg(help="analyse in evaluation mode")] = False,
    head: Annotated[Literal["linear", "exposed"], arg(help=HEAD_HELP)] = "linear",
    min_coverage: Annotated[float, arg(help=COVERAGE_HELP)] = 0.0,
    public: Annotated[Repeatable, arg(metavar="NAME", help=PUBLIC_HELP)] = (),
    as_json: Json = False,
) -> None:
    """Print the plan of a model."""
    from fedveil.graph import analyse, as_dict
    from fedveil.runs.build import load_factory

    if not input:
        raise BadArgument("--input", "no input is given", "pass --input 3,32,32, repeated for each argument of forward")
    network, example = load_factory(model).train(not eval), example_inputs(input, dtype)
    plan = analyse(network, example, head=head, min_coverage=min_coverage, public=public)
    print(to_json(as_dict(plan), indent=2) if as_json else plan)


def example_inputs(texts: Sequence[str], dtype: str = "float32") -> "Inputs":
    """Return the arguments of forward: a dict if they are named, otherwise a tuple."""
    parsed_inputs = [parse_input(text, dtype) for text in texts]
    names = [name for name, _ in parsed_inputs if name]
    if not names:
        return tuple([tensor for _, tensor in parsed_inputs])
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate or len(names) < len(parsed_inputs):
        message = f"{duplicate} is given twice" if duplicate else "some arguments are named and some are not"
        raise BadArgument("--input", message, "use --input ids=128:int --input mask=128")
    return dict(parsed_inputs)


def parse_input(text: str, dtype: str) -> "tuple[str, Tensor]":
    """Parse [NAME=]SIZES[:TYPE]; return the argument's name, or "", and a batch of two records of zeros."""
    import torch

    name, equals, description = text.rpartition("=")
    sizes, colon, type_name = description.partition(":")
    if equals and not name.isidentifier():
        raise BadArgument("--input", f"{name!r} in {text!r} is not a valid argument name", "use --input ids=128:int")
    if colon and type_name not in TYPES:
        raise BadArgument("--input", f"unknown type {type_name!r} in {text!r}", f"use one of {', '.join(TYPES)}")
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", sizes) and (sizes or not (equals or colon)):
        raise BadArgument("--input", f"{sizes!r} is not a list of sizes", "use --input 3,32,32 (without the batch)")
    shape, tensor_dtype = (
        [int(size) for size in sizes.split(",") if size],
        getattr(torch, TYPES[type_name if colon else dtype]),
    )
    with require_memory(
        "--input", f"two records of {sizes}", "use smaller sizes", 2 * math.prod(shape) * tensor_dtype.itemsize
    ):
        return name, torch.zeros((2, *shape), dtype=tensor_dtype)
