"""Compute epsilon, and the noise for a target epsilon, with Google's dp-accounting library.

A round adds noise of standard deviation noise x clip to a sum that one unit (a record, or a client) can change by at
most clip. With a sampling rate below 1, each record is in a round's sum independently with that probability, and the
sample is secret. Two data sets are neighbours if one record is replaced with a null record, whose gradient is 0, so the
number of records is public (dp-accounting's REPLACE_SPECIAL). For replacing a record with an arbitrary one,
epsilon is larger.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from types import ModuleType

from fedveil.checks import check_count, check_fraction, check_positive, is_number
from fedveil.errors import BadArgument

Members = Sequence[int | str] | None  # the clients of a round; None if they are unknown
_INTERVAL = 1e-3  # discretisation interval of the privacy loss; epsilon is an upper bound, too large by less than 2e-4
_MIN_NOISE, _MAX_NOISE = 1e-2, 1e6  # range of the search for a noise multiplier
_MILESTONE_RATIO = 1.02  # ratio of successive milestones
MAX_ROUNDS = 2**20  # upper limit of `affordable_rounds`
_EXACT_ROUNDS = 50  # up to this number of rounds, each number is a milestone


def import_library() -> ModuleType:
    """Import dp-accounting, an optional dependency."""
    try:
        return import_module("dp_accounting")
    except ImportError as error:
        message = f"privacy accounting needs dp-accounting, which cannot be imported ({error})"
        raise BadArgument("privacy", message, "pip install 'fedveil[dp]'") from error


@lru_cache(maxsize=1024)
def epsilon(
    rounds: int, noise: float, delta: float, rate: float = 1.0, *, replace: bool = False, group: int = 1
) -> float:
    """Return the epsilon of `rounds` rounds for a given delta.

    Rounds may depend on the results of earlier rounds. Without sampling, they are together as private as one round with
    noise / sqrt(rounds) (Dong, Roth and Su, arXiv 1905.02383), and epsilon is exact (Balle and Wang, arXiv 1805.06530).
    With sampling, privacy loss distributions are composed numerically (Koskela et al., arXiv 1906.03049), and the
    result includes an upper bound on the numerical error.

    Args:
        rounds: the number of rounds in which the unit could take part.
        noise: noise multiplier (standard deviation of the noise on the sum / clip).
        delta: the delta, above 0 and below 1.
        rate: probability that a record is in a round's sample.
        replace: whether neighbours differ in what a record or client contributes, rather than in whether it
            contributes.
        group: the number of records that belong together, such as those of one person.
    """
    where = "epsilon"
    check_delta(where, delta)
    check_fraction(where, "rate", rate)
    check_count(where, "group", group)
    if rounds < 0 or not noise >= 0:
        raise BadArgument(where, f"rounds and noise must be 0 or more, got {rounds!r} and {noise!r}")
    if replace and group > 1 and rate < 1:
        raise BadArgument(where, "replace is not supported with sampling and group > 1", "omit replace")
    if not rounds:
        return 0.0
    if not noise:
        return math.inf
    if rate >= 1:
        change = group * (2 if replace else 1)
        return float(import_library().get_epsilon_gaussian(noise / math.sqrt(rounds) / change, delta))
    return float(_distribution(noise, rate, replace, group).self_compose(rounds).get_epsilon_for_delta(delta))


@lru_cache(maxsize=64)
def _distribution(noise: float, rate: float, replace: bool, group: int):  # type: ignore[no-untyped-def]
    """Return the privacy loss distribution of one round with sampling."""
    library = import_library()
    pld = library.pld.privacy_loss_distribution
    if group > 1:
        probabilities = [math.comb(group, k) * rate**k * (1 - rate) ** (group - k) for k in range(group + 1)]
        return pld.from_mixture_gaussian_mechanism(
            noise, sensitivities=range(group + 1), sampling_probs=probabilities, value_discretization_interval=_INTERVAL
        )
    relation = library.NeighboringRelation.REPLACE_ONE if replace else library.NeighboringRelation.REPLACE_SPECIAL
    return pld.from_gaussian_mechanism(
        noise, sampling_prob=rate, value_discretization_interval=_INTERVAL, neighboring_relation=relation
    )


def composed_epsilon(round_counts: Mapping[tuple[float, float], int], delta: float) -> float:
    """Return the epsilon of rounds with different settings.

    Args:
        round_counts: the number of rounds with each noise multiplier and sampling rate.
        delta: the delta, above 0 and below 1.
    """
    nonzero = {setting: rounds for setting, rounds in round_counts.items() if rounds}
    if len(nonzero) < 2:
        return max([epsilon(rounds, noise, delta, rate) for (noise, rate), rounds in nonzero.items()], default=0.0)
    if not all(noise for noise, _ in nonzero):
        return math.inf
    parts = [_distribution(noise, rate, False, 1).self_compose(rounds) for (noise, rate), rounds in nonzero.items()]
    total = parts[0]
    for part in parts[1:]:
        total = total.compose(part)
    return float(total.get_epsilon_for_delta(delta))


def filtered_epsilon(round_counts: Mapping[tuple[float, float], int], delta: float, budget: float) -> float:
    """Return an epsilon that bounds rounds whose settings were chosen after seeing the results of earlier rounds.

    Composing privacy loss distributions bounds only settings that are fixed in advance. For adaptive settings, the
    sum of Rényi divergences of a single order is a valid bound (Feldman and Zrnic, arXiv 2008.11193). The order depends
    only on the budget.

    Args:
        round_counts: the number of rounds with each noise multiplier and sampling rate.
        delta: the delta, above 0 and below 1.
        budget: the epsilon that must not be exceeded, for which the order is chosen.
    """
    library, nonzero = import_library(), {setting: count for setting, count in round_counts.items() if count}
    if not all(noise for noise, _ in nonzero):
        return math.inf
    accountant = library.rdp.RdpAccountant([min(max(round(1 - 2 * math.log(delta) / budget), 2), 512)])
    for (noise, rate), count in nonzero.items():
        event = library.GaussianDpEvent(noise)
        accountant.compose(event if rate >= 1 else library.PoissonSampledDpEvent(rate, event), count)
    return float(accountant.get_epsilon(delta)) if nonzero else 0.0


def renyi_epsilon(rounds: int, noise: float, delta: float, rate: float = 1.0) -> float:
    """Return an upper bound on epsilon, computed from Rényi divergences without numerical integration."""
    if not rounds:
        return 0.0
    library = import_library()
    accountant = library.rdp.RdpAccountant([*range(2, 256), 512, 1024])
    event = library.GaussianDpEvent(noise)
    accountant.compose(event if rate >= 1 else library.PoissonSampledDpEvent(rate, event), rounds)
    return float(accountant.get_epsilon(delta))


@lru_cache(maxsize=64)
def solve_noise(target: float, rounds: int, delta: float, rate: float = 1.0) -> float:
    """Return the smallest noise multiplier, to within 0.1 %, for which epsilon is at most `target`."""
    check_positive("privacy", "epsilon", target, "use epsilon=3")
    low, high = _MIN_NOISE, 1.0
    while epsilon(rounds, high, delta, rate) > target:
        low, high = high, 2 * high
        if high > _MAX_NOISE:
            message = f"no noise achieves epsilon {target:g} in {rounds} rounds at rate {rate:g} and delta {delta:g}"
            raise BadArgument("privacy", message, "use a larger epsilon or fewer rounds")
    while high > low * 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if epsilon(rounds, middle, delta, rate) > target else (low, middle)
    return high


@lru_cache(maxsize=64)
def affordable_rounds(budget: float, noise: float, delta: float, rate: float = 1.0) -> int:
    """Return the largest number of rounds within a budget of epsilon, but at most `MAX_ROUNDS`."""
    if not noise:
        return 0

    def epsilon_after(rounds: int) -> float:
        return epsilon(rounds, noise, delta, rate)

    high = 1
    while high <= MAX_ROUNDS and epsilon_after(high) <= budget:
        high *= 2
    return high // 2 if high > MAX_ROUNDS else bisect_right(range(high), budget, lo=high // 2, key=epsilon_after) - 1


def milestone(rounds: int) -> int:
    """Return the number of rounds, at least `rounds` and at most 2 % more, for which a running epsilon is computed.

    Computing epsilon takes about as long as a round, so it is not computed for every round.

    >>> [milestone(rounds) for rounds in (7, 50, 51, 1000)]
    [7, 50, 51, 1014]
    """
    if rounds <= _EXACT_ROUNDS:
        return rounds
    power = math.ceil(math.log(rounds / _EXACT_ROUNDS) / math.log(_MILESTONE_RATIO) - 1e-9)
    return max(rounds, math.floor(_EXACT_ROUNDS * _MILESTONE_RATIO**power))


class Accountant:
    """The number of rounds in which each client took part, and the resulting epsilon.

    Args:
        noise: noise multiplier.
        delta: the delta for which epsilon is computed.
        rate: sampling rate of records; 1 if the unit is a client.
        budget: the maximum epsilon that may be spent; by default, unlimited.
    """

    def __init__(self, noise: float, delta: float, rate: float = 1.0, budget: float | None = None) -> None:
        self.noise, self.delta, self.rate, self.budget = noise, delta, rate, budget
        self._rounds_of_all, self._by_client = 0, dict[int | str, int]()

    @property
    def rounds(self) -> int:
        """The largest number of rounds of a single client; a round with unknown clients counts for all of them."""
        return self._rounds_of_all + max(self._by_client.values(), default=0)

    def epsilon(self, *, replace: bool = False, group: int = 1, running: bool = False) -> float:
        """Return the epsilon spent so far, for the client that took part in the most rounds.

        Args:
            replace: whether neighbours differ in what a record or client contributes, rather than in whether it
                contributes.
            group: the number of records that belong together.
            running: whether to return an upper bound, which is recomputed only at milestones.
        """
        rounds = milestone(self.rounds) if running and self.rate < 1 else self.rounds
        if self.budget is not None and rounds > self.rounds:
            rounds = max(self.rounds, min(rounds, affordable_rounds(self.budget, self.noise, self.delta, self.rate)))
        return epsilon(rounds, self.noise, self.delta, self.rate, replace=replace, group=group)

    @property
    def has_budget(self) -> bool:
        """Whether one more round stays within the budget."""
        return self.budget is None or self.rounds < affordable_rounds(self.budget, self.noise, self.delta, self.rate)

    def by_client(self) -> dict[int | str, float]:
        """Return the epsilon of each known client."""
        return {
            client: epsilon(self._rounds_of_all + rounds, self.noise, self.delta, self.rate)
            for client, rounds in self._by_client.items()
        }

    def count(self, clients: Members = None) -> None:
        """Count a round for the given clients, or for all clients if they are unknown."""
        if clients is None:
            self._rounds_of_all += 1
            return
        for client in clients:
            self._by_client[client] = self._by_client.get(client, 0) + 1

    def state(self) -> dict[str, int | dict[int | str, int]]:
        """Return the round counts, to be saved in a checkpoint."""
        return {"rounds": self._rounds_of_all, "own": dict(self._by_client)}

    def restore(self, rounds: int, counts: Mapping[int | str, int]) -> None:
        """Restore the round counts of a state."""
        self._rounds_of_all, self._by_client = rounds, dict(counts)


def check_delta(where: str, delta: float) -> float:
    """Check that delta is above 0 and below 1, and return it."""
    if not is_number(delta) or not 0 < delta < 1:
        raise BadArgument(where, f"delta must be above 0 and below 1, got {delta!r}", "use delta=1e-5")
    return float(delta)
