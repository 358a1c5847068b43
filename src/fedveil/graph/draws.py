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

HALF = ("rand", "rand_like", "uniform", "uniform_", "exponential", "exponential_", "randn", "randn_like", "normal_")
ONE = ("bernoulli", "bernoulli_")
LIBRARIES = {"torch", "numpy", "fedveil"} | sys.stdlib_module_names


class FixedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces random numbers with constants, and counts operations.

    Attributes:
        operations: the number of operations so far.
        random: the names of random operations that were left as they are.
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
            given = args[0]
            assert isinstance(given, Tensor)
            return given.clone(), torch.ones_like(given, dtype=torch.bool)
        found = func(*args, **kwargs)
        if name not in HALF + ONE:
            self.random.add(name)
            return found
        for leaf in pytree.tree_leaves(found):
            leaf.fill_(0.5 if name in HALF else 1)
        return found


def read_generators() -> tuple[object, ...]:
    """Return the states of NumPy's and Python's global generators, which can be compared."""
    found = np.random.get_state(legacy=False)
    state = [own.tobytes() if isinstance(own, np.ndarray) else own for own in found["state"].values()]
    return state, found["has_gauss"], found["gauss"], random.getstate()


@contextmanager
def restore_generators() -> Iterator[None]:
    """Restore the states of all global generators afterwards, so that several passes draw the same numbers."""
    numpy, python, state = np.random.get_state(legacy=False), random.getstate(), read_generators()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        if read_generators() != state:
            np.random.set_state(numpy)
            random.setstate(python)


@contextmanager
def find_draws() -> Iterator[dict[str, CodeType]]:
    """Collect the functions that draw from NumPy's or Python's global generator, by module and name; this is slow."""
    found, state, profiler = dict[str, CodeType](), read_generators(), sys.getprofile()

    def check(frame: FrameType | None, event: str, _: object) -> None:
        nonlocal state
        if event not in ("call", "return") or frame is None or _library(frame) or read_generators() == state:
            return
        state = read_generators()
        drawing = frame if event == "return" else frame.f_back
        while drawing and _library(drawing):
            drawing = drawing.f_back
        if drawing:
            found[f"{drawing.f_globals.get('__name__')}.{drawing.f_code.co_qualname}"] = drawing.f_code

    sys.setprofile(check)
    try:
        yield found
    finally:
        sys.setprofile(profiler)


def _library(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in LIBRARIES
