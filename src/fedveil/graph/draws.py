"""Replace the random numbers that a model draws with constants that do not depend on the order of its units."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

HALVES = ("rand", "rand_like", "uniform", "uniform_", "exponential", "exponential_", "randn", "randn_like", "normal_")
ONES = ("bernoulli", "bernoulli_")


class FixedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that replaces random numbers with constants, and counts operations.

    Attributes:
        operations: the number of operations so far.
        random: the names of random operations whose results were not replaced.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0
        self.random: set[str] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run the operation, and replace the random numbers that it draws."""
        self.operations += 1
        kwargs = {} if kwargs is None else kwargs
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return func(*args, **kwargs)
        name = str(getattr(func, "overloadpacket", func)).rpartition(".")[2]
        if name == "native_dropout":
            inputs = args[0]
            assert isinstance(inputs, Tensor)
            return inputs.clone(), torch.ones_like(inputs, dtype=torch.bool)
        result = func(*args, **kwargs)
        if name not in HALVES + ONES:
            self.random.add(name)
            return result
        for leaf in pytree.tree_leaves(result):
            leaf.fill_(0.5 if name in HALVES else 1)
        return result
