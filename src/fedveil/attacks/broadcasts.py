"""The attacker of the veil that needs no record: broadcasts of consecutive rounds, in which the noise is drawn anew.

In canonical form (`attacks.canonical`, with the head left out) two broadcasts differ by the noise of their heads and by
one step of training:

    head_t = C_t + sum_g c_tg N_tg,      C_t - C_{t+1} small

N_tg is public: r_a in the rows of group g, times the factors by which the canonical form multiplied the head's columns.
That leaves a linear least-squares problem with m unknown numbers per round. Weights that training moves little count
more in it (`fit_noise`), so further broadcasts help. With decoys, c_t is one of a few public candidates, and the
nearest ones of consecutive rounds give it away (`pick_candidates`).
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedveil.attacks.canonical import Form, canonical_form, sources
from fedveil.attacks.observed import DoesNotApply, Observed
from fedveil.attacks.veil import base_of, group_rows, plan_of
from fedveil.graph.layout import flatten
from fedveil.graph.plan import Plan
from fedveil.scheme.messages import Broadcast, PublicHead
from fedveil.scheme.perturb import move_head

TINY = 1e-30
STEPS = 20  # of weights, then noise, in turn
LEAST = 1e-2  # of the mean squared change: no weight counts as if it changed less


class Heads(NamedTuple):
    """The head of one round in canonical form, units in the order of the last round."""

    values: Tensor  # all of its numbers
    noise: Tensor  # (m, numbers): what each group's noise adds to them, per unit of size


def noise_of(plan: Plan, head: PublicHead, rows: Tensor) -> Tensor:
    """For each of `rows` (one number per output) what it adds to the flat vector of all tensors."""
    found = torch.zeros(len(rows), plan.layout.total, dtype=torch.float64, device=plan.layout.device)
    for entry in plan.layout.entries:
        if entry.name == head.weight:
            shape = [len(rows), *[1] * len(entry.shape)]
            shape[1 + head.dim] = -1
            wide = rows.reshape(shape).expand(len(rows), *entry.shape)
            found[:, entry.start : entry.stop] = wide.reshape(len(rows), -1)
        elif head.masked_bias and entry.name == head.bias:
            found[:, entry.start : entry.stop] = rows
    return found


def heads_of(plan: Plan, sent: Sequence[Broadcast]) -> list[Heads]:
    """The heads of all rounds in one form: canonical, with units in the order of the last round."""
    names = {name for one in sent if one.head for name in (one.head.weight, one.head.bias) if name}
    flats = [flatten({**one.parameters, **one.buffers}, plan.layout.entries) for one in sent]
    forms: list[Form] = [canonical_form(plan, flat, without=names) for flat in flats]
    inside = torch.cat([torch.arange(e.start, e.stop) for e in plan.layout.entries if e.name in names])
    found = []
    for one, form in zip(sent, forms, strict=True):
        assert one.head is not None
        places = sources(plan, form.flat, forms[-1].flat, without=names)[inside.to(form.flat.device)]
        noise = noise_of(plan, one.head, group_rows(one.head)) * form.factors
        found.append(Heads(form.flat[places], noise[:, places]))
    return found


def fit_noise(heads: Sequence[Heads]) -> Tensor:
    """The size of each group's noise in each round, (rounds, m): the heads without it change as little as they can.

    Minimises, over consecutive rounds, the squared changes of the head's numbers, each divided by its own mean square,
    which is estimated in turn (iteratively reweighted least squares). A normal prior, the noise no larger than the
    head, decides where the data do not: if the noise is not drawn anew, only its changes show.
    """
    rounds, groups = len(heads), len(heads[0].noise)
    design = torch.zeros(rounds - 1, len(heads[0].values), rounds, groups, dtype=torch.float64)
    for number, (now, later) in enumerate(itertools.pairwise(heads)):
        design[number, :, number], design[number, :, number + 1] = now.noise.T.cpu(), -later.noise.T.cpu()
    design = design.flatten(2)
    change = torch.stack([now.values - later.values for now, later in itertools.pairwise(heads)]).cpu()
    size = torch.stack([head.values.norm() / head.noise.norm(dim=1).clamp_min(TINY) for head in heads]).flatten().cpu()
    prior, nothing = torch.diag(1 / size.clamp_min(TINY)), torch.zeros(len(size), dtype=torch.float64)
    spread, found = torch.ones(change.shape[1], dtype=torch.float64) * change.square().mean(), nothing
    for _ in range(STEPS):
        weight = spread.clamp_min(TINY).rsqrt()
        left = torch.cat([(design * weight[:, None]).flatten(0, 1), prior])
        right = torch.cat([(change * weight).flatten(), nothing])
        found = torch.linalg.lstsq(left, right[:, None], driver="gelsd").solution[:, 0]
        spread = (change - design @ found).square().mean(0)
        spread = spread + LEAST * spread.mean()
    return found.reshape(rounds, groups)


def pick_candidates(heads: Sequence[Heads], candidates: Sequence[Tensor]) -> list[int]:
    """Which candidate is true in each round: without them, heads change least from round to round (Viterbi)."""
    models = [head.values - offsets @ head.noise for head, offsets in zip(heads, candidates, strict=True)]
    cost, back = torch.zeros(len(models[0]), dtype=torch.float64, device=models[0].device), list[Tensor]()
    for now, later in itertools.pairwise(models):
        best = (cost[:, None] + torch.cdist(now, later, p=1)).min(0)
        cost, back = best.values, [*back, best.indices]
    path = [int(cost.argmin())]
    for step in reversed(back):
        path.insert(0, int(step[path[0]]))
    return path


def without_data(observed: Observed, most: int = 2) -> Observed:
    """The last model received, without the noise that the last `most` broadcasts give away."""
    sent: list[Broadcast] = []
    for seen in observed.rounds[-most:]:
        one = seen.broadcast
        if not isinstance(one, Broadcast) or one.head is None:
            raise DoesNotApply("broadcasts", "no veil covers the head")
        if all(one.round != other.round for other in sent):
            sent.append(one)
    if len(sent) < 2:
        raise DoesNotApply("broadcasts", "it takes two broadcasts of different rounds")
    last, heads = sent[-1], heads_of(plan_of(observed), sent)
    assert last.head is not None
    if last.head.decoys:
        candidates = [one.head.candidates.double() for one in sent if one.head]
        offset = candidates[-1][pick_candidates(heads, candidates)[-1]]
    else:
        offset = fit_noise(heads)[-1].to(last.head.direction.device)
    model = base_of(observed.architecture, last)
    move_head(model, last.head, -(offset @ group_rows(last.head)).to(last.head.direction.dtype))
    return dataclasses.replace(observed, model=model)


def two_broadcasts(observed: Observed) -> Observed:
    """Two broadcasts, no data."""
    return without_data(observed, 2)


def six_broadcasts(observed: Observed) -> Observed:
    """Six broadcasts, no data."""
    return without_data(observed, 6)
