"""One operation of a traced model, as a rule sees it, and the registry of rules."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fedveil.graph.ledger import Attachment, Ledger, Replay, Units, pinned
from fedveil.graph.symmetry import Symmetry


class NoRule(Exception):
    """An operation, or this use of it, has no rule; the text says why."""


@dataclass(eq=False)
class Activation:
    """A tensor of the traced model: its shape (a meta tensor) and its units."""

    value: Tensor
    units: Units


@dataclass(eq=False)
class Constant(Activation):
    """A tensor that neither inputs nor parameters reach."""


@dataclass(eq=False)
class RawParameter:
    """A parameter that forward reads by itself; used as an activation, each of its elements begins a unit."""

    value: Tensor
    name: str
    ledger: Ledger

    @cached_property
    def units(self) -> Units:
        """New units, one an element."""
        shape = self.value.shape
        units = self.ledger.fresh(self.value.numel(), self.name)
        index = torch.arange(self.value.numel()).reshape(shape)
        self.ledger.attach(self.name, Attachment(units, index, 1))
        return units.each(lambda t: t.reshape(shape))


Traced = Activation | RawParameter
Outcome = Units | Sequence[Units]


@dataclass(eq=False)
class Call:
    """An operation with its operands.

    Attributes:
        target: the module, function or method name that is called.
        path: of the module, or of the module in whose forward the function is called.
        args: positional arguments, with tensors as `Activation` or `RawParameter`.
        kwargs: the other arguments.
        output: what it returns, in meta tensors.
        names: full name of a tensor of the model -> the name under which it is known (tied tensors have several).
        ledger: where rules write.
    """

    target: nn.Module | Callable[..., Any] | str
    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    names: dict[str, str]
    ledger: Ledger
    operands: list[Traced] = field(init=False)

    def __post_init__(self) -> None:
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        self.operands = [leaf for leaf in leaves if isinstance(leaf, Activation | RawParameter)]

    @property
    def module(self) -> Any:
        """The module that is called."""
        return self.target

    @property
    def key(self) -> Any:
        """What its rule is registered under."""
        return type(self.target) if isinstance(self.target, nn.Module) else self.target

    @property
    def operation(self) -> str:
        """What the operation is called."""
        if isinstance(self.target, nn.Module):
            return type(self.target).__name__
        return self.target if isinstance(self.target, str) else self.target.__name__

    @property
    def where(self) -> str:
        """Where the operation stands in the model."""
        return f"{self.path} ({self.operation})" if self.path else self.operation

    @property
    def x(self) -> Traced:
        """The first tensor."""
        return self.operands[0]

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument of a function or method, given by position or by name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def tensor_name(self, attribute: str) -> str:
        """The known name of the module's tensor `attribute`."""
        full = f"{self.path}.{attribute}" if self.path else attribute
        return self.names[full]

    def limit(self, units: Units, symmetry: Symmetry, why: str | None = None) -> None:
        """Record that only factors of `symmetry` pass this operation."""
        words = {0: "no factor", 1: "signs only", 2: "positive factors only"}
        if symmetry != Symmetry.EVERYTHING:
            self.ledger.limit(units, symmetry, self.where, why or f"it lets {words[int(symmetry)]} through")

    def run(self, tensors: Sequence[Any]) -> Any:
        """Run the operation on other tensors in place of its operands."""
        given = dict(zip(map(id, self.operands), tensors, strict=True))
        args, kwargs = pytree.tree_map(lambda leaf: given.get(id(leaf), leaf), (self.args, self.kwargs))
        if isinstance(self.target, str):
            return getattr(args[0], self.target)(*args[1:], **kwargs)
        return self.target(*args, **kwargs)

    def replay(self, pick: int | None = None) -> Replay:
        """The operation as a function of integer tensors; float64 holds them exactly and every operation takes it."""

        def operation(tensors: Sequence[Tensor]) -> Tensor:
            out = self.run([t.contiguous().double() for t in tensors])
            result: Tensor = (out if pick is None else out[pick]).long()
            return result

        return operation

    def broadcast(self, operand: Traced) -> Units:
        """The operand's units, broadcast to the shape of the output."""
        shape = self.output.shape
        if operand.units.shape == shape:
            return operand.units
        return self.ledger.replay(lambda t: t[0].expand(shape), [operand.units], self.where)

    def pinned_output(self) -> Any:
        """Units of the output with nothing on it."""
        return pytree.tree_map_only(Tensor, lambda t: pinned(t.shape), self.output)


Rule = Callable[[Call], Outcome]
RULES: dict[Hashable, Rule] = {}


def rule(*targets: Hashable) -> Callable[[Rule], Rule]:
    """Register a rule for module types, functions and method names."""

    def register(function: Rule) -> Rule:
        for target in targets:
            assert target not in RULES, f"two rules for {target}"
            RULES[target] = function
        return function

    return register
