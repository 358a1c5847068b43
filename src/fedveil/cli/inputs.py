"""`--input`: arguments of a model's forward from sizes, names and types."""

import math
import re
from collections.abc import Sequence

import torch

from fedveil.errors import BadArgument
from fedveil.files import require_memory
from fedveil.graph.inputs import Inputs

EXACT = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}
TYPES = {**EXACT, "float": torch.float32, "int": torch.int64, "bool": torch.bool}


def parse_input(text: str, dtype: str) -> tuple[str, torch.Tensor]:
    """Return the name of a keyword argument, or "", and two records of zeros for it, from [NAME=]SIZES[:TYPE]."""
    name, equals, form = text.rpartition("=")
    sizes, colon, kind = form.partition(":")
    if equals and not name.isidentifier():
        raise BadArgument("--input", f"{name!r} in {text!r} is not a valid argument name", "use --input ids=128:int")
    if colon and kind not in TYPES:
        raise BadArgument("--input", f"there is no type {kind!r} in {text!r}", f"use one of {', '.join(TYPES)}")
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", sizes) and (sizes or not (equals or colon)):
        raise BadArgument("--input", f"{sizes!r} is not a list of sizes", "use --input 3,32,32 (one input, no batch)")
    shape, own = [int(size) for size in sizes.split(",") if size], TYPES[kind if colon else dtype]
    needed = 2 * math.prod(shape) * own.itemsize
    with require_memory("--input", f"two records of {sizes}", "use smaller sizes", needed):
        return name, torch.zeros((2, *shape), dtype=own)


def example_inputs(texts: Sequence[str], dtype: str = "float32") -> Inputs:
    """Return the arguments of forward: positional, or keyword arguments if they have names."""
    parsed = [parse_input(text, dtype) for text in texts]
    names = [name for name, _ in parsed if name]
    if not names:
        return tuple([tensor for _, tensor in parsed])
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice or len(names) < len(parsed):
        what = f"{twice} is there twice" if twice else "some arguments have names and some have none"
        raise BadArgument("--input", what, "use --input ids=128:int --input mask=128")
    return dict(parsed)
