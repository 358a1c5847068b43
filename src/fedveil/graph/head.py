"""The layer at the end of a model that takes the additive noise."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fedveil.errors import HeadNotLinear
from fedveil.graph.export import LOGITS, Exported, check_example, short_name, stand_in
from fedveil.graph.inputs import Inputs, arguments, each
from fedveil.graph.walk import HEADS, module_of, place_of

RESHAPES = {
    "view",
    "reshape",
    "flatten",
    "unflatten",
    "squeeze",
    "unsqueeze",
    "contiguous",
    "clone",
    "alias",
    "_unsafe_view",
}
EQUAL = {
    *RESHAPES, "permute", "transpose", "movedim", "t", "mean", "sum", "slice", "narrow",
    *[f"{kind}avg_pool{n}d" for kind in ("", "adaptive_") for n in (1, 2, 3)],
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d",
    "upsample_bicubic2d", "upsample_trilinear3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
}  # fmt: skip


@dataclass(frozen=True)
class Head:
    """The layer whose outputs are the model's.

    Attributes:
        path: of the module in whose forward it is.
        weight: name of its weight.
        bias: name of its bias, if it has one.
        outputs: how many there are.
        dim: which dim of the weight counts outputs: 0, or 1 for a transposed convolution.
        axis: which dim of what clients compare with targets counts outputs: -1 for a Linear, 1 for a convolution.
        last: whether clients run the whole model; else only up to this layer, because what follows merely reshapes.
    """

    path: str
    weight: str
    bias: str | None
    outputs: int
    dim: int
    axis: int
    last: bool


def find_head(model: nn.Module, exported: Exported, inputs: Inputs) -> tuple[Head, fx.Node]:
    """The Linear or convolution at the end, behind nothing but what is linear and equal for every output."""
    title = type(model).__name__
    if not exported.single:
        what = "the model returns more than one tensor, or a dict"
        raise HeadNotLinear(title, what, LOGITS)
    node, tail = exported.outputs[0], []
    while node.op == "call_function" and short_name(node.target) in EQUAL:
        tail.append(node)
        node = node.args[0]  # type: ignore[assignment]
    name = short_name(node.target) if node.op == "call_function" else node.op
    if name not in HEADS:
        where = place_of(tail[-1]) if node.op != "call_function" and tail else title
        where = place_of(node) if node.op == "call_function" else where
        raise _refused(where, "the model does not end in a Linear or convolution")
    head = _described(model, exported, node, name)
    if not tail:
        return head, node
    axis = _class_axis(model, head, inputs)
    if axis is not None:
        return _replaced(head, axis=axis), node
    reshapes = all(short_name(step.target) in RESHAPES for step in tail)
    if reshapes and name == "linear" and _is_linear(model, head):
        return _replaced(head, last=False), node
    what = "what follows the last layer does not treat all outputs alike, or fixes their number"
    raise _refused(place_of(tail[0]), what)


def _replaced(head: Head, **changes: Any) -> Head:
    return Head(**{**head.__dict__, **changes})


def _is_linear(model: nn.Module, head: Head) -> bool:
    return isinstance(model.get_submodule(head.path), nn.Linear) and head.weight == f"{head.path}.weight"


def _described(model: nn.Module, exported: Exported, node: fx.Node, name: str) -> Head:
    """The layer, if its weight is its own."""
    where, path = place_of(node), module_of(node)[0]
    if len(node.users) > 1:
        raise _refused(where, "the last layer's output is used in more than one place")
    arguments_ = [*node.args, *[None] * 3][1:3]
    found: list[str | None] = []
    for argument in arguments_:
        if argument is None:
            found.append(None)
            continue
        known = exported.parameters.get(argument.name) if isinstance(argument, fx.Node) else None
        if known is None:
            raise _refused(where, "the last layer's weight is not a parameter as it stands")
        uses = [n for n in exported.graph.nodes if n.op == "placeholder" and exported.parameters.get(n.name) == known]
        if sum(len(n.users) for n in uses) > 1:
            fix = (
                "give it a weight of its own: layer.weight = nn.Parameter(layer.weight.detach().clone()); or, for "
                'multiplicative noise only, analyse(model, inputs, head="exposed"): then clients read the true '
                "predictions"
            )
            raise HeadNotLinear(where, f"the last layer's {known} is used in more than one place (tied weights)", fix)
        found.append(known)
    weight, bias = found
    assert weight is not None
    transposed = name.startswith("conv_transpose")
    groups = dict(zip([a.name for a in node.target._schema.arguments], node.args, strict=False)).get("groups", 1)  # type: ignore[union-attr]
    if groups != 1:
        raise _refused(where, f"the last convolution has {groups} groups")
    dim = 1 if transposed else 0
    shape = node.args[1].meta["val"].shape  # type: ignore[union-attr]
    return Head(path, weight, bias, shape[dim], dim, -1 if name == "linear" else 1, True)


def _class_axis(model: nn.Module, head: Head, inputs: Inputs) -> int | None:
    """Where the model's output grows if the head has more outputs; None if it does not, or cannot."""
    shapes = [_output_shape(model, head, inputs, more) for more in (1, 3)]
    if any(shape is None for shape in shapes):
        return None
    one, three = (tuple(shape or ()) for shape in shapes)
    if len(one) != len(three):
        return None
    grown = [d for d, (a, b) in enumerate(zip(one, three, strict=True)) if a != b]
    if len(grown) != 1 or one[grown[0]] != head.outputs + 1 or three[grown[0]] != head.outputs + 3 or not grown[0]:
        return None
    return -1 if grown[0] == len(one) - 1 and head.axis == -1 else grown[0]


def _output_shape(model: nn.Module, head: Head, inputs: Inputs, more: int) -> Sequence[int] | None:
    """The shape of the output with `more` outputs, on tensors without numbers."""
    twin = stand_in(model)
    values: dict[str, Tensor] = {}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        for name, value in [*twin.named_parameters(), *twin.named_buffers()]:
            shape = list(value.shape)
            if name in (head.weight, head.bias):
                shape[head.dim if name == head.weight else 0] += more
            values[name] = torch.empty(shape, dtype=value.dtype, device=value.device)
        example = each(mode.from_tensor, check_example(model, inputs))
        args, kwargs = arguments(example)
        try:
            out = torch.func.functional_call(twin, values, args, kwargs)
        except Exception:  # code behind the head that counts on the number of outputs
            return None
    return out.shape if isinstance(out, Tensor) else None


def _refused(where: str, what: str) -> HeadNotLinear:
    return HeadNotLinear(
        where,
        f"{what}, so additive noise on its outputs could not be lifted again",
        "end the model in nn.Linear or a convolution and put what follows it into the loss; or, for multiplicative "
        'noise only, analyse(model, inputs, head="exposed"): then clients read the true predictions',
    )
