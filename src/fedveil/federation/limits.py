"""Limits on the influence of a single client: each update is checked separately, and its weight is bounded."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedveil.checks import one_of, positive, share, whole
from fedveil.defences.clipping import split_vector
from fedveil.defences.interface import AnyDefence, AnyRound
from fedveil.errors import BadArgument, ExcessiveUpdate, NonFiniteUpdate, UpdateRefused
from fedveil.federation.aggregators import RULES
from fedveil.federation.engine import Member
from fedveil.scheme.result import Aggregate, Note

MEAN = "mean"
AGGREGATORS = (MEAN, *RULES)
FEWEST = 3  # updates of which a median says anything about a single one
REMEMBERED = 50  # rounds
NORMS = {"update_norm": "gradient", "buffer_norm": "buffers", "counter_norm": "counters"}  # by key of a record
"""What is measured of an update: its gradient, and the change of its floating-point and of its other buffers."""
STATISTICS = 10.0  # how much farther than one batch many batches move running statistics with a momentum of 0.1


@dataclass(frozen=True)
class Limits:
    """Bounds on each client, and how clients' gradients are combined.

    The noise is removed from each update by itself, in place of one removal for their sum. An update that breaks a
    bound is refused; the round goes on without it.

    Guarantees: with the mean and three updates or more, no gradient counts that is longer than `norm_factor` times the
      largest of the medians of this round and of the last 50, no client has a larger share than `max_share`, and no
      change of buffers counts that is longer than ten times that bound for buffers. With another rule, up to `hostile`
      clients may send anything. Counters never grow faster than `norm_factor` times their median.
    Not guaranteed: anything, if half of the clients or more are hostile. Updates below the bounds may still be wrong;
      against these there are the rules (docs/hostile.md).

    Args:
        aggregator: "mean", weighted by records, or a rule in which every client counts the same: "median",
            "trimmed-mean", "geometric-median", "centred-clipping", "clipped-mean", "krum", "multi-krum".
        hostile: how many clients of a round the rule must withstand.
        max_records: records that a client may count for, whatever it claims: one number for all, or one for each by its
            name (in one process its number, over Flower its node id); of a client without one the claim counts.
        max_share: largest share of a client in the mean, of three or more.
        max_norm: longest update.
        norm_factor: longest update, in medians, for the mean; a rule needs no such bound. None for none.
    """

    aggregator: str = MEAN
    hostile: int = 1
    max_records: int | Mapping[Member, int] | None = None
    max_share: float = 0.5
    max_norm: float | None = None
    norm_factor: float | None = 10.0

    def __post_init__(self) -> None:
        where = "Limits"
        one_of(where, "aggregator", self.aggregator, AGGREGATORS)
        whole(where, "hostile", self.hostile, 0)
        share(where, "max_share", self.max_share)
        known = self.max_records.values() if isinstance(self.max_records, Mapping) else [self.max_records]
        for records in known:
            if records is not None:
                whole(where, "max_records", records)
        if self.max_norm is not None:
            positive(where, "max_norm", self.max_norm)
        if self.norm_factor is not None and not positive(where, "norm_factor", self.norm_factor) >= 1:
            raise BadArgument(where, f"norm_factor must be at least 1, got {self.norm_factor!r}", "norm_factor=10")

    def needed(self, refused: int = 0) -> int:
        """The fewest updates that a round needs, besides those that were refused."""
        return 1 if self.aggregator == MEAN else RULES[self.aggregator].needed(max(0, self.hostile - refused))

    def withstood(self, updates: int) -> int:
        """How many of the updates that are left the rule is told to withstand: `hostile`, or as many as it can."""
        return 0 if self.aggregator == MEAN else min(self.hostile, RULES[self.aggregator].most(updates))

    def records(self, client: Member, claimed: int) -> int:
        """Return the number of records that a client's claim counts for."""
        known = self.max_records
        most = known.get(client) if isinstance(known, Mapping) else known
        return claimed if most is None else min(claimed, most)


def limits_for(defence: AnyDefence, limits: Limits | None) -> Limits | None:
    """The limits, as far as the defence can have them; what cannot be combined is refused."""
    if limits is not None and not isinstance(limits, Limits):
        what = f"limits is a {type(limits).__name__}"
        raise BadArgument(
            "Limits", what, "use an object, such as limits=fedveil.Limits(aggregator='median', hostile=1)"
        )
    if limits is None or defence.dp_clip is None:
        return limits
    neutral = Limits(max_records=limits.max_records, max_share=limits.max_share, norm_factor=limits.norm_factor)
    if limits != neutral:
        what = "differential privacy clips each update and gives away only their sum, with noise"
        raise BadArgument("Limits", what, "leave out aggregator, hostile and max_norm; --dp-clip bounds every client")
    return dataclasses.replace(limits, norm_factor=None)


def bounded_shares(records: Sequence[float], most: float) -> list[float]:
    """Each client's share; where one would be above `most`, records above some number do not count for anyone.

    >>> bounded_shares([10, 10, 80], 0.5)
    [0.25, 0.25, 0.5]
    """
    bound = max(most, 1 / len(records))
    ordered = sorted(records)
    for above in range(len(records)):  # clients at the bound
        if above * bound >= 1:
            break
        cap = bound * sum(ordered[: len(records) - above]) / (1 - above * bound)
        if ordered[len(records) - above - 1] <= cap:
            counted = [min(own, cap) for own in records] if above else records
            return [own / sum(counted) for own in counted]
    return [1 / len(records)] * len(records)


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of a round's updates, and which of them were refused or capped."""

    result: Aggregate | None  # None if too few are left
    refused: dict[Member, UpdateRefused]  # by client
    capped: tuple[Member, ...]  # clients that count for less than they claimed

    def recorded(self, faults: Sequence[str]) -> Aggregate:
        """The result, with what the round's record should tell."""
        assert self.result is not None
        notes: dict[str, Note] = {"faults": list(faults)} if faults else {}
        notes |= {"capped": list(self.capped)} if self.capped else {}
        return dataclasses.replace(self.result, notes=notes)


def aggregate(
    own_round: AnyRound,
    updates: Mapping[Member, Any],
    claims: Mapping[Member, int],
    model: nn.Module,
    limits: Limits,
    *,
    past: Sequence[Mapping[str, Any]] = (),
    left_out: int = 0,
    least: int = 1,
) -> Outcome:
    """Judge each client's update, and combine those that are not refused.

    Args:
        own_round: the round whose broadcast the updates answer.
        updates: by client.
        claims: the records that each client says it has.
        model: the server's, as it was broadcast.
        limits: bounds on each client.
        past: records of the rounds so far.
        left_out: clients that were refused before in this round.
        least: the fewest updates that may be left.
    """
    judged = dict(zip(updates, judge(own_round, list(updates.values()), model, limits, past), strict=True))
    refused = {client: one for client, one in judged.items() if isinstance(one, UpdateRefused)}
    kept = {client: one for client, one in judged.items() if isinstance(one, Aggregate)}
    out = left_out + len(refused)
    if len(kept) < max(least, limits.needed(out)):
        return Outcome(None, refused, ())
    records = {client: limits.records(client, claims[client]) for client in kept}
    shares = bounded_shares(list(records.values()), limits.max_share if len(kept) >= FEWEST else 1.0)
    whole_share = [own / sum(records.values()) for own in records.values()]
    lower = [own < before - 1e-12 for own, before in zip(shares, whole_share, strict=True)]
    private = own_round.combine(list(kept.values()))
    result = private or combine(list(kept.values()), shares, limits, model)
    capped = [c for c, less in zip(kept, lower, strict=True) if less or records[c] < claims[c]]
    counted = limits.aggregator == MEAN and private is None
    return Outcome(result, refused, tuple(capped) if counted else ())


def judge(
    own_round: AnyRound, updates: Sequence[Any], model: nn.Module, limits: Limits, past: Sequence[Mapping[str, Any]]
) -> list[Aggregate | UpdateRefused]:
    """Recover and check each update separately. Norms are taken in float64.

    Args:
        own_round: the round whose broadcast the updates answer.
        updates: one per client.
        model: the server's, as it was broadcast.
        limits: bounds on each.
        past: records of the rounds so far.
    """
    found = own_round.base.recover_each(updates)
    lengths = [None if isinstance(one, UpdateRefused) else _norms(one, model) for one in found]
    bounds = _bounds([own for own in lengths if own], model, limits, past)
    judged: list[Aggregate | UpdateRefused] = []
    for position, (one, own) in enumerate(zip(found, lengths, strict=True)):
        if isinstance(one, UpdateRefused) or own is None:
            judged.append(one)
            continue
        why = _refusal(f"client {position}", one, own, bounds, model)
        seen = own if own_round.base is own_round else {}  # a norm without noise would tell about its client
        judged.append(why or dataclasses.replace(one, figures={**one.figures, **seen}))
    return judged


def _norms(found: Aggregate, model: nn.Module) -> dict[str, float]:
    """Return the norm of each kind in `NORMS`, except kinds that the model does not have."""
    before = dict(model.named_buffers())
    floating = [name for name in found.buffers if before[name].is_floating_point()]
    parts: dict[str, list[Tensor]] = {"update_norm": list(found.gradients.values())}
    parts["buffer_norm"] = [found.buffers[name].double() - before[name].double() for name in floating]
    others = found.buffers.keys() - set(floating)
    parts["counter_norm"] = [found.buffers[name].double() - before[name].double() for name in others]
    return {key: norm(tensors) for key, tensors in parts.items() if tensors}


def norm(tensors: Sequence[Tensor]) -> float:
    """Return the common norm of some tensors, in float64."""
    own = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
    return float(torch.linalg.vector_norm(torch.stack(own)))


def _bounds(
    lengths: Sequence[Mapping[str, float]], model: nn.Module, limits: Limits, past: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """The largest norm of each kind."""
    first = next(model.parameters())
    dtype = first.dtype if torch.finfo(first.dtype).bits > 16 else torch.float32
    largest = math.sqrt(torch.finfo(dtype).max) * 1e-3  # an optimiser that squares it stays far from infinity
    bounds = {"update_norm": min(largest, limits.max_norm or largest), "buffer_norm": largest, "counter_norm": 2.0**40}
    if limits.norm_factor is None or limits.aggregator != MEAN or len(lengths) < FEWEST:
        return bounds
    for key, factor in {"update_norm": 1.0, "buffer_norm": STATISTICS}.items():
        own = [each[key] for each in lengths if key in each]
        recent = [record[key] for record in past[-REMEMBERED:] if record.get(key) is not None]
        reference = max([_median(own), *recent]) if own else 0.0
        if reference:  # gradients that are mostly 0 bound nothing
            bounds[key] = min(bounds[key], factor * limits.norm_factor * reference)
    if not bounds["buffer_norm"] < largest:  # buffers that the median client left alone, up to rounding
        own_buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        bounds["buffer_norm"] = math.sqrt(torch.finfo(first.dtype).eps) * (norm(own_buffers) if own_buffers else 0.0)
    return bounds


def _median(values: Sequence[float]) -> float:
    """The lower one of an even number."""
    return sorted(values)[(len(values) - 1) // 2]


def _refusal(
    client: str, found: Aggregate, lengths: Mapping[str, float], bounds: Mapping[str, float], model: nn.Module
) -> UpdateRefused | None:
    for key, length in lengths.items():
        if not math.isfinite(length):
            return NonFiniteUpdate(client, f"its {NORMS[key]} overflow once the noise is removed")
        if length > bounds[key]:
            what = "has norm" if key == "update_norm" else "change by"
            return ExcessiveUpdate(client, f"its {NORMS[key]} {what} {length:.3g}, above the bound {bounds[key]:.3g}")
    for path, module in model.named_modules():
        name = f"{path}.running_var" if path else "running_var"
        if isinstance(module, _NormBase) and name in found.buffers and float(found.buffers[name].min()) < 0:
            return ExcessiveUpdate(client, f"buffer {name} is a variance, and negative")
    return None


def combine(found: Sequence[Aggregate], shares: Sequence[float], limits: Limits, model: nn.Module) -> Aggregate:
    """One gradient from those that were not refused.

    Args:
        found: what `judge` returned, without refusals.
        shares: of each client in a mean.
        limits: how.
        model: the server's, as it was broadcast.
    """

    def one(vectors: Sequence[Tensor]) -> Tensor:
        rows = torch.stack(list(vectors))
        if limits.aggregator == MEAN:
            return torch.tensor(shares, dtype=rows.dtype, device=rows.device) @ rows
        return RULES[limits.aggregator].combine(rows, limits.withstood(len(rows)))

    gradients = _combine_by_name([one_client.gradients for one_client in found], one)
    first = found[0].buffers
    floating = [name for name, buffer in first.items() if buffer.is_floating_point()]
    before = dict(model.named_buffers())
    if limits.aggregator == MEAN:
        buffers = _combine_by_name([{name: own.buffers[name] for name in floating} for own in found], one)
    else:  # of changes: a rule may depend on where 0 is
        buffers = _combine_by_name(
            [{name: own.buffers[name] - before[name] for name in floating} for own in found], one
        )
        buffers = {name: before[name] + change for name, change in buffers.items()}
    for name in first.keys() - set(floating):
        buffers[name] = _limit_counters([own.buffers[name] for own in found], before[name], limits.norm_factor)
    return Aggregate(gradients, buffers, _error(found, shares), _combine_figures(found))


def _limit_counters(clients: Sequence[Tensor], before: Tensor, factor: float | None) -> Tensor:
    """The largest counter, or as far as `factor` times the median of their growth."""
    largest = torch.stack(list(clients)).amax(0)
    if factor is None or len(clients) < FEWEST or before.dtype == torch.bool:
        return largest
    growth = torch.stack([own.double() - before.double() for own in clients])
    most = factor * growth.sort(0).values[(len(clients) - 1) // 2].clamp_min(0)
    within = torch.minimum(largest.double() - before.double(), most).clamp_max(2.0**40).to(before.dtype)
    return before + within


def _combine_by_name(
    clients: Sequence[Mapping[str, Tensor]], one: Callable[[Sequence[Tensor]], Tensor]
) -> dict[str, Tensor]:
    first = clients[0]
    if not first:
        return {}
    flat = one([torch.cat([own[name].reshape(-1) for name in first]) for own in clients])
    return split_vector(flat, first)


def _error(found: Sequence[Aggregate], shares: Sequence[float]) -> float:
    """Mean of the relative errors, each weighted by what its gradient counts for."""
    sizes = [part * float(own.figures["update_norm"]) for own, part in zip(found, shares, strict=True)]
    wrong = sum(own.error * size for own, size in zip(found, sizes, strict=True))
    return wrong / sum(sizes) if sum(sizes) else 0.0


def _combine_figures(found: Sequence[Aggregate]) -> dict[str, float]:
    """Return the mean of each figure over clients, and the median of norms."""
    combined = {}
    for key in found[0].figures:
        own = [each.figures[key] for each in found if key in each.figures]
        combined[key] = _median(own) if key in NORMS else sum(own) / len(own)
    return combined
