"""The layer of a model that is masked additively: the final one, or the last one that can be."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fedveil.errors import AnalysisError, HeadNotLinear
from fedveil.graph.export import LOGITS, Exported, check_example, short_name, stand_in
from fedveil.graph.inputs import Inputs, arguments, each
from fedveil.graph.tail import RESHAPED, UPSAMPLED, AtLayer, keeps_samples_apart
from fedveil.graph.walk import HEADS, module_of, place_of

RESHAPES = {*RESHAPED, "squeeze", "unsqueeze", "contiguous", "clone", "alias"}
EQUAL = {
    *RESHAPES, "permute", "transpose", "movedim", "t", "mean", "sum", "slice", "narrow", *UPSAMPLED,
    *[f"{kind}avg_pool{n}d" for kind in ("", "adaptive_") for n in (1, 2, 3)],
    *[f"_upsample_nearest_exact{n}d" for n in (1, 2, 3)],
}  # fmt: skip
Tail = Literal["alike", "reshaped", "stacked", "repeated"]
TAILS: tuple[Tail, ...] = get_args(Tail)
WITHIN = ("stacked", "repeated")


@dataclass(frozen=True)
class Head:
    """The layer that is masked additively.

    Attributes:
        path: of the module whose forward calls it.
        weight: name of its weight.
        bias: name of its bias, if it has one.
        outputs: their number.
        dim: the dim of the weight that counts outputs: 0, or 1 for a transposed convolution.
        axis: the dim of the masked outputs that counts outputs: -1 for a Linear, 1 for a convolution.
        tail: what follows it. "alike": only operations that are linear and equal for every output. "reshaped": only
            reshapes, which clients need not run. Otherwise clients apply each candidate for the noise to the layer's
            output: "stacked" along the batch, if nothing that follows couples samples; else forward is "repeated".
    """

    path: str
    weight: str
    bias: str | None
    outputs: int
    dim: int
    axis: int
    tail: Tail

    @property
    def within(self) -> bool:
        """Whether what follows is more than a rearrangement of its outputs."""
        return self.tail in WITHIN


def find_head(model: nn.Module, exported: Exported, inputs: Inputs) -> tuple[Head, fx.Node | None]:
    """The Linear or convolution at the end, with its node; else the last one that can be masked, and None."""
    if not exported.single:
        raise AnalysisError(type(model).__name__, "the model returns more than one tensor, or a dict", LOGITS)
    found = _at_end(model, exported, inputs)
    if found:
        return found
    tried: list[str] = []
    for node in _layers(exported):
        layer = _described(exported, node)
        head = layer if isinstance(layer, str) else _within(model, exported, layer, node, inputs)
        if isinstance(head, Head):
            return head, None
        tried.append(f"{place_of(node)}: {head}")
    what = "; ".join(tried[:3]) or "it has no Linear and no convolution"
    raise HeadNotLinear(
        type(model).__name__,
        f"no layer can be masked additively: {what}",
        "give the model a Linear or a convolution with a weight of its own; or, for multiplicative noise only, "
        'analyse(model, inputs, head="exposed"): then clients read the true predictions',
    )


def _at_end(model: nn.Module, exported: Exported, inputs: Inputs) -> tuple[Head, fx.Node] | None:
    """The Linear or convolution that only operations linear and equal for every output follow."""
    node, tail = exported.outputs[0], []
    while node.op == "call_function" and short_name(node.target) in EQUAL:
        tail.append(node)
        node = node.args[0]  # type: ignore[assignment]
    if node.op != "call_function" or short_name(node.target) not in HEADS or len(node.users) > 1:
        return None
    layer = _described(exported, node)
    if isinstance(layer, str) or layer.calls > 1:
        return None
    head = layer.head
    if not tail:
        return head, node
    axis = _class_axis(model, head, inputs)
    if axis is not None:
        return replace(head, axis=axis), node
    reshapes = all(short_name(step.target) in RESHAPES for step in tail)
    linear = isinstance(model.get_submodule(head.path), nn.Linear) and head.weight == f"{head.path}.weight"
    return (replace(head, tail="reshaped"), node) if reshapes and linear else None


def _layers(exported: Exported) -> Iterator[fx.Node]:
    """Linears and convolutions from last to first; those that every path to the output goes through come first."""
    nodes = [n for n in exported.graph.nodes if n.op == "call_function" and short_name(n.target) in HEADS][::-1]
    own = {*exported.parameters, *exported.buffers}
    given = {n for n in exported.graph.nodes if n.op == "placeholder" and n.name not in own}
    alone = [node for node in nodes if not _reaches(exported.outputs[0], given, node)]
    yield from alone
    yield from (node for node in nodes if node not in alone and _reaches(exported.outputs[0], {node}, None))


def _reaches(node: fx.Node, goals: set[fx.Node], around: fx.Node | None) -> bool:
    """Whether a node depends on one of the goals by a path that avoids `around`."""
    seen, waiting = {node}, [node]
    while waiting:
        here = waiting.pop()
        if here in goals:
            return True
        if here is not around:
            waiting += [n for n in here.all_input_nodes if n not in seen]
            seen.update(here.all_input_nodes)
    return False


class _Layer(NamedTuple):
    """A layer, and how often forward calls it."""

    head: Head
    calls: int


def _described(exported: Exported, node: fx.Node) -> _Layer | str:
    """The layer, or why it cannot be masked."""
    name = short_name(node.target)
    found: list[str | None] = []
    calls = 0
    for place, argument in enumerate([*node.args, *[None] * 3][1:3], 1):
        if argument is None:
            found.append(None)
            continue
        known = exported.parameters.get(argument.name) if isinstance(argument, fx.Node) else None
        if known is None:
            return "its weight or bias is computed, not a parameter itself"
        same = [n for n in exported.graph.nodes if n.op == "placeholder" and exported.parameters.get(n.name) == known]
        users = [user for n in same for user in n.users]
        if any(short_name(u.target) != name or [*u.args, *[None] * 3][place] not in same for u in users):
            return f"{known} is also used elsewhere (tied weights)"
        calls = max(calls, len(users))
        found.append(known)
    weight, bias = found
    assert weight is not None
    groups = dict(zip([a.name for a in node.target._schema.arguments], node.args, strict=False)).get("groups", 1)  # type: ignore[union-attr]
    if groups != 1:
        return f"it has {groups} groups"
    dim = 1 if name.startswith("conv_transpose") else 0
    shape = node.args[1].meta["val"].shape  # type: ignore[union-attr]
    axis = -1 if name == "linear" else 1
    return _Layer(Head(module_of(node)[0], weight, bias, shape[dim], dim, axis, "alike"), calls)


def _within(model: nn.Module, exported: Exported, layer: _Layer, node: fx.Node, inputs: Inputs) -> Head | str:
    """The layer as a head that other operations follow, or why it cannot be one."""
    head = layer.head
    alone = _run(model, head, inputs, 1, copies=1)
    if alone is None or alone.calls != layer.calls:
        return "forward calls it where its output cannot be changed"
    if layer.calls == 1 and keeps_samples_apart(exported, node):
        stacked = _run(model, head, inputs, 1, copies=3)
        if stacked and list(stacked.shape) == [3 * alone.shape[0], *alone.shape[1:]]:
            return replace(head, tail="stacked")
    return replace(head, tail="repeated")


def _class_axis(model: nn.Module, head: Head, inputs: Inputs) -> int | None:
    """The axis of the model's output that grows with the head's outputs; None if there is none."""
    one, three = (_run(model, head, inputs, more) for more in (1, 3))
    if one is None or three is None or len(one.shape) != len(three.shape):
        return None
    sizes = list(zip(one.shape, three.shape, strict=True))
    grown = [d for d, (a, b) in enumerate(sizes) if a != b]
    if len(grown) != 1 or grown[0] == 0 or sizes[grown[0]] != (head.outputs + 1, head.outputs + 3):
        return None
    return -1 if grown[0] == len(sizes) - 1 and head.axis == -1 else grown[0]


class _Ran(NamedTuple):
    """The shape of a model's output, and how often its head was called."""

    shape: Sequence[int]
    calls: int


def _run(model: nn.Module, head: Head, inputs: Inputs, more: int, copies: int = 0) -> _Ran | None:
    """Run the model on fake tensors, with `more` outputs of the head.

    With `copies`, these are removed again, and the rest is repeated that many times along the batch.
    """
    twin = stand_in(model)
    values: dict[str, Tensor] = {}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        for name, value in [*twin.named_parameters(), *twin.named_buffers()]:
            shape = list(value.shape)
            if name in (head.weight, head.bias):
                shape[head.dim if name == head.weight else 0] += more
            values[name] = torch.empty(shape, dtype=value.dtype, device=value.device)

        def change(output: Tensor) -> Tensor:
            own = output.narrow(head.axis, 0, head.outputs)
            return torch.cat([own] * copies) if copies else output

        example = each(mode.from_tensor, check_example(model, inputs))
        args, kwargs = arguments(example)
        try:
            with AtLayer(values[head.weight], change) as layer:
                out = torch.func.functional_call(twin, values, args, kwargs)
        except Exception:  # code after the head that depends on the number of outputs or samples
            return None
    return _Ran(out.shape, layer.calls) if isinstance(out, Tensor) else None
