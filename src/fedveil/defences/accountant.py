"""Privacy accounting: the epsilon spent by rounds of Gaussian noise, computed with Google's dp-accounting."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from fedveil.defences.state import State, StateValue, read_state
from fedveil.errors import BadArgument

Epsilon = Callable[[float, float], float]


def import_library() -> Epsilon:
    """Return dp-accounting's exact epsilon of one Gaussian mechanism; the package is an optional dependency."""
    try:
        from dp_accounting import get_epsilon_gaussian
    except ImportError as error:
        what = f"privacy is accounted with dp-accounting, which cannot be imported ({error})"
        raise BadArgument("Private", what, "pip install 'fedveil[dp]'") from error
    found: Epsilon = get_epsilon_gaussian
    return found


@lru_cache(maxsize=1024)
def epsilon(rounds: int, noise: float, delta: float, *, replace: bool = False) -> float:
    """Return the epsilon spent by `rounds` rounds of noise, for a given delta.

    A round adds N(0, (noise clip)^2) to a sum that one client can change by `clip`. Rounds of Gaussian noise, each
    chosen with knowledge of the earlier ones, are together as private as one with noise / sqrt(rounds) (Dong, Roth and
    Su, arXiv 1905.02383: mu-GDP composes), whose exact epsilon the library computes (Balle and Wang, arXiv 1805.06530).
    There is no amplification by sampling: the run's seed, which is public, chooses the clients.

    Args:
        rounds: number of rounds in which a client took part; for a guarantee to all clients, the maximum over clients.
        noise: noise multiplier (standard deviation of the noise on the sum / clip).
        delta: above 0 and below 1.
        replace: neighbouring data sets differ in one client's records, not in whether it contributes: the sum changes
            by at most 2 clip.
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
        self._all, self._by_client = 0, dict[int | str, int]()

    @property
    def rounds(self) -> int:
        """The maximum number of rounds over clients. A round whose clients are unknown counts for all."""
        return self._all + max(self._by_client.values(), default=0)

    def epsilon(self, *, replace: bool = False) -> float:
        """Return the epsilon that the rounds so far have spent."""
        return epsilon(self.rounds, self.noise, self.delta, replace=replace)

    def count(self, clients: Sequence[int | str] | None = None) -> None:
        """Count a round for its clients, or for everyone if they are unknown."""
        if clients is None:
            self._all += 1
            return
        for client in clients:
            self._by_client[client] = self._by_client.get(client, 0) + 1

    def state(self) -> State:
        """Return the counts."""
        return {"rounds": self._all, "own": dict(self._by_client)}

    def restore(self, state: Mapping[str, StateValue]) -> None:
        """Continue from `state`."""
        self._all = read_state("Private", state, "rounds", int)
        self._by_client = dict(read_state("Private", state, "own", dict))
