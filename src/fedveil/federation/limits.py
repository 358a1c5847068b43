"""Limits on the influence of a single client: each update is checked separately, and its weight is bounded."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedveil.checks import check_choice, check_count, check_fraction, check_positive
from fedveil.defences.encoding import split_vector
from fedveil.defences.interface import AnyDefence, AnyRound, B, DefenceRound, U
from fedveil.errors import BadArgument, ExcessiveUpdate, NonFiniteUpdate, UpdateRefused
from fedveil.federation.aggregators import RULES
from fedveil.federation.history import RoundRecord
from fedveil.federation.protocol import AnyReply, Member
from fedveil.scheme.result import Aggregate

MEAN = "mean"
AGGREGATORS = (MEAN, *RULES)
MIN_UPDATES = 3  # with fewer updates, a single one could determine the median
PAST_ROUNDS = 50  # number of past rounds whose norms bound the updates of a round
NORMS = {"update_norm": "gradient", "buffer_norm": "buffers", "counter_norm": "counters"}
"""The norms in a round's record: of the gradient, and of the changes to floating-point buffers and counters."""
BUFFER_FACTOR = 10.0  # change in running statistics over many batches / over one, at momentum 0.1


@dataclass(frozen=True)
class Limits:
    """Bounds on each client, and the rule that combines the clients' gradients.

    The noise is removed from each update separately, not once from their sum. An update that exceeds a bound is
    refused, and the round continues without it.

    Guarantees: with the mean and at least three updates, the norm of every accepted gradient is at most
      `norm_factor` times the largest median norm of this round and the last 50, no client's weight exceeds `max_share`,
      and changes to buffers are bounded in the same way, with ten times the factor. With another rule, up to `hostile`
      clients may send anything. Counters grow by at most `norm_factor` times their median growth.
    Nothing is guaranteed if at least half of the clients are hostile. Updates within the bounds may still be wrong; to
    protect against them, use a rule other than the mean (docs/hostile.md).

    Args:
        aggregator: "mean", weighted by records, or a rule that weights all clients equally: "median",
            "trimmed-mean", "geometric-median", "centred-clipping", "clipped-mean", "krum", "multi-krum".
        hostile: number of hostile clients in a round that the rule must withstand.
        max_records: maximum number of records counted for a client, whatever number it claims: one number for all
            clients, or a mapping from clients (indices in one process, node ids with Flower, site names with FLARE) to
            numbers. Unlisted clients are not limited.
        max_share: maximum weight of a client in a mean over at least three clients.
        max_norm: maximum norm of an update.
        norm_factor: maximum norm of an update relative to the median norm, or None for no bound. It applies only to
            the mean; the other rules do not need it.
    """

    aggregator: str = MEAN
    hostile: int = 1
    max_records: int | Mapping[Member, int] | None = None
    max_share: float = 0.5
    max_norm: float | None = None
    norm_factor: float | None = 10.0

    def __post_init__(self) -> None:
        where = "Limits"
        check_choice(where, "aggregator", self.aggregator, AGGREGATORS)
        check_count(where, "hostile", self.hostile, 0)
        check_fraction(where, "max_share", self.max_share)
        max_counts = self.max_records.values() if isinstance(self.max_records, Mapping) else [self.max_records]
        for records in max_counts:
            if records is not None:
                check_count(where, "max_records", records)
        if self.max_norm is not None:
            check_positive(where, "max_norm", self.max_norm)
        if self.norm_factor is not None and not check_positive(where, "norm_factor", self.norm_factor) >= 1:
            raise BadArgument(where, f"norm_factor must be at least 1, got {self.norm_factor!r}", "set norm_factor=10")

    def min_clients(self, num_refused: int = 0) -> int:
        """Return the minimum number of accepted updates in a round in which `num_refused` updates were refused."""
        return 1 if self.aggregator == MEAN else RULES[self.aggregator].min_rows(max(0, self.hostile - num_refused))

    def records(self, client: Member, num_claimed: int) -> int:
        """Return the number of records counted for a client that claims to have `num_claimed` records."""
        maximum = self.max_records
        max_count = maximum.get(client) if isinstance(maximum, Mapping) else maximum
        return num_claimed if max_count is None else min(num_claimed, max_count)


def adapt_limits(defence: AnyDefence, limits: Limits | None) -> Limits | None:
    """Adapt limits to a defence; refuse limits that cannot be combined with it."""
    if limits is not None and not isinstance(limits, Limits):
        fix = "pass an instance, such as limits=fedveil.Limits(aggregator='median', hostile=1)"
        raise BadArgument("Limits", f"limits must be a fedveil.Limits, got {type(limits).__name__}", fix)
    if limits is not None and defence.integer_sums:
        message = "limits and aggregation rules need individual updates, but the noise in a single update is too small"
        raise BadArgument("Limits", message, "set limits=None: the clipping norm bounds every record")
    if limits is None or defence.dp_clip is None:
        return limits
    supported_limits = Limits(
        max_records=limits.max_records, max_share=limits.max_share, norm_factor=limits.norm_factor
    )
    if limits != supported_limits:
        message = "differential privacy clips each update and returns only the noisy sum"
        fix = "omit aggregator, hostile and max_norm; the clipping norm bounds every client"
        raise BadArgument("Limits", message, fix)
    return dataclasses.replace(limits, norm_factor=None)


def bounded_shares(records: Sequence[float], max_share: float) -> list[float]:
    """Return each client's weight; numbers of records are capped if a weight would otherwise exceed `max_share`.

    >>> bounded_shares([10, 10, 80], 0.5)
    [0.25, 0.25, 0.5]
    """
    bound = max(max_share, 1 / len(records))
    sorted_records = sorted(records)
    for num_capped in range(len(records)):
        if num_capped * bound >= 1:
            break
        cap = bound * sum(sorted_records[: len(records) - num_capped]) / (1 - num_capped * bound)
        if sorted_records[len(records) - num_capped - 1] <= cap:
            counts = [min(count, cap) for count in records] if num_capped else records
            return [count / sum(counts) for count in counts]
    return [1 / len(records)] * len(records)


def aggregate(
    defence_round: AnyRound,
    replies: Sequence[AnyReply],
    model: nn.Module,
    limits: Limits,
    past_records: Sequence[RoundRecord] = (),
    num_left_out: int = 0,
    min_updates: int = 1,
) -> tuple[Aggregate | None, dict[Member, UpdateRefused]]:
    """Check each client's update, and combine the accepted updates.

    Returns the result and a dict of refusals by client. The result is None if too few updates are left. The
    result's notes list the clients whose weight was capped.

    Args:
        defence_round: the round that the updates belong to.
        replies: the clients' replies, each with an update and the number of records that the client claims.
        model: the server's model, as it was broadcast.
        limits: bounds on each client.
        past_records: records of the previous rounds.
        num_left_out: number of clients that were refused earlier in this round.
        min_updates: minimum number of updates.
    """
    clients, claims = [reply.members[0] for reply in replies], {reply.members[0]: reply.records for reply in replies}
    outcomes = check_updates(defence_round, [reply.update for reply in replies], model, limits, past_records)
    outcome_by_client = dict(zip(clients, outcomes, strict=True))
    refusals = {client: outcome for client, outcome in outcome_by_client.items() if isinstance(outcome, UpdateRefused)}
    accepted_updates = {
        client: outcome for client, outcome in outcome_by_client.items() if isinstance(outcome, Aggregate)
    }
    num_refused = num_left_out + len(refusals)
    if len(accepted_updates) < max(min_updates, limits.min_clients(num_refused)):
        return None, refusals
    records = {client: limits.records(client, claims[client]) for client in accepted_updates}
    shares = bounded_shares(list(records.values()), limits.max_share if len(accepted_updates) >= MIN_UPDATES else 1.0)
    fair_shares = {client: record / sum(records.values()) - 1e-12 for client, record in records.items()}
    private_sum = defence_round.combine(list(accepted_updates.values()))
    result = private_sum or combine(list(accepted_updates.values()), shares, limits, model)
    capped_clients = [
        c for c, share in zip(accepted_updates, shares, strict=True) if share < fair_shares[c] or records[c] < claims[c]
    ]
    if capped_clients and limits.aggregator == MEAN and private_sum is None:
        result = dataclasses.replace(result, notes={**result.notes, "capped": capped_clients})
    return result, refusals


def check_updates(
    defence_round: DefenceRound[B, U],
    updates: Sequence[U],
    model: nn.Module,
    limits: Limits,
    past_records: Sequence[RoundRecord],
) -> list[Aggregate | UpdateRefused]:
    """Recover and check each update separately. Norms are computed in float64.

    Args:
        defence_round: the round that the updates belong to.
        updates: one update per client.
        model: the server's model, as it was broadcast.
        limits: bounds on each update.
        past_records: records of the previous rounds.
    """
    outcomes = defence_round.base.recover_each(updates)
    norms = [None if isinstance(outcome, UpdateRefused) else _norms(outcome, model) for outcome in outcomes]
    bounds = _bounds([norm for norm in norms if norm], model, limits, past_records)
    results: list[Aggregate | UpdateRefused] = []
    for position, (outcome, norm) in enumerate(zip(outcomes, norms, strict=True)):
        if isinstance(outcome, UpdateRefused) or norm is None:
            results.append(outcome)
            continue
        refusal = _refusal(f"client {position}", outcome, norm, bounds, model)
        norm_figures = norm if defence_round.base is defence_round else {}  # norms without noise would leak information
        results.append(refusal or dataclasses.replace(outcome, figures={**outcome.figures, **norm_figures}))
    return results


def _norms(result: Aggregate, model: nn.Module) -> dict[str, float]:
    """Return those norms in `NORMS` that apply to the model."""
    old_buffers = dict(model.named_buffers())
    parts = {"update_norm": list(result.gradients.values()), "buffer_norm": [], "counter_norm": []}
    for name, buffer in result.buffers.items():
        kind = "buffer_norm" if old_buffers[name].is_floating_point() else "counter_norm"
        parts[kind].append(buffer.double() - old_buffers[name].double())
    return {key: norm(tensors) for key, tensors in parts.items() if tensors}


def norm(tensors: Sequence[Tensor]) -> float:
    """Return the joint norm of the tensors, in float64."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
    return float(torch.linalg.vector_norm(torch.stack(norms)))


def _bounds(
    norms: Sequence[Mapping[str, float]], model: nn.Module, limits: Limits, past_records: Sequence[RoundRecord]
) -> dict[str, float]:
    """Return the maximum norm of each kind."""
    parameter = next(model.parameters())
    dtype = parameter.dtype if torch.finfo(parameter.dtype).bits > 16 else torch.float32
    max_norm = math.sqrt(torch.finfo(dtype).max) * 1e-3  # far from overflow even if an optimizer squares it
    bounds = {
        "update_norm": min(max_norm, limits.max_norm or max_norm),
        "buffer_norm": max_norm,
        "counter_norm": 2.0**40,
    }
    if limits.norm_factor is None or limits.aggregator != MEAN or len(norms) < MIN_UPDATES:
        return bounds
    for key, factor in {"update_norm": 1.0, "buffer_norm": BUFFER_FACTOR}.items():
        values = [norm[key] for norm in norms if key in norm]
        recent_norms = [record.figures[key] for record in past_records[-PAST_ROUNDS:] if key in record.figures]
        reference = max([_median(values), *recent_norms]) if values else 0.0
        if reference:  # if most gradients are zero, there is no bound
            bounds[key] = min(bounds[key], factor * limits.norm_factor * reference)
    if not bounds["buffer_norm"] < max_norm:  # the median client changed no buffers except by rounding
        buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        bounds["buffer_norm"] = math.sqrt(torch.finfo(parameter.dtype).eps) * (norm(buffers) if buffers else 0.0)
    return bounds


def _median(values: Sequence[float]) -> float:
    """Return the median; for an even number of values, the lower of the two middle values."""
    return sorted(values)[(len(values) - 1) // 2]


def _refusal(
    client: str, result: Aggregate, norms: Mapping[str, float], bounds: Mapping[str, float], model: nn.Module
) -> UpdateRefused | None:
    for key, value in norms.items():
        if not math.isfinite(value):
            return NonFiniteUpdate(client, f"overflow in its {NORMS[key]} after the noise is removed")
        if value > bounds[key]:
            verb = "has norm" if key == "update_norm" else "change by"
            return ExcessiveUpdate(client, f"its {NORMS[key]} {verb} {value:.3g}, above the bound of {bounds[key]:.3g}")
    for path, module in model.named_modules():
        name = f"{path}.running_var" if path else "running_var"
        if isinstance(module, _NormBase) and name in result.buffers and float(result.buffers[name].min()) < 0:
            return ExcessiveUpdate(client, f"buffer {name} is a variance, but contains negative values")
    return None


def combine(results: Sequence[Aggregate], shares: Sequence[float], limits: Limits, model: nn.Module) -> Aggregate:
    """Combine the gradients and buffers of the accepted updates.

    Args:
        results: results of `check_updates`, without refusals.
        shares: weight of each client in a mean.
        limits: the aggregation rule.
        model: the server's model, as it was broadcast.
    """

    def combine_vectors(vectors: Sequence[Tensor]) -> Tensor:
        rows = torch.stack(list(vectors))
        if limits.aggregator == MEAN:
            return torch.tensor(shares, dtype=rows.dtype, device=rows.device) @ rows
        rule = RULES[limits.aggregator]
        return rule.combine(
            rows, min(limits.hostile, rule.max_hostile(len(rows)))
        )  # after refusals, fewer may be hostile

    gradients = _combine_by_name([result.gradients for result in results], combine_vectors)
    first_buffers = results[0].buffers
    float_names = [name for name, buffer in first_buffers.items() if buffer.is_floating_point()]
    old_buffers = dict(model.named_buffers())
    is_mean = limits.aggregator == MEAN  # other rules may depend on the origin, so they are applied to changes
    origin = {name: torch.zeros_like(old_buffers[name]) if is_mean else old_buffers[name] for name in float_names}
    changes = [{name: result.buffers[name] - origin[name] for name in float_names} for result in results]
    buffers = {name: origin[name] + change for name, change in _combine_by_name(changes, combine_vectors).items()}
    for name in first_buffers.keys() - set(float_names):
        buffers[name] = _limit_counters(
            [result.buffers[name] for result in results], old_buffers[name], limits.norm_factor
        )
    return Aggregate(gradients, buffers, _mean_error(results, shares), _combine_figures(results))


def _limit_counters(counters: Sequence[Tensor], old_value: Tensor, factor: float | None) -> Tensor:
    """Return the largest counter, with its growth limited to `factor` times the median growth."""
    max_counter = torch.stack(list(counters)).amax(0)
    if factor is None or len(counters) < MIN_UPDATES or old_value.dtype == torch.bool:
        return max_counter
    growth = torch.stack([counter.double() - old_value.double() for counter in counters])
    max_growth = factor * growth.sort(0).values[(len(counters) - 1) // 2].clamp_min(0)
    limited_growth = (
        torch.minimum(max_counter.double() - old_value.double(), max_growth).clamp_max(2.0**40).to(old_value.dtype)
    )
    return old_value + limited_growth


def _combine_by_name(
    tensors_by_client: Sequence[Mapping[str, Tensor]], combine_vectors: Callable[[Sequence[Tensor]], Tensor]
) -> dict[str, Tensor]:
    template = tensors_by_client[0]
    if not template:
        return {}
    vector = combine_vectors(
        [torch.cat([tensors[name].reshape(-1) for name in template]) for tensors in tensors_by_client]
    )
    return split_vector(vector, template)


def _mean_error(results: Sequence[Aggregate], shares: Sequence[float]) -> float:
    """Return the mean of the relative errors, weighted by the norm of each contribution."""
    weighted_norms = [
        share * float(result.figures["update_norm"]) for result, share in zip(results, shares, strict=True)
    ]
    error = sum(result.error * weighted_norm for result, weighted_norm in zip(results, weighted_norms, strict=True))
    return error / sum(weighted_norms) if sum(weighted_norms) else 0.0


def _combine_figures(results: Sequence[Aggregate]) -> dict[str, float]:
    """Return the mean of each figure over the clients; for norms, the median."""
    figures = {}
    for key in results[0].figures:
        values = [result.figures[key] for result in results if key in result.figures]
        figures[key] = _median(values) if key in NORMS else sum(values) / len(values)
    return figures
