"""One operation of an exported model, as a rule sees it, and the registry of rules."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor
from torch.utils import _pytree as pytree

from fedveil.graph.ledger import Ledger, Region
from fedveil.graph.symmetry import Symmetry
from fedveil.graph.units import Dims, Units, aligned, varying

MOST_ELEMENTS = 2**20  # of a parameter that is used element by element


class NoRule(Exception):
    """An operation, or this use of it, has no rule; the text says why."""


def differing(value: Tensor) -> Dims:
    """The dims along which a tensor's elements may differ: not those along which it is broadcast."""
    return frozenset(d for d in range(value.dim()) if value.shape[d] > 1 and value.stride(d) != 0)


@dataclass(eq=False)
class Activation:
    """A tensor that forward computes: its shape (a fake tensor), its units, and whether it is all zeros."""

    value: Tensor
    units: Units = field(default_factory=Units)
    zero: bool = False


@dataclass(eq=False)
class Stored:
    """A parameter or buffer of the model, or a view of one; `whole` is the full tensor.

    Unless an operation handles it specially, it counts as an activation: every element of a parameter is a unit of its
    own, and a buffer has none.
    """

    value: Tensor
    name: str
    is_parameter: bool
    ledger: Ledger
    known: dict[str, Units]
    whole: Tensor

    zero = False

    @property
    def units(self) -> Units:
        """As an activation."""
        if not self.is_parameter:
            return Units()
        if self.name not in self.known:
            shape = self.whole.shape
            if shape.numel() > MOST_ELEMENTS:
                self.leave_bare(self.name, "its elements are used one by one, and it is too large for that")
                return Units()
            units = Units((self.ledger.fresh_scale(shape, self.name),), (self.ledger.fresh_order(shape),))
            self.known[self.name] = units
            self.ledger.attach(self.name, Region(0, tuple(shape), tuple(self.whole.stride()), units))
        whole = self.known[self.name]
        if self.value is self.whole:
            return whole
        form = tuple(self.value.shape), tuple(self.value.stride()), int(self.value.storage_offset())

        def view(given: Sequence[Tensor]) -> Tensor:
            return given[0].contiguous().as_strided(*form)

        order = tuple(self.ledger.moved(view, [factor]) for factor in whole.order)
        return Units(tuple(view([factor]) for factor in whole.scale), order)

    def attach(self, units: Units, shape: Sequence[int] | None = None, strides: Sequence[int] | None = None) -> None:
        """Record the noise on it, or on a reshaped view of it."""
        own = tuple(shape if shape is not None else self.value.shape)
        steps = tuple(strides if strides is not None else self.value.stride())
        self.ledger.attach(self.name, Region(int(self.value.storage_offset()), own, steps, units))

    def leave_bare(self, where: str, why: str) -> None:
        """Record that it gets no noise."""
        if self.is_parameter:
            self.attach(Units())
            self.ledger.note(where, why)


Traced = Activation | Stored
Outcome = Units | Activation | Stored | Sequence[Units | None]


@dataclass(eq=False)
class Call:
    """An operation with its operands.

    Attributes:
        name: of the ATen operation, without overload and in-place underscore.
        where: the operation's place in the model, for messages.
        arguments: by their names in the operation's schema; tensors as `Activation` or `Stored`.
        output: its result, as fake tensors.
        run: the operation itself, as a function of its arguments.
        ledger: where rules record their results.
    """

    name: str
    where: str
    arguments: Mapping[str, Any]
    output: Any
    run: Callable[..., Any]
    ledger: Ledger
    operands: list[Traced] = field(init=False)

    def __post_init__(self) -> None:
        leaves = pytree.tree_leaves(dict(self.arguments))
        self.operands = [leaf for leaf in leaves if isinstance(leaf, Activation | Stored)]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of these arguments that the operation has."""
        return next((self.arguments[name] for name in names if name in self.arguments), default)

    @property
    def x(self) -> Traced:
        """The first tensor."""
        return self.operands[0]

    @property
    def rank(self) -> int:
        """Dims of the output."""
        return len(self.output.shape)

    def on(self, factor: Tensor) -> Tensor:
        """The operation itself, on a factor in place of the first tensor."""
        rest = {name: value for name, value in self.arguments.items() if value is not self.x}
        found: Tensor = self.run(factor, **rest)
        return found

    def dim(self, name: str = "dim", of: Traced | None = None) -> int:
        """A dim given as an argument, counted from 0."""
        found = self.arguments[name] % max(1, (of or self.x).value.dim())
        assert isinstance(found, int)
        return found

    def broadcast(self, operand: Traced) -> Units:
        """The operand's units, with as many dims as the output."""
        return operand.units.each(lambda factor: aligned(factor, self.rank))

    def differs(self, operand: Traced) -> Dims:
        """The dims of the output along which the operand's elements may differ."""
        ahead = self.rank - operand.value.dim()
        return frozenset(d + ahead for d in differing(operand.value))

    def limit(self, factors: Sequence[Tensor], symmetry: Symmetry, why: str | None = None) -> None:
        """Record that only numbers of `symmetry` pass this operation."""
        self.ledger.limit(factors, symmetry, self.where, why)

    def unscaled(self, units: Units, why: str | None = None) -> Units:
        """The units without their factors, because this operation lets none through."""
        self.limit(units.scale, Symmetry.NOTHING, why)
        return units.unscaled()

    def merged(self, factors: Sequence[Tensor], dims: Dims) -> tuple[Tensor, ...]:
        """Scale factors made equal along `dims`, because this operation sums over them."""
        return tuple(self.ledger.merge_scale(factor, dims, self.where) for factor in factors)

    def channels(self, units: Units, dim: int, rank: int) -> Units:
        """Units along `dim` of a tensor with `rank` dims, as 1-d factors; made equal along all other dims."""
        others = frozenset(range(rank)) - {dim}
        order = []
        for factor in units.order:
            if dim in varying(factor):
                order.append(self.ledger.merge_order(factor, others))
                self.ledger.count(order[-1])
            elif varying(factor):
                self.ledger.fix(factor)
        return Units(self.merged(units.scale, others), tuple(order)).each(Tensor.flatten)

    def packed(self, units: Units) -> Outcome:
        """For the first of one or several outputs; the others carry no noise."""
        return [units] if isinstance(self.output, tuple | list) else units


Rule = Callable[[Call], Outcome]
Kept = TypeVar("Kept", bound=Callable[..., Outcome])
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Kept], Kept]:
    """Register a rule for ATen operations."""

    def register(function: Kept) -> Kept:
        for name in names:
            assert name not in RULES, f"two rules for {name}"
            RULES[name] = function
        return function

    return register


def tensor(argument: Any) -> Traced:
    """An argument that must be a tensor."""
    if not isinstance(argument, Activation | Stored):
        raise NoRule(f"it has an operand of type {type(argument).__name__}")
    return argument


def stored(argument: Any) -> Stored:
    """An argument that must be a parameter or buffer of the model itself."""
    if isinstance(argument, Stored):
        return argument
    raise NoRule("its weight is computed, not a parameter itself")
