"""Privacy accounting: what rounds of Gaussian noise add up to, by the figures of Google's dp-accounting."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from fedveil.errors import BadArgument

Epsilon = Callable[[float, float], float]


def import_library() -> Epsilon:
    """Return dp-accounting's exact epsilon of one Gaussian mechanism; the package comes with an extra."""
    try:
        from dp_accounting import get_epsilon_gaussian
    except ImportError as error:
        what = f"privacy is accounted with dp-accounting, which cannot be imported ({error})"
        raise BadArgument("Private", what, "pip install 'fedveil[dp]'") from error
    found: Epsilon = get_epsilon_gaussian
    return found


@lru_cache(maxsize=1024)
def epsilon(rounds: int, noise: float, delta: float, *, replace: bool = False) -> float:
    """Return the epsilon that `rounds` rounds of noise spend, at a delta.

    A round adds N(0, (noise clip)^2) to a sum that one client can move by `clip`, from what it is without the client.
    Rounds of Gaussian noise, each chosen in view of those before, are together as private as one with noise /
    sqrt(rounds) (Dong, Roth and Su, arXiv 1905.02383: mu-GDP composes), of which the library has the exact epsilon
    (Balle and Wang, arXiv 1805.06530). There is no amplification by sampling: the run's seed, which is public, chooses
    the clients.

    Args:
        rounds: in which a client took part; for the guarantee of all, the maximum over clients.
        noise: noise multiplier: standard deviation of the noise on the sum over clip.
        delta: above 0 and below 1.
        replace: neighbours differ by what one client holds, not by whether it contributes: the sum moves by 2 clip.
    """
    if not 0 < delta < 1:
        raise BadArgument("epsilon", f"delta must be above 0 and below 1, got {delta!r}", "use delta=1e-5")
    if rounds < 0 or not noise >= 0:
        raise BadArgument("epsilon", f"rounds and noise must be 0 or more, got {rounds!r} and {noise!r}")
    if not rounds:
        return 0.0
    if not noise:
        return math.inf
    return float(import_library()(noise / math.sqrt(rounds) / (2 if replace else 1), delta))


class Accountant:
    """Counts the rounds in which each client took part."""

    def __init__(self, noise: float, delta: float) -> None:
        self.noise, self.delta = noise, delta
        self._all, self._by_client = 0, dict[int, int]()

    @property
    def rounds(self) -> int:
        """The maximum number of rounds of a client. A round whose clients are unknown counts for all."""
        return self._all + max(self._by_client.values(), default=0)

    def epsilon(self, *, replace: bool = False) -> float:
        """Return what the rounds so far have spent; see `fedveil.defences.accountant.epsilon`."""
        return epsilon(self.rounds, self.noise, self.delta, replace=replace)

    def count(self, clients: Sequence[int] | None = None) -> None:
        """Count a round: for its clients, or for everyone if these are unknown."""
        if clients is None:
            self._all += 1
            return
        for client in clients:
            self._by_client[client] = self._by_client.get(client, 0) + 1

    def state(self) -> dict[str, Any]:
        """Return the counts."""
        return {"rounds": self._all, "own": dict(self._by_client)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self._all, self._by_client = int(state["rounds"]), dict(state["own"])
