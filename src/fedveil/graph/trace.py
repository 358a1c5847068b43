"""Walks a model's operations and lets each one's rule write in the ledger."""

import copy
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fedveil.errors import BadArgument, HeadNotLinear, NotTraceable
from fedveil.graph import rules as rules
from fedveil.graph.calls import RULES, Activation, Call, Constant, NoRule, RawParameter
from fedveil.graph.ledger import Ledger, pinned

SAMPLES = 2  # of the example that is traced; one would not do for BatchNorm

RESHAPES = {
    nn.Flatten, nn.Unflatten, nn.Identity, torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze,
    "flatten", "unflatten", "reshape", "view", "squeeze", "unsqueeze", "contiguous",
}  # fmt: skip


@dataclass(frozen=True)
class Head:
    """The Linear whose output is the model's; `last` if nothing, not even a reshape, follows it."""

    path: str
    weight: str
    bias: str | None
    outputs: int
    last: bool


@dataclass(frozen=True)
class Trace:
    """What a walk over the model found."""

    ledger: Ledger
    head: Head | None
    used: frozenset[str]


def meta_copy(model: nn.Module) -> nn.Module:
    """The model without its numbers: all that an analysis may look at."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        if getattr(module, "momentum", 0) is None:  # a running mean that counts batches would read their number
            module.momentum = 0.1  # type: ignore[assignment]
    return copied


def known_names(model: nn.Module) -> dict[str, str]:
    """Every name of every parameter and buffer -> its first name (tied tensors have several)."""
    first: dict[int, str] = {}
    names = {}
    for kind in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in kind:
            names[name] = first.setdefault(id(tensor), name)
    return names


def symbolic(model: nn.Module) -> fx.Graph:
    """The model's operations."""
    title = type(model).__name__
    if model._forward_hooks or model._forward_pre_hooks:
        raise NotTraceable(title, "it has forward hooks, which torch.fx does not see", "remove the hooks")
    tracer = fx.Tracer()
    try:
        return tracer.trace(model)
    except Exception as error:
        path = _last_module(tracer) or title
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise NotTraceable(
            path,
            f"torch.fx cannot trace its forward: {why}",
            "let no `if`, loop or Python number depend on the values of tensors, or move that part into a module "
            "of its own that torch.fx.wrap keeps whole (its axes are then pinned)",
        ) from error


def _last_module(tracer: fx.Tracer) -> str | None:
    stack = getattr(tracer, "module_stack", None)
    return next(reversed(stack)) if stack else None


def example(model: nn.Module, inputs: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Meta tensors of the example's shapes, with `SAMPLES` samples; floating ones in the model's dtype."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    tensors = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    for number, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor) or tensor.dim() == 0:
            what = f"example input {number} is {type(tensor).__name__}, not a tensor with a batch dimension"
            raise BadArgument("analyse", what, "analyse(model, inputs[:2]) with inputs as the model takes them")
    dtypes = [dtype if t.is_floating_point() else t.dtype for t in tensors]
    return [
        torch.empty((SAMPLES, *t.shape[1:]), dtype=own, device="meta") for t, own in zip(tensors, dtypes, strict=True)
    ]


def _path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack")
    return next(reversed(stack.values()))[0] if stack else ""


class Walker:
    """Runs the graph on meta tensors and units at once."""

    def __init__(self, model: nn.Module, head: str | None) -> None:
        self.model = meta_copy(model)
        self.names = known_names(self.model)
        self.head = head
        self.ledger = Ledger()
        self.used: set[str] = set()
        self._parameters: dict[str, RawParameter] = {}

    def walk(self, graph: fx.Graph, inputs: Sequence[Tensor]) -> None:
        """Visit every operation in order."""
        values: dict[fx.Node, Any] = {}
        given = iter(inputs)
        with torch.no_grad():
            for node in graph.nodes:
                if node.op == "placeholder":
                    values[node] = self._input(node, next(given, None))
                elif node.op == "get_attr":
                    values[node] = self._attribute(str(node.target))
                else:
                    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
                    if node.op == "output":
                        self._output(args)
                    else:
                        values[node] = self._call(node, args, kwargs)

    def _input(self, node: fx.Node, tensor: Tensor | None) -> Any:
        if tensor is not None:
            return Activation(tensor, pinned(tensor.shape))
        if node.args:
            return node.args[0]
        fix = "give analyse one tensor for each argument of forward, as a tuple"
        raise BadArgument("analyse", f"forward wants an argument {node.target!r} that example_inputs lacks", fix)

    def _attribute(self, name: str) -> Any:
        value = operator.attrgetter(name)(self.model)
        if isinstance(value, nn.Parameter):
            known = self.names[name]
            self.used.add(known)
            return self._parameters.setdefault(known, RawParameter(value, known, self.ledger))
        if isinstance(value, Tensor):
            return Constant(value.to("meta"), pinned(value.shape))
        return value

    def _output(self, args: Any) -> None:
        for leaf in pytree.tree_leaves(args):
            if isinstance(leaf, Activation | RawParameter):
                self.ledger.pin(leaf.units, "output", "it is the model's output")

    def _call(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target: Any = node.target
        path = _path(node)
        if node.op == "call_module":
            path = str(node.target)
            target = self.model.get_submodule(path)
            self.used.update(self.names[f"{path}.{name}"] for name, _ in target.named_parameters())
        call = Call(target, path, args, kwargs, None, self.names, self.ledger)
        try:
            with torch.device("meta"):
                call.output = call.run([operand.value for operand in call.operands])
        except Exception as error:
            fix = "check that example_inputs have the shapes and dtypes that the model takes"
            raise NotTraceable(call.where, f"it fails on the example: {error}", fix) from error
        if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(call.output)):
            return call.output
        if node.op == "call_function" and target is operator.getitem and isinstance(args[0], tuple | list):
            return args[0][args[1]]
        return self._follow(call, node)

    def _follow(self, call: Call, node: fx.Node) -> Any:
        """The output with its units, by the operation's rule; without one everything it touches is pinned."""
        if node.op == "call_module" and node.target == self.head:
            return self._head(call)
        target = call.target
        hooked = isinstance(target, nn.Module) and (target._forward_hooks or target._forward_pre_hooks)
        found = None if hooked else RULES.get(call.key)
        if not call.operands and found is None:
            return pytree.tree_map_only(Tensor, lambda t: Constant(t, pinned(t.shape)), call.output)
        try:
            if found is None:
                raise NoRule("it has forward hooks" if hooked else "there is no rule for it")
            units = found(call)
        except NoRule as reason:
            for operand in call.operands:
                self.ledger.pin(operand.units, call.where, str(reason))
            units = call.pinned_output()
        return _join(call.output, units)

    def _head(self, call: Call) -> Activation:
        """The head divides its input's axis out and begins none: its own noise is the additive term."""
        weight = call.module.weight
        inputs = self.ledger.vector(call.x.units, -1)
        self.ledger.attach(call.tensor_name("weight"), rules.linear.along(1, weight.shape, inputs, power=-1))
        return Activation(call.output, pinned(call.output.shape))


def _join(values: Any, units: Any) -> Any:
    if isinstance(values, Tensor):
        return Activation(values, units)
    return type(values)([_join(v, u) for v, u in zip(values, units, strict=True)])


def find_head(model: nn.Module, graph: fx.Graph) -> Head:
    """The Linear at the end of the graph, behind nothing but reshapes."""
    output = next(node for node in graph.nodes if node.op == "output")
    node = output.args[0]
    if not isinstance(node, fx.Node):
        raise _not_linear(type(model).__name__, f"the model returns {type(node).__name__}, not one tensor")
    while (_module_type(model, node) or node.target) in RESHAPES:
        node = node.all_input_nodes[0]
    where = (str(node.target) if node.op == "call_module" else _path(node)) or type(model).__name__
    if _module_type(model, node) is not nn.Linear:
        kind = _module_type(model, node)
        name = kind.__name__ if kind else getattr(node.target, "__name__", str(node.target))
        raise _not_linear(where, f"the model ends in {name}, not in a Linear")
    module = model.get_submodule(where)
    names = known_names(model)
    uses = sum(n.op == "call_module" and n.target == where for n in graph.nodes)
    ties = sum(known == names[f"{where}.weight"] for known in names.values())
    if uses > 1 or ties > 1 or len(node.users) > 1:
        raise _not_linear(where, "the last Linear, or its weight, is used in more than one place")
    if module._forward_hooks or module._forward_pre_hooks:
        raise _not_linear(where, "the last Linear has forward hooks")
    assert isinstance(module, nn.Linear)
    bias = f"{where}.bias" if module.bias is not None else None
    return Head(where, f"{where}.weight", bias, module.out_features, node is output.args[0])


def _module_type(model: nn.Module, node: fx.Node) -> type[nn.Module] | None:
    return type(model.get_submodule(str(node.target))) if node.op == "call_module" else None


def _not_linear(where: str, what: str) -> HeadNotLinear:
    return HeadNotLinear(
        where,
        f"{what}, so additive noise on its outputs could not be lifted again",
        "end the model in nn.Linear and put what follows it into the loss; or, for multiplicative noise only, "
        'analyse(model, inputs, head="exposed"): then clients read the true predictions',
    )


def trace(model: nn.Module, inputs: Tensor | Sequence[Tensor], exposed: bool) -> Trace:
    """Walk the model once on an example's shapes."""
    graph = symbolic(model)
    head = None if exposed else find_head(model, graph)
    walker = Walker(model, head.path if head else None)
    walker.walk(graph, example(model, inputs))
    return Trace(walker.ledger, head, frozenset(walker.used))
