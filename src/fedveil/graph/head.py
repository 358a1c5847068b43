"""Find the layer that receives additive noise: the final layer, or the last one that can take it."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import Argument
from torch.utils import _pytree as pytree

from fedveil.errors import HeadNotLinear
from fedveil.graph import operations
from fedveil.graph.export import SAMPLES, ModelGraph, SkipMode, check_example, copy_model
from fedveil.graph.inputs import Inputs, LayerOutputMode, arguments, each
from fedveil.graph.operations import describe_location, innermost_module, named_arguments, operation_name
from fedveil.graph.outputs import return_predictions
from fedveil.graph.rules.elementwise import ELEMENTWISE

Tail = Literal["alike", "reshaped", "stacked", "repeated"]
TAILS: tuple[Tail, ...] = get_args(Tail)
INNER_TAILS = ("stacked", "repeated")


@dataclass(frozen=True, eq=False)
class Head:
    """The layer that receives additive noise.

    Attributes:
        path: the path of the module that calls it.
        weight: the name of its weight.
        bias: the name of its bias, if it has one.
        outputs: the number of its outputs.
        dim: the dim of the weight that indexes outputs: 0, or 1 for a transposed convolution and addmm.
        axis: the dim of the output tensor that indexes outputs: -1 for a Linear, 1 for a convolution.
        tail: the operations after the layer. "alike": all are linear and treat every output in the same way.
            "reshaped": all are reshapes, which clients need not run. Otherwise, clients subtract each noise candidate
            from the layer's output. "stacked": the results are concatenated along the batch. "repeated": forward runs
            once per candidate, because the results cannot be concatenated.
    """

    path: str
    weight: str
    bias: str | None
    outputs: int
    dim: int
    axis: int
    tail: Tail

    @property
    def is_inner(self) -> bool:
        """Whether clients must run the operations after the layer for each noise candidate."""
        return self.tail in INNER_TAILS


def find_head(
    model: nn.Module,
    graph: ModelGraph,
    inputs: Inputs,
    samples: int = SAMPLES,
    *,
    only_trained: bool = False,
    skipped: Collection[str] = (),
) -> tuple[Head, fx.Node | None]:
    """Return the final layer and its node; if it cannot take noise, return the last layer that can, and None.

    If `only_trained` is true, layers with a frozen weight or bias cannot take noise. Layers whose weight is in
    `skipped` cannot take noise either, because forward may not call them.
    """
    frozen = {name for name, parameter in model.named_parameters() if only_trained and not parameter.requires_grad}
    inputs = check_example(model, inputs, samples)
    final_layer = _find_head_at_end(model, graph, inputs)
    if (
        final_layer
        and frozen.isdisjoint((final_layer[0].weight, final_layer[0].bias))
        and final_layer[0].weight not in skipped
    ):
        return final_layer
    reasons: list[str] = []
    for node in [
        *_find_layers(graph, operations.LAYERS | {operations.ADDMM}),
        *_find_layers(graph, {operations.MATMUL}),
    ]:
        try:
            if _describe_layer(graph, node)[0].weight in skipped:
                raise _UnsuitableLayer("forward may skip it at random, as with layerdrop")
            return _find_head_within(model, graph, node, inputs, frozen), None
        except _UnsuitableLayer as reason:
            reasons.append(f"{describe_location(node)}: {reason}")
    message = "; ".join(reasons[:3]) or "it has neither a Linear nor a convolution"
    raise HeadNotLinear(
        type(model).__name__,
        f"no layer can take additive noise: {message}",
        "add a Linear or a convolution whose weight is used only there; or, for multiplicative noise only, "
        'call analyse(model, inputs, head="exposed"): clients then see the true predictions',
    )


def find_layer(graph: ModelGraph, head: Head) -> fx.Node | None:
    """Return the node of the head in a graph in which other layers are skipped."""
    nodes = [n for n in graph.graph.nodes if n.op == "call_function" and operation_name(n) in operations.LAYERS]
    weights = [(n, named_arguments(n)["weight"]) for n in nodes]
    layers = [
        n for n, weight in weights if isinstance(weight, fx.Node) and graph.parameters.get(weight.name) == head.weight
    ]
    return layers[-1] if layers else None


class _UnsuitableLayer(Exception):
    """A layer cannot take additive noise; the message states the reason."""


def _find_head_at_end(model: nn.Module, graph: ModelGraph, inputs: Inputs) -> tuple[Head, fx.Node] | None:
    """Find a Linear or convolution followed only by linear operations that treat every output in the same way."""
    node, tail = graph.outputs[0], []
    while node.op == "call_function" and operation_name(node) in operations.UNIFORM_LINEAR:
        tail.append(operation_name(node))
        node = node.all_input_nodes[0]
    if node.op != "call_function" or operation_name(node) not in operations.LAYERS or len(node.users) > 1:
        return None
    try:
        head, calls = _describe_layer(graph, node)
    except _UnsuitableLayer:
        return None
    if calls > 1:
        return None
    if not tail:
        return head, node
    axis = _class_axis(model, head, inputs)
    if axis is not None:
        return replace(head, axis=axis), node
    linear = isinstance(model.get_submodule(head.path), nn.Linear) and head.weight == f"{head.path}.weight"
    return (replace(head, tail="reshaped"), node) if linear and operations.SAME_ELEMENTS.issuperset(tail) else None


def _find_layers(graph: ModelGraph, kinds: Collection[str]) -> list[fx.Node]:
    """Return the layers of these kinds from last to first, starting with layers on every path to the output."""
    nodes = [n for n in graph.graph.nodes if n.op == "call_function" and operation_name(n) in kinds][::-1]
    state = {*graph.parameters, *graph.buffers}
    inputs = {n for n in graph.graph.nodes if n.op == "placeholder" and n.name not in state}
    unavoidable = [node for node in nodes if not _reaches(graph.outputs[0], inputs, node)]
    return unavoidable + [n for n in nodes if n not in unavoidable and _reaches(graph.outputs[0], {n}, None)]


def _reaches(node: fx.Node, goals: set[fx.Node], avoid: fx.Node | None) -> bool:
    """Return whether a path from one of the goals to `node` avoids the node `avoid`."""
    visited, pending = {node}, [node]
    while pending:
        current = pending.pop()
        if current in goals:
            return True
        if current is not avoid:
            pending += [n for n in current.all_input_nodes if n not in visited]
            visited.update(current.all_input_nodes)
    return False


def _describe_layer(graph: ModelGraph, node: fx.Node) -> tuple[Head, int]:
    """Return a layer as a head, and the number of times forward calls it."""
    name, arguments, names, calls = operation_name(node), _layer_arguments(node), dict[str, str](), 0
    for key in ("weight", "bias"):
        argument = arguments[key]
        if argument is None:
            continue
        parameter = graph.parameters.get(argument.name) if isinstance(argument, fx.Node) else None
        if parameter is None:
            raise _UnsuitableLayer("its weight or bias is computed, not a parameter")
        placeholders = [
            n for n in graph.graph.nodes if n.op == "placeholder" and graph.parameters.get(n.name) == parameter
        ]
        users = [user for n in placeholders for user in _list_readers(n)]
        if any(operation_name(u) != name or _layer_arguments(u)[key] not in placeholders for u in users):
            raise _UnsuitableLayer(f"{parameter} is also used elsewhere (tied weights)")
        names[key], calls = parameter, max(calls, len(users))
    assert isinstance(arguments["weight"], fx.Node)
    if arguments.get("groups", 1) != 1:
        raise _UnsuitableLayer(f"it has {arguments['groups']} groups")
    transposed = name == operations.MATMUL and arguments["weight"] is named_arguments(node)["other"]
    dim = 1 if name.startswith("conv_transpose") or name == operations.ADDMM or transposed else 0
    outputs = arguments["weight"].meta["val"].shape[dim]
    axis, path = 1 if name in operations.CONVOLUTIONS else -1, innermost_module(node)[0]
    return Head(path, names["weight"], names.get("bias"), outputs, dim, axis, "alike"), calls


def _is_transpose(node: fx.Node) -> bool:
    return operation_name(node) in operations.TRANSPOSES and node.meta["val"].dim() == 2


def _list_readers(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that read a parameter or its transpose."""
    return [reader for user in node.users for reader in (user.users if _is_transpose(user) else [user])]


def _layer_arguments(node: fx.Node) -> dict[str, Argument]:
    """Return a layer's arguments by name; in addmm, the bias is the first argument, and the weight is the last."""
    arguments = named_arguments(node)
    if operation_name(node) == operations.MATMUL:
        second_matrix = arguments["other"]
        if not isinstance(second_matrix, fx.Node) or second_matrix.meta["val"].dim() != 2:
            raise _UnsuitableLayer("its second matrix is not a parameter")
        return {
            "weight": second_matrix.all_input_nodes[0] if _is_transpose(second_matrix) else second_matrix,
            "bias": None,
        }
    if operation_name(node) != operations.ADDMM:
        return arguments
    bias = arguments["self"]
    if (
        arguments["alpha"] != 1
        or arguments["beta"] != 1
        or not isinstance(bias, fx.Node)
        or bias.meta["val"].dim() != 1
    ):
        raise _UnsuitableLayer("it is not the sum of a product and a bias")
    return {"weight": arguments["mat2"], "bias": bias}


def _find_head_within(model: nn.Module, graph: ModelGraph, node: fx.Node, inputs: Inputs, frozen: set[str]) -> Head:
    """Return the head for a layer that is followed by other operations."""
    head, calls = _describe_layer(graph, node)
    if not frozen.isdisjoint((head.weight, head.bias)):
        raise _UnsuitableLayer("its weight or bias is frozen, and clients have it")
    shape_and_calls = _run(model, head, inputs, 1, copies=1)
    if shape_and_calls is None or shape_and_calls[1] != calls:
        raise _UnsuitableLayer("forward calls it where its output cannot be changed")
    if calls == 1 and keeps_samples_independent(graph, node):
        samples, *other_sizes = shape_and_calls[0]
        if _run(model, head, inputs, 1, copies=3) == ([3 * samples, *other_sizes], 1):
            return replace(head, tail="stacked")
    return replace(head, tail="repeated")


def _class_axis(model: nn.Module, head: Head, inputs: Inputs) -> int | None:
    """Return the axis of the model's output whose size grows with the number of head outputs; None if there is none."""
    one_extra, three_extra = (_run(model, head, inputs, num_extra) for num_extra in (1, 3))
    if one_extra is None or three_extra is None or len(one_extra[0]) != len(three_extra[0]):
        return None
    sizes = list(zip(one_extra[0], three_extra[0], strict=True))
    growing = [d for d, (a, b) in enumerate(sizes) if a != b]
    if len(growing) != 1 or growing[0] == 0 or sizes[growing[0]] != (head.outputs + 1, head.outputs + 3):
        return None
    return -1 if growing[0] == len(sizes) - 1 and head.axis == -1 else growing[0]


def _run(model: nn.Module, head: Head, inputs: Inputs, num_extra: int, copies: int = 0) -> tuple[list[int], int] | None:
    """Run the model on fake tensors with `num_extra` more head outputs.

    If `copies` is not 0, the extra outputs are removed again, and the others are repeated `copies` times along the
    batch. Return the shape of the model's output and the number of calls to the head, or None if the model fails,
    for example because code after the head depends on the number of outputs or samples.
    """
    model_copy = copy_model(model)
    values: dict[str, Tensor] = {}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        for name, value in [*model_copy.named_parameters(), *model_copy.named_buffers()]:
            shape = list(value.shape)
            if name in (head.weight, head.bias):
                shape[head.dim if name == head.weight else 0] += num_extra
            values[name] = torch.empty(shape, dtype=value.dtype, device=value.device)

        def change(output: Tensor) -> Tensor:
            original = output.narrow(head.axis, 0, head.outputs)
            return torch.cat([original] * copies) if copies else output

        example = each(mode.from_tensor, inputs)
        args, kwargs = arguments(example)
        try:
            with SkipMode(), LayerOutputMode(values[head.weight], change) as layer:
                predictions = torch.func.functional_call(return_predictions(model_copy), values, args, kwargs)
        except Exception:
            return None
    return list(predictions.shape), layer.calls


def keeps_samples_independent(graph: ModelGraph, node: fx.Node) -> bool:
    """Return whether no operation after a node couples the samples of a batch (the first dim).

    Unknown operations are assumed to couple samples. The result is also false if a later operation uses a tensor that
    depends on the inputs through a path that bypasses the node, because that tensor has the original batch size.
    """
    later_nodes = {node}
    for step in graph.graph.nodes:
        tensors = [n for n in step.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
        if step.op != "call_function" or not any(n in later_nodes for n in tensors):
            continue
        other_tensors = [n for n in tensors if n not in later_nodes]
        are_stored = all(n.name in graph.parameters or n.name in graph.buffers for n in other_tensors)
        if not are_stored or not _keeps_samples_independent(step, other_tensors):
            return False
        later_nodes.add(step)
    return True


def _keeps_samples_independent(step: fx.Node, parameters: list[fx.Node]) -> bool:
    value, input_value = step.meta.get("val"), step.all_input_nodes[0].meta.get("val")
    if not isinstance(value, Tensor) or not isinstance(input_value, Tensor) or not hasattr(step.target, "_schema"):
        return False
    name, arguments = operation_name(step), named_arguments(step)
    if name in operations.ONLY_IN_EVAL:
        return not any(arguments.get(key) for key in ("train", "training", "use_input_stats"))
    if name in ELEMENTWISE:
        return all(t.dim() < value.dim() or t.shape[0] == 1 for t in (n.meta["val"] for n in parameters))
    dims = pytree.tree_leaves([arguments.get(key) for key in ("dim", "dims", "dim0", "dim1")])
    dims = [d % max(1, input_value.dim() + (name == "unsqueeze")) for d in dims if isinstance(d, int)]
    if name in operations.ALONG_DIMS:
        return bool(dims) and 0 not in dims
    if name == "permute":
        return bool(dims[0] == 0)
    if name in operations.RESHAPES:
        return value.dim() > 0 and value.shape[0] == input_value.shape[0]
    return name in operations.SAMPLE_BY_SAMPLE
