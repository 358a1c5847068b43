"""Replace the random numbers that a model draws with constants, and find those that PyTorch does not draw.

The constants do not depend on the order of a model's units.
"""

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

HALVES = ("rand", "rand_like", "uniform", "uniform_", "exponential", "exponential_", "randn", "randn_like", "normal_")
ONES = ("bernoulli", "bernoulli_")
LIBRARIES = {"torch", "numpy", "fedveil"} | sys.stdlib_module_names


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


def read_generators() -> tuple[object, ...]:
    """Return the states of NumPy's and Python's global generators, which can be compared."""
    numpy_state = np.random.get_state(legacy=False)
    parts = [part.tobytes() if isinstance(part, np.ndarray) else part for part in numpy_state["state"].values()]
    return parts, numpy_state["has_gauss"], numpy_state["gauss"], random.getstate()


@contextmanager
def restore_generators() -> Iterator[None]:
    """Restore the states of all global generators afterwards, so that several passes draw the same numbers."""
    numpy_state, python_state, initial = np.random.get_state(legacy=False), random.getstate(), read_generators()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        if read_generators() != initial:
            np.random.set_state(numpy_state)
            random.setstate(python_state)


@contextmanager
def find_draws() -> Iterator[dict[str, CodeType]]:
    """Collect the functions that draw from NumPy's or Python's global generator, by module and name; this is slow."""
    functions, state, profiler = dict[str, CodeType](), read_generators(), sys.getprofile()

    def check(frame: FrameType | None, event: str, _: object) -> None:
        nonlocal state
        if event not in ("call", "return") or frame is None or _is_library(frame) or read_generators() == state:
            return
        state = read_generators()
        caller = frame if event == "return" else frame.f_back
        while caller and _is_library(caller):
            caller = caller.f_back
        if caller:
            functions[f"{caller.f_globals.get('__name__')}.{caller.f_code.co_qualname}"] = caller.f_code

    sys.setprofile(check)
    try:
        yield functions
    finally:
        sys.setprofile(profiler)


def _is_library(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in LIBRARIES
