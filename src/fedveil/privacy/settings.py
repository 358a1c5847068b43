"""The settings of differential privacy."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from fedveil.checks import check_choice, check_count, check_fraction, check_range
from fedveil.errors import BadArgument
from fedveil.privacy.accounting import check_delta, import_library, solve_noise
from fedveil.privacy.defaults import default_rounds
from fedveil.privacy.gradients import MEMORY
from fedveil.privacy.mechanism import MAX_RECORDS, Grid, count_shares, make_grid
from fedveil.wire import Values

Unit = Literal["record", "client"]
NoiseSource = Literal["server", "clients"]
TERMS = ("noise", "clip", "rate", "noise_by", "colluding", "vanishing")  # settings that clients need
MIN_CLIP, MAX_CLIP = 1e-6, 1e6  # bounds on `clip`, so that squares and products do not overflow in float64


@dataclass(frozen=True)
class Privacy:
    """The settings of differential privacy for a run.

    Set either a target `epsilon`, from which the noise for `rounds` rounds is computed, or `noise`, for which epsilon
    is reported.

    Attributes:
        epsilon: the budget. Training stops before it is exceeded.
        noise: noise multiplier (standard deviation of the noise on the sum / clip). With 0, gradients are only clipped.
        delta: the probability with which epsilon may be exceeded; choose it far below 1 / number of records.
        clip: maximum norm of a record's (or client's) gradient.
        unit: the unit of protection: one "record", or all records of a "client".
        rate: the probability that a record is in a round's sample. By default, batch_size / the number of records of
            the largest client if a batch size is given; otherwise 1,024 / the number of all records, at most 0.5. Not
            available for clients, because the clients of a round are not secret.
        rounds: the number of rounds for which the noise is chosen and `fit()` trains. For records, the default is
            30 / rate, but at least 150 and at most 600.
        noise_by: "server", which the clients must trust, or "clients", each of which adds a share of the noise with
            secure aggregation.
        colluding: the number of clients that may reveal their shares of the noise; at least 1, because each client
            knows its share.
        vanishing: the number of clients that may drop out of a round; the others then still add enough noise.
        memory: maximum number of bytes that a client uses for per-record gradients.
        allow_factors: whether to accept a veil with factors. The guarantee holds, but accuracy suffers, because norms
            and noise are computed from perturbed gradients.
    """

    epsilon: float | None = None
    noise: float | None = None
    delta: float = 1e-5
    clip: float = 1.0
    unit: Unit = "record"
    rate: float | None = None
    rounds: int | None = None
    noise_by: NoiseSource = "server"
    colluding: int = 1
    vanishing: int = 0
    memory: int = MEMORY
    allow_factors: bool = False

    def __post_init__(self) -> None:
        where = "Privacy"
        check_choice(where, "unit", self.unit, ("record", "client"))
        check_choice(where, "noise_by", self.noise_by, ("server", "clients"))
        for name, low, high in (("clip", MIN_CLIP, MAX_CLIP), ("noise", 0.0, 1e6), ("epsilon", 1e-6, 1e6)):
            if name == "clip" or getattr(self, name) is not None:
                check_range(where, name, getattr(self, name), low, high)
        check_delta(where, self.delta)
        if self.rate is not None:
            check_fraction(where, "rate", self.rate, "use rate=0.01")
        if self.rounds is not None:
            check_count(where, "rounds", self.rounds)
        check_count(where, "colluding", self.colluding)
        check_count(where, "vanishing", self.vanishing, 0)
        check_count(where, "memory", self.memory)
        if self.unit == "client" and self.rate not in (None, 1):
            raise BadArgument(where, "rate applies only to records", "omit rate, and set participation=")
        if self.unit == "client" and self.noise_by == "clients":
            raise BadArgument(
                where, "clients add noise only if the unit is a record", 'use noise_by="server" or unit="record"'
            )
        if self.epsilon is None and self.noise is None:
            raise BadArgument(where, "neither epsilon nor noise is set", "use epsilon=3, or noise=1.0")
        if self.unit == "client" and self.epsilon is not None and self.noise is None and self.rounds is None:
            message = "the noise for an epsilon depends on the number of rounds"
            raise BadArgument(where, message, "also pass rounds=, or pass noise= instead")

    def terms(self) -> Values:
        """Return the settings that clients need, as JSON values."""
        return {name: getattr(self, name) for name in TERMS}

    @classmethod
    def from_terms(cls, terms: Values) -> "Privacy":
        """Return a client's settings for the server's `terms`. Factors do not weaken the guarantee and are allowed."""
        if terms.keys() != set(TERMS) or terms["noise"] is None or terms["rate"] is None:
            raise BadArgument("request", f"privacy must have the settings {', '.join(TERMS)}")
        return cls(**terms, allow_factors=True)

    def min_members(self, members: int) -> int:
        """Return the minimum number of members that must contribute to a sum for it to contain enough noise."""
        return members - self.vanishing if self.noise_by == "clients" else 0

    def resolve(self, default_rate: float) -> "Privacy":
        """Return settings with the rate, the noise multiplier and, for a target epsilon, the number of rounds set.

        Args:
            default_rate: the sampling rate to use if `rate` is None.
        """
        rounds = self.rounds
        rate = 1.0 if self.unit == "client" else self.rate if self.rate is not None else default_rate
        noise = self.noise
        if noise is None:
            assert self.epsilon is not None
            rounds = rounds or default_rounds(rate)
            noise = solve_noise(self.epsilon, rounds, self.delta, rate)
        elif noise:
            import_library()  # raises an error if dp-accounting is not installed
        return replace(self, rate=rate, noise=noise, rounds=rounds)

    def grid(self, num_values: int, num_candidates: int, members: int | None) -> Grid:
        """Return the grid for a sum of gradients, which depends only on public numbers.

        Args:
            num_values: the number of values in one gradient.
            num_candidates: the number of gradients for each record.
            members: the number of clients selected for the round, with secure aggregation.
        """
        assert self.noise is not None
        if self.noise_by == "server":
            return make_grid(self.noise, self.clip, num_values)
        if members is None:
            message = "noise shares need secure aggregation: a single update contains only one share"
            raise BadArgument("privacy", message, 'set secure_aggregation=True, or noise_by="server"')
        shares = count_shares(members, self.colluding, self.vanishing)
        return make_grid(self.noise, self.clip, num_values, candidates=num_candidates, shares=shares)

    def capacity(self, records: int) -> int:
        """Return the number of records for which a client computes gradients in every round.

        This number does not depend on the sample, so that the duration of a round reveals nothing. With probability
        below 1e-8, a sample is larger and takes longer.
        """
        assert self.rate is not None
        if self.rate * records > MAX_RECORDS / 2:
            message = f"a sample of {self.rate * records:,.0f} records is too large for the bound on rounding errors"
            raise BadArgument(
                "privacy", message, f"use a rate that selects at most {MAX_RECORDS // 2:,} records per client"
            )
        mean, deviation = self.rate * records, math.sqrt(records * self.rate * (1 - self.rate))
        return max(1, min(records, math.ceil(mean + 6 * deviation + 6)))
