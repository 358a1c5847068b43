"""Walk an exported model's operations and apply the rule of each."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fedveil.graph import rules as rules
from fedveil.graph.calls import RULES, Activation, Call, NoRule, Outcome, Stored
from fedveil.graph.export import Exported, short_name
from fedveil.graph.ledger import Ledger
from fedveil.graph.rules import linear
from fedveil.graph.units import Units, varying

HEADS: dict[str, Callable[[Call, bool], Outcome]] = {
    "linear": linear.linear,
    **dict.fromkeys(linear.CONVOLUTIONS, linear.convolution),
}


def module_of(node: fx.Node) -> tuple[str, str]:
    """Path and class name of the innermost module whose forward contains a node."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return "", ""
    path, kind = list(stack.values())[-1]
    return path, kind if isinstance(kind, str) else kind.__qualname__


def place_of(node: fx.Node) -> str:
    """Where an operation is, for messages: the module's path and, if it is one of PyTorch's, its class."""
    path, kind = module_of(node)
    operation = short_name(node.target) if callable(node.target) else str(node.target)
    what = kind.rpartition(".")[2] if kind.startswith("torch.nn.modules") else operation.rstrip("_")
    return f"{path} ({what})" if path else what


@dataclass
class Walk:
    """The values of a graph's nodes, as far as they were visited.

    Attributes:
        exported: the model.
        head: the node that is masked additively.
        ledger: what rules recorded.
        used: names of parameters that forward reads.
    """

    exported: Exported
    head: fx.Node | None
    ledger: Ledger = field(default_factory=Ledger)
    used: set[str] = field(default_factory=set)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    storages: dict[int, Stored] = field(default_factory=dict)
    raw: dict[str, Units] = field(default_factory=dict)

    def run(self) -> None:
        """Visit every operation in order."""
        for node in self.exported.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self._placeholder(node)
            elif node.op == "call_function":
                self.values[node] = self._call(node)
            elif node.op == "get_attr":
                self.values[node] = None
        for node in self.exported.outputs:
            value = self.values[node]
            if isinstance(value, Activation | Stored):
                self.ledger.pin(value.units, "output", "it is the model's output")

    def _placeholder(self, node: fx.Node) -> Any:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return value
        name = self.exported.parameters.get(node.name) or self.exported.buffers.get(node.name)
        if name is None or not value.is_floating_point():
            return Activation(value)
        is_parameter = node.name in self.exported.parameters
        if is_parameter and node.users:
            self.used.add(name)
        found = Stored(value, name, is_parameter, self.ledger, self.raw, value)
        self.storages[value.untyped_storage()._cdata] = found
        return found

    def _call(self, node: fx.Node) -> Any:
        if node.target is operator.getitem:
            return self.values[node.all_input_nodes[0]][node.args[1]]
        if not hasattr(node.target, "_schema"):
            return self._higher_order(node)
        call = self._described(node)
        if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(call.output)):
            return call.output
        views = self._views(node, call)
        if views is not None:
            return views
        result = self._follow(node, call)
        if call.arguments and node.target._schema.is_mutable:
            self._written(node, result)
        return result

    def _described(self, node: fx.Node) -> Call:
        """The operation with its arguments by name."""
        target: Any = node.target
        given = fx.map_arg((node.args, node.kwargs), lambda n: self.values[n])
        names = target._schema.arguments
        passed = {a.name: value for a, value in zip(names, given[0], strict=False)} | dict(given[1])
        arguments = {a.name: passed.get(a.name, a.default_value) for a in names}
        name = short_name(target)
        name = name.rstrip("_") if target._schema.is_mutable else name
        return Call(name, place_of(node), arguments, node.meta.get("val"), target, self.ledger)

    def _views(self, node: fx.Node, call: Call) -> Any:
        """A view of a parameter or buffer stays one; None if the output is anything else."""
        if node.target._schema.is_mutable or not call.operands or not isinstance(call.operands[0], Stored):  # type: ignore[union-attr]
            return None
        leaves = [leaf for leaf in pytree.tree_leaves(call.output) if isinstance(leaf, Tensor)]
        found = [self.storages.get(leaf.untyped_storage()._cdata) for leaf in leaves]
        whole = all(n == 1 or step > 0 for leaf in leaves for n, step in zip(leaf.shape, leaf.stride(), strict=True))
        if not whole or any(owner is None for owner in found):
            return None

        def view(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            owner = self.storages[value.untyped_storage()._cdata]
            return Stored(value, owner.name, owner.is_parameter, self.ledger, self.raw, owner.whole)

        return [view(v) for v in call.output] if isinstance(call.output, tuple | list) else view(call.output)

    def _follow(self, node: fx.Node, call: Call) -> Any:
        """The output with its units, by the operation's rule; without a rule, all operands are pinned."""
        if node is self.head:
            return _joined(call.output, HEADS[call.name](call, True))
        found = RULES.get(call.name)
        try:
            if found is None:
                raise NoRule("there is no rule for it")
            return self._apart(_joined(call.output, found(call)))
        except NoRule as reason:
            self._pin(call, str(reason))
            return _joined(call.output, Units() if isinstance(call.output, Tensor) else [])

    def _apart(self, result: Any) -> Any:
        """Of order factors that share a dim, for example after a reshape, only the first may move; fix the others."""
        for value in result if isinstance(result, list) else [result]:
            if isinstance(value, Activation):
                scale, rest = value.units
                kept: tuple[Tensor, ...] = ()
                while rest:
                    kept = (*kept, rest[0])
                    rest = self.ledger.fix_along(rest[1:], varying(rest[0]))
                value.units = Units(scale, kept)
        return result

    def _pin(self, call: Call, reason: str) -> None:
        for operand in call.operands:
            if isinstance(operand, Stored):
                operand.leave_bare(call.where, reason)
            else:
                self.ledger.pin(operand.units, call.where, reason)

    def _written(self, node: fx.Node, result: Any) -> None:
        """After an in-place operation, the first argument has the result's noise."""
        first = node.args[0] if node.args else None
        if isinstance(first, fx.Node) and isinstance(self.values.get(first), Activation):
            self.values[first] = result

    def _higher_order(self, node: fx.Node) -> Any:
        """A part of forward in its own context, such as no_grad; its inputs and outputs are pinned."""
        where = f"{module_of(node)[0]} ({node.target.__name__})" if callable(node.target) else str(node.target)
        for operand in [self.values[n] for n in node.all_input_nodes if n.op != "get_attr"]:
            if isinstance(operand, Stored):
                operand.leave_bare(where, "it is read in a separate context")
            elif isinstance(operand, Activation):
                self.ledger.pin(operand.units, where, "it is computed in a separate context")
        return pytree.tree_map_only(Tensor, Activation, node.meta.get("val"))


def _joined(values: Any, found: Any) -> Any:
    """Output tensors with their units; tensors without units carry no noise."""
    if isinstance(found, Activation | Stored):
        return found
    if isinstance(values, Tensor):
        return Activation(values, _tidy(found if isinstance(found, Units) else Units()))
    rest: Sequence[Any] = [*found, *[None] * (len(values) - len(found))]
    return [_joined(v, u) if isinstance(v, Tensor) else v for v, u in zip(values, rest, strict=True)]


def _tidy(units: Units) -> Units:
    """Without factors that do nothing."""
    return Units(*(tuple(f for f in kind if bool(f.any())) for kind in units))
