"""Follow a forward method that skips layers at random, as layerdrop does: `if torch.rand([]) < 0.1`.

Which layers a client skips is drawn while its forward runs, so a plan must hold for every draw. The operations are
recorded once without skipping, once for each skipped layer and once with all of them skipped, and the plan obeys the
constraints of all these graphs; up to three decisions, of every combination. If layers follow one another and each is
skipped by a decision of its own, this covers every draw: whatever reads the output of a layer makes its noise equal to
that of the layer before, because it reads either.
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

COMPARISONS = {f"{dunder}{name}{dunder}" for name in ("lt", "le", "gt", "ge") for dunder in ("", "__")}
GROUPED = {"grouped_mm", "_grouped_mm"}
MAX_COMBINED = 3  # up to this number of decisions, every combination is followed


class SkipMode(TorchFunctionMode):
    """Decides every comparison of one random number with a constant, and replaces what fake tensors do not support.

    Attributes:
        asked: the number of decisions so far.
    """

    def __init__(self, chosen: Collection[int] = ()) -> None:
        super().__init__()
        self.asked = 0
        self._chosen = frozenset(chosen)  # the decisions for which the comparison is true
        self._drawn: dict[int, Tensor] = {}
        self._compared: dict[int, tuple[Tensor, list[bool]]] = {}

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run the function, or decide."""
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        if name == "__bool__" and id(first) in self._compared:
            known = self._compared[id(first)][1]
            if not known:
                known.append(self.asked in self._chosen)
                self.asked += 1
            return known[0]
        run: Callable[..., object] = multiply_groups if name in GROUPED else func
        found = run(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.dim() == 0:
            if name == "rand":
                self._drawn[id(found)] = found
            elif name in COMPARISONS and id(first) in self._drawn and isinstance(args[1], int | float):
                self._compared[id(found)] = found, []
        return found


def multiply_groups(rows: Tensor, weights: Tensor, *, offs: Tensor, **_: object) -> Tensor:
    """Compute torch.nn.functional.grouped_mm, which fake tensors do not support in float32, with other operations."""
    group = (torch.arange(len(rows), device=rows.device).unsqueeze(1) >= offs).sum(1).clamp(max=len(weights) - 1)
    return torch.bmm(rows.unsqueeze(1), weights[group]).squeeze(1)


def combinations(decisions: int) -> list[tuple[int, ...]]:
    """Return the sets of true decisions, except the empty one, that must be followed."""
    numbers = range(decisions)
    if decisions <= MAX_COMBINED:
        return [own for size in numbers for own in itertools.combinations(numbers, size + 1)]
    return [*((number,) for number in numbers), tuple(numbers)]
