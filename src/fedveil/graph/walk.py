"""Walk an exported model's operations and apply the rule of each."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fedveil.graph import rules as rules
from fedveil.graph.calls import RULES, Activation, Call, NoRule, Outcome, StateTensor, Traced
from fedveil.graph.export import ModelGraph
from fedveil.graph.ledger import Ledger
from fedveil.graph.nodes import describe_location, innermost_module, is_in_place, named_arguments, operation_name
from fedveil.graph.rules.linear import convolution, linear
from fedveil.graph.units import Units, varying_dims


@dataclass
class Walk:
    """The values of a graph's nodes, as far as they were visited.

    Attributes:
        graph: of the model.
        head: the node that takes additive noise.
        ledger: holds the constraints that rules recorded.
        used: names of parameters that forward reads.
    """

    graph: ModelGraph
    head: fx.Node | None
    ledger: Ledger = field(default_factory=Ledger)
    used: set[str] = field(default_factory=set)
    values: dict[fx.Node, object] = field(default_factory=dict)
    storages: dict[int, StateTensor] = field(default_factory=dict)
    element_units: dict[str, Units] = field(default_factory=dict)

    def run(self) -> None:
        """Visit every operation in order."""
        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self._placeholder(node)
            elif node.op == "call_function":
                self.values[node] = self._call(node)
            elif node.op == "get_attr":
                self.values[node] = None
        for node in self.graph.outputs:
            value = self.values[node]
            if isinstance(value, Traced):
                self.ledger.pin(value.units, "output", "it is the model's output")

    def _placeholder(self, node: fx.Node) -> object:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return value
        name = self.graph.parameters.get(node.name) or self.graph.buffers.get(node.name)
        if name is None or not value.is_floating_point():
            return Activation(value)
        is_parameter = node.name in self.graph.parameters
        if is_parameter and node.users:
            self.used.add(name)
        found = StateTensor(value, name, is_parameter, self.ledger, self.element_units, value)
        self.storages[value.untyped_storage()._cdata] = found
        return found

    def _call(self, node: fx.Node) -> object:
        output = node.meta.get("val")
        if node.target is operator.getitem:
            items, index = self.values[node.all_input_nodes[0]], node.args[1]
            assert isinstance(items, Sequence)
            assert isinstance(index, int)
            return items[index]
        if not hasattr(node.target, "_schema"):
            where = f"{innermost_module(node)[0]} ({operation_name(node)})"
            operands = [self.values[n] for n in node.all_input_nodes if n.op != "get_attr"]
            self._pin(operands, where, "it is used in a separate context, such as no_grad")
            return pytree.tree_map_only(Tensor, Activation, output)
        if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(output)):
            return output
        arguments = fx.map_arg(named_arguments(node), self.values.__getitem__)  # type: ignore[arg-type]
        call = Call(operation_name(node), describe_location(node), arguments, output, node.target, self.ledger)  # type: ignore[arg-type]
        if not is_in_place(node):
            return self._find_views(call) or self._follow(node, call)
        result = self._follow(node, call)
        first = node.args[0] if node.args else None
        if isinstance(first, fx.Node) and isinstance(self.values.get(first), Activation):
            self.values[first] = result  # the argument that was written into
        return result

    def _find_views(self, call: Call) -> StateTensor | list[StateTensor] | None:
        """Return the output if it is one or several views of a parameter or buffer, else None."""
        if not call.operands or not isinstance(call.x, StateTensor):
            return None
        leaves = [leaf for leaf in pytree.tree_leaves(call.output) if isinstance(leaf, Tensor)]
        owners = [self.storages.get(leaf.untyped_storage()._cdata) for leaf in leaves]
        expanded = any(n > 1 and not step for leaf in leaves for n, step in zip(leaf.shape, leaf.stride(), strict=True))
        views = [replace(owner, value=leaf) for owner, leaf in zip(owners, leaves, strict=True) if owner]
        if expanded or len(views) < len(leaves):
            return None
        return views[0] if isinstance(call.output, Tensor) else views

    def _follow(self, node: fx.Node, call: Call) -> object:
        """Apply the operation's rule; without a rule, pin all operands."""
        if node is self.head:
            layer = linear if call.name == "linear" else convolution
            return _add_units(call.output, layer(call, head=True))
        try:
            if call.name not in RULES:
                raise NoRule("there is no rule for it")
            result = _add_units(call.output, RULES[call.name](call))
        except NoRule as reason:
            self._pin(call.operands, call.where, str(reason))
            return _add_units(call.output, [])
        for value in result if isinstance(result, list) else [result]:
            if isinstance(value, Activation):
                value.units = self._separate_orders(value.units)
        return result

    def _separate_orders(self, units: Units) -> Units:
        """Let only the first of the order factors that share a dim move, for example after a reshape."""
        scale, rest = units
        order: tuple[Tensor, ...] = ()
        while rest:
            order = (*order, rest[0])
            rest = self.ledger.fix_along(rest[1:], varying_dims(rest[0]))
        return Units(scale, order)

    def _pin(self, operands: Iterable[object], where: str, reason: str) -> None:
        for operand in operands:
            if isinstance(operand, StateTensor):
                operand.leave_bare(where, reason)
            elif isinstance(operand, Activation):
                self.ledger.pin(operand.units, where, reason)


def _add_units(output: Tensor | Sequence[Tensor], outcome: Outcome) -> object:
    """Return the output tensors with their units; tensors without units carry no noise."""
    if isinstance(outcome, Activation | StateTensor):
        return outcome
    units = [outcome] if isinstance(outcome, Units) else outcome
    outputs = [output] if isinstance(output, Tensor) else output
    pairs = zip(outputs, [*units, *[Units()] * (len(outputs) - len(units))], strict=True)
    found = [Activation(v, _drop_idle_factors(u)) if isinstance(v, Tensor) else v for v, u in pairs]
    return found[0] if isinstance(output, Tensor) else found


def _drop_idle_factors(units: Units) -> Units:
    """Remove factors that do nothing."""
    return Units(*(tuple(f for f in kind if bool(f.any())) for kind in units))
