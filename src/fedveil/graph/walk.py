"""Visit the operations of an exported model in order, and apply the rule for each."""

import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import SymInt, Tensor, fx
from torch.utils import _pytree as pytree

from fedveil.graph import rules as rules
from fedveil.graph.calls import RULES, Activation, Call, NoRule, Outcome, StateTensor
from fedveil.graph.export import ModelGraph
from fedveil.graph.ledger import Ledger
from fedveil.graph.operations import describe_location, innermost_module, is_in_place, named_arguments, operation_name
from fedveil.graph.units import Units, varying_dims

DATA_SIZE = 101  # stands for a size that depends on the data


@dataclass
class Walk:
    """A traversal of a model's graph that records constraints.

    Attributes:
        graph: the model's graph.
        head: the node that receives additive noise, if any.
        ledger: the constraints recorded by rules.
        used_names: the names of parameters that forward reads.
        values: the value of each node visited so far.
        storages: the parameter or buffer that owns each storage.
    """

    graph: ModelGraph
    head: fx.Node | None
    ledger: Ledger = field(default_factory=Ledger)
    used_names: set[str] = field(default_factory=set)
    values: dict[fx.Node, object] = field(default_factory=dict)
    storages: dict[int, StateTensor] = field(default_factory=dict)

    def run(self) -> None:
        """Visit all operations in order."""
        visit = {"placeholder": self._read, "call_function": self._call}
        for node in self.graph.graph.nodes:
            self.values[node] = visit[node.op](node) if node.op in visit else None
        self._pin([self.values[node] for node in self.graph.outputs], "output", "it is the model's output")

    def _read(self, node: fx.Node) -> object:
        """Return the input, parameter or buffer that a placeholder represents."""
        value, graph = node.meta.get("val"), self.graph
        if not isinstance(value, Tensor):
            return value
        name = graph.parameters.get(node.name) or graph.buffers.get(node.name)
        if name is None or not value.is_floating_point():
            return Activation(value)
        is_parameter = node.name in graph.parameters
        if is_parameter and node.users:
            self.used_names.add(name)
        state_tensor = StateTensor(value, name, is_parameter, self.ledger, value)
        self.storages[value.untyped_storage()._cdata] = state_tensor
        return state_tensor

    def _call(self, node: fx.Node) -> object:
        output = pytree.tree_map_only((Tensor, SymInt), choose_sizes, node.meta.get("val"))
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
        fields = operation_name(node), describe_location(node), arguments, output, node.target, self.ledger
        call = Call(*fields, is_head=node is self.head)  # type: ignore[arg-type]
        if not is_in_place(node):
            return self._find_views(call) or self._apply_rule(call)
        result = self._apply_rule(call)
        argument = node.args[0] if node.args else None
        if isinstance(argument, fx.Node) and isinstance(self.values.get(argument), Activation):
            self.values[argument] = result  # the argument that was modified in place
        return result

    def _find_views(self, call: Call) -> StateTensor | list[StateTensor] | None:
        """Return the output if it consists of views of parameters or buffers, otherwise None."""
        if not call.operands or not isinstance(call.x, StateTensor):
            return None
        leaves = [leaf for leaf in pytree.tree_leaves(call.output) if isinstance(leaf, Tensor)]
        owners = [self.storages.get(leaf.untyped_storage()._cdata) for leaf in leaves]
        expanded = any(n > 1 and not step for leaf in leaves for n, step in zip(leaf.shape, leaf.stride(), strict=True))
        views = [replace(owner, value=leaf) for owner, leaf in zip(owners, leaves, strict=True) if owner]
        if expanded or len(views) < len(leaves):
            return None
        return views[0] if isinstance(call.output, Tensor) else views

    def _apply_rule(self, call: Call) -> object:
        """Apply the operation's rule; if there is none, pin all operands."""
        outcome: Outcome = []
        try:
            if call.name not in RULES:
                raise NoRule("there is no rule for it")
            outcome = RULES[call.name](call)
        except NoRule as reason:
            self._pin(call.operands, call.where, str(reason))
        except Exception as error:  # an unforeseen form of the operation
            self._pin(call.operands, call.where, f"its rule does not cover this form ({type(error).__name__})")
        if isinstance(outcome, StateTensor):
            return outcome
        units = [outcome] if isinstance(outcome, Units) else outcome
        outputs = [call.output] if isinstance(call.output, Tensor) else call.output
        pairs = itertools.zip_longest(outputs, units, fillvalue=Units())
        results = [
            Activation(value, self._simplify(output_units)) if isinstance(value, Tensor) else value
            for value, output_units in pairs
        ]
        return results[0] if isinstance(call.output, Tensor) else results

    def _simplify(self, units: Units) -> Units:
        """Drop factors that do nothing. If order factors share a dim, as after a reshape, fix all but the first."""
        scale, remaining = (tuple(factor for factor in kind if bool(factor.any())) for kind in units[:2])
        order: tuple[Tensor, ...] = ()
        while remaining:
            order = (*order, remaining[0])
            remaining = self.ledger.fix_along(remaining[1:], varying_dims(remaining[0]))
        return Units(scale, order, units.zero)

    def _pin(self, operands: Iterable[object], where: str, reason: str) -> None:
        for operand in operands:
            if isinstance(operand, StateTensor):
                operand.leave_bare(where, reason)
            elif isinstance(operand, Activation):
                self.ledger.pin(operand.units, where, reason)


def choose_sizes(value: Tensor | SymInt) -> Tensor | int:
    """Replace sizes that depend on the data, such as the number of true elements of a mask, by different numbers.

    Rules only need to know which sizes are equal, and that these are not 1.
    """
    if isinstance(value, SymInt):
        return _choose_size(value)
    if all(isinstance(size, int) for size in (*value.shape, *value.stride())):
        return value
    shape, strides = ([_choose_size(size) for size in own] for own in (value.shape, value.stride()))
    return torch.empty_strided(shape, strides, dtype=value.dtype, device="meta")


def _choose_size(size: int | SymInt) -> int:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression.subs({own: DATA_SIZE + 2 * int(own.name[1:]) for own in expression.free_symbols}))
