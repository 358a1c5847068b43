"""The operations of an exported model, in the form that rules receive, and the registry of rules."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedveil.graph.ledger import Ledger
from fedveil.graph.units import Dims, Symmetry, Units, align, distinct_dims, varying_dims

MAX_ELEMENTS = 2**20  # maximum size of a parameter that is used element by element


class NoRule(Exception):
    """There is no rule for an operation, or for this use of it; the message states the reason."""


@dataclass(eq=False)
class Activation:
    """A tensor computed by forward: a fake tensor of its shape, and its units."""

    value: Tensor
    units: Units = field(default_factory=Units)

    @property
    def zero(self) -> bool:
        """Whether all its elements are 0."""
        return self.units.zero


@dataclass(eq=False)
class StateTensor:
    """A parameter or buffer of the model, or a view of one; `full` is the entire tensor.

    Operations without special treatment for parameters treat it as an activation: a parameter has one unit per element,
    and a buffer has none.
    """

    value: Tensor
    name: str
    is_parameter: bool
    ledger: Ledger
    full: Tensor

    zero = False

    @property
    def units(self) -> Units:
        """The noise on this tensor if it is treated as an activation."""
        if not self.is_parameter:
            return Units()
        element_units, shape = self.ledger.element_units, self.full.shape
        if self.name not in element_units:
            if shape.numel() > MAX_ELEMENTS:
                self.leave_bare(self.name, "it is too large for an operation that uses its elements individually")
                return Units()
            element_units[self.name] = Units(
                (self.ledger.create_scale(shape, self.name),), (self.ledger.create_order(shape),)
            )
            replace(self, value=self.full).attach(element_units[self.name])
        if self.value is self.full:
            return element_units[self.name]
        form = tuple(self.value.shape), tuple(self.value.stride()), int(self.value.storage_offset())
        return self.ledger.move(element_units[self.name], lambda factor: factor.contiguous().as_strided(*form))

    def attach(self, units: Units, view: Tensor | None = None) -> None:
        """Record the noise on this tensor; `units` may have the dims of `view`, a view of all its elements."""
        form = self.value if view is None else view
        self.ledger.attach(self.name, form, int(self.value.storage_offset()), units)

    def leave_bare(self, where: str, reason: str) -> None:
        """Record that this tensor gets no noise."""
        if self.is_parameter:
            self.attach(Units())
            self.ledger.limit([torch.zeros(1, dtype=torch.int64)], Symmetry.NOTHING, where, reason)


Operand = Activation | StateTensor
Outcome = Units | list[Units] | StateTensor


def as_tensor(argument: object) -> Operand:
    """Return the argument if it is a tensor; otherwise raise NoRule."""
    if not isinstance(argument, Operand):
        raise NoRule(f"it has an operand of type {type(argument).__name__}")
    return argument


def as_state(argument: object) -> StateTensor:
    """Return the argument if it is a parameter or buffer of the model; otherwise raise NoRule."""
    if not isinstance(argument, StateTensor):
        raise NoRule("its weight is computed, not a parameter")
    return argument


@dataclass(eq=False)
class Call:
    """An operation with its operands.

    Attributes:
        name: the name of the ATen operation, without overload or in-place underscore.
        where: the operation's location in the model, for messages.
        arguments: the arguments by name; tensors are `Activation` or `StateTensor` objects.
        output: the results, as fake tensors.
        run: the function that performs the operation.
        ledger: the ledger in which rules record constraints.
        is_head: whether the operation receives additive noise, so that no new units begin at its output.
        operands: the arguments that are tensors.
    """

    name: str
    where: str
    arguments: Mapping[str, object]
    output: Tensor | Sequence[Tensor]
    run: Callable[..., Tensor]
    ledger: Ledger
    is_head: bool = False
    operands: list[Operand] = field(init=False)

    def __post_init__(self) -> None:
        self.operands = [leaf for leaf in pytree.tree_leaves(dict(self.arguments)) if isinstance(leaf, Operand)]

    def __getitem__(self, name: str) -> object:
        return self.arguments[name]

    def get(self, *names: str) -> object:
        """Return the first of these arguments that the operation has, or None."""
        return next((self.arguments[name] for name in names if name in self.arguments), None)

    def tensor(self, *names: str) -> Operand:
        """Return the first of these arguments that the operation has, which must be a tensor."""
        return as_tensor(self.get(*names))

    def state(self, name: str) -> StateTensor | None:
        """Return an argument, which must be a parameter, a buffer or None."""
        return None if self.get(name) is None else as_state(self[name])

    def sequence(self, *names: str) -> list[object]:
        """Return an argument as a list; a single value becomes a one-element list."""
        result = self.get(*names)
        return list(result) if isinstance(result, list | tuple) else [result]

    def integers(self, *names: str) -> list[int]:
        """Return an argument as a list of integers, which is empty if the argument is None."""
        return [n for n in self.sequence(*names) if isinstance(n, int)]

    @property
    def x(self) -> Operand:
        """The first operand."""
        return self.operands[0]

    @property
    def value(self) -> Tensor:
        """The output of an operation with a single output."""
        assert isinstance(self.output, Tensor)
        return self.output

    @property
    def rank(self) -> int:
        """The number of dims of the output."""
        return self.value.dim()

    def replay(self, factor: Tensor) -> Tensor:
        """Run the operation on a factor instead of the first operand."""
        return self.run(factor, **{name: value for name, value in self.arguments.items() if value is not self.x})

    def dim(self, rank: int | None = None) -> int:
        """Return the argument `dim` as a nonnegative index into `rank` dims, by default those of the first operand."""
        (result,) = self.integers("dim")
        return result % max(1, self.x.value.dim() if rank is None else rank)

    def pack(self, units: Units) -> Outcome:
        """Assign units to the first output; the other outputs carry no noise."""
        return units if isinstance(self.output, Tensor) else [units]

    def broadcast(self, operand: Operand) -> Units:
        """Return the operand's units with as many dims as the output."""
        return operand.units.map(lambda factor: align(factor, self.rank))

    def distinct_dims(self, operand: Operand) -> Dims:
        """Return the dims of the output along which the operand's elements may differ."""
        num_leading = self.rank - operand.value.dim()
        return frozenset(d + num_leading for d in distinct_dims(operand.value))

    def limit(self, factors: Sequence[Tensor], symmetry: Symmetry, reason: str | None = None) -> None:
        """Record that this operation commutes only with the factors that `symmetry` allows."""
        self.ledger.limit(factors, symmetry, self.where, reason)

    def drop_scale(self, units: Units, reason: str | None = None) -> Units:
        """Return the units without their scale, because this operation does not commute with any factor."""
        self.limit(units.scale, Symmetry.NOTHING, reason)
        return Units((), units.order)

    def merge_scale(self, factors: Sequence[Tensor], dims: Dims) -> tuple[Tensor, ...]:
        """Make scale factors equal along `dims`, because this operation sums over them."""
        return tuple(self.ledger.merge_scale(factor, dims, self.where) for factor in factors)

    def merge_order(self, factors: Sequence[Tensor], dims: Dims) -> tuple[Tensor, ...]:
        """Make order factors equal along `dims`, because one weight is applied to all elements along them."""
        merged = tuple(self.ledger.merge_order(factor, dims) for factor in factors)
        for factor in merged:
            self.ledger.require_equal_counts(factor)
        return merged

    def merge_to_channels(self, units: Units, dim: int, rank: int) -> Units:
        """Make units equal along all of the `rank` dims except `dim`, and return them as 1-D factors."""
        other_dims = frozenset(range(rank)) - {dim}
        order = self.merge_order([factor for factor in units.order if factor.shape[dim] > 1], other_dims)
        self.ledger.fix(*[factor for factor in units.order if varying_dims(factor) and factor.shape[dim] == 1])
        return Units(self.merge_scale(units.scale, other_dims), order).map(Tensor.flatten)


Rule = Callable[[Call], Outcome]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a function as the rule for these ATen operations."""

    def register(function: Rule) -> Rule:
        assert not RULES.keys() & names, f"two rules for {RULES.keys() & names}"
        RULES.update(dict.fromkeys(names, function))
        return function

    return register
