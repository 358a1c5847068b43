"""The state of a defence between rounds, as stored in a checkpoint."""

from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor

from fedveil.errors import BadArgument

StateValue = int | float | str | Tensor | list[float] | dict[int | str, int] | dict[str, "StateValue"]
State = dict[str, StateValue]
V = TypeVar("V")


def read_state(where: str, state: Mapping[str, StateValue], name: str, kind: type[V]) -> V:
    """Return a value from a state; refuse a state without it, which must come from another defence."""
    value = state.get(name)
    if not isinstance(value, kind):
        raise BadArgument(where, "the state belongs to another defence", "resume with the defence that wrote it")
    return value
