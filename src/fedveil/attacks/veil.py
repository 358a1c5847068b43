"""Attacks on the veil, which estimate the true model from the broadcasts that a client received.

`fit_own_labels` fits the noise of the head to the client's own labelled records. `remove_noise` needs no records. Since
noise is redrawn in every round, two broadcasts in canonical form (`attacks.canonical`, ignoring the head) differ only
by the noise of their heads and by one training step:

    head_t = C_t + sum_g c_tg N_tg,      C_t - C_{t+1} small

N_tg is public: r_a in the rows of group g, times the factors by which the canonical form multiplied the head's columns.
The result is a linear least-squares problem with m unknowns per round. Weights that hardly change during training count
more (`fit_noise`), so additional broadcasts help. With decoys, c_t is one of a few public candidates, and the closest
candidates of consecutive rounds reveal it (`pick_candidates`). See docs/threat-model.md.
"""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedveil.attacks.canonical import TINY, canonical_form, flat_values, sources
from fedveil.attacks.observation import DoesNotApply, Observation, copy_with_values
from fedveil.federation.evaluate import predict
from fedveil.graph import analyse
from fedveil.graph.plan import Plan, flatten
from fedveil.scheme.broadcast import Broadcast, PublicHead, move_head
from fedveil.scheme.losses import Loss, SquaredError
from fedveil.scheme.outputs import loss_values

LBFGS_STEPS = 200
TURNS = 20  # alternations between weights and noise
SMOOTHING = 1e-2  # constant added to each weight's squared change, relative to the mean

VeiledHead = tuple[Broadcast, PublicHead]


def base_model(architecture: nn.Module, broadcast: Broadcast, noise: Tensor | None = None) -> nn.Module:
    """Return the broadcast model without the public offset of its head and, if given, without `noise`."""
    model = copy_with_values(architecture, {**broadcast.parameters, **broadcast.buffers})
    if noise is not None and broadcast.head is not None:
        move_head(model, broadcast.head, -noise.to(broadcast.head.direction.dtype))
    return model


def analyse_architecture(observed: Observation) -> Plan:
    """Return the plan of the federation's architecture, which is public."""
    return analyse(observed.architecture, observed.inputs[:2], head="exposed")


def remove_offset(observed: Observation) -> Observation:
    """Remove the public offset of the head, which the scheme sends separately for precision.

    This attack needs no data. The remaining noise is as large as the anchor's error (docs/maths.md, "Anchoring").
    """
    broadcast = observed.rounds[-1].broadcast
    if not isinstance(broadcast, Broadcast) or broadcast.head is None:
        return observed
    return dataclasses.replace(observed, model=base_model(observed.architecture, broadcast))


def fit_own_labels(observed: Observation) -> Observation:
    """Fit the noise of the head to the attacker's labels.

    The equation y = y^ - alpha r has m unknowns, which are the same for all records of a round.
    """
    broadcast = observed.rounds[-1].broadcast
    if not isinstance(broadcast, Broadcast):
        return observed
    return dataclasses.replace(observed, model=calibrate(observed, broadcast))


def remove_noise(observed: Observation, broadcasts: int = 2) -> Observation:
    """Remove the noise from the last broadcast, as far as recent broadcasts reveal it; this needs no data."""
    rounds = dict[str, VeiledHead]()
    for seen in observed.rounds[-broadcasts:]:
        broadcast = seen.broadcast
        if not isinstance(broadcast, Broadcast) or broadcast.head is None:
            raise DoesNotApply("broadcasts", "the head is not veiled")
        rounds.setdefault(broadcast.round, (broadcast, broadcast.head))
    if len(rounds) < 2:
        raise DoesNotApply("broadcasts", "the attack needs two broadcasts from different rounds")
    forms, (last, head) = canonical_heads(observed, list(rounds.values())), list(rounds.values())[-1]
    if head.has_candidates:
        candidates = [head.candidates.double() for _, head in rounds.values()]
        offset = candidates[-1][pick_candidates(forms, candidates)[-1]]
    else:
        offset = fit_noise(forms)[-1].to(head.direction.device)
    return dataclasses.replace(observed, model=base_model(observed.architecture, last, offset @ group_rows(head)))


def group_rows(head: PublicHead) -> Tensor:
    """Return the direction r_a restricted to each group, with shape (m, outputs)."""
    groups = torch.arange(head.groups, device=head.partition.device)
    return (head.partition == groups[:, None]) * head.direction.double()


def leverage(base: nn.Module, head: PublicHead, inputs: Tensor) -> Tensor:
    """Return alpha for each record: the change in the head's outputs if 1 is added to all of its perturbed values."""
    names = {head.weight: 1.0} | ({head.bias: float(head.noisy_bias)} if head.bias else {})
    values = {name: torch.full_like(base.get_parameter(name), value) for name, value in names.items()}
    return predict(copy_with_values(base, values), inputs)[:, :1].double()


def minimise(value: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Minimise a smooth function with L-BFGS, starting at `start`."""
    free = start.clone().requires_grad_()
    search = torch.optim.LBFGS([free], max_iter=LBFGS_STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        search.zero_grad()
        result = value(free)
        result.backward()  # type: ignore[no-untyped-call]
        return result

    search.step(closure)  # type: ignore[no-untyped-call]
    return free.detach()


def fit_offset(outputs: Tensor, alpha: Tensor, rows: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    """Find the m numbers c that minimise the loss of outputs - alpha (c rows).

    `rows` has shape (m, outputs), see `group_rows`. The solver is least squares for squared error, and L-BFGS starting
    at c = 0 for any other loss. If the loss is convex, so is the problem.
    """
    energy = (rows**2).sum(1) * float((alpha**2).sum())
    if isinstance(loss, SquaredError):
        return (((outputs - targets) * alpha).sum(0) @ rows.T) / energy
    unit = 1 / (energy / len(outputs)).sqrt()
    result = minimise(
        lambda free: loss.values(outputs - alpha * ((free * unit) @ rows), targets).mean(), torch.zeros_like(unit)
    )
    return result * unit


def calibrate(observed: Observation, broadcast: Broadcast) -> nn.Module:
    """Return the broadcast model without the noise of its head; the noise is fitted to the attacker's labels."""
    base, head = base_model(observed.architecture, broadcast), broadcast.head
    if head is None:
        return base
    if head.has_candidates:  # return the candidate that fits the labels best
        models = candidate_models(observed, broadcast)
        losses = [
            loss_values(observed.loss, predict(model, observed.inputs), observed.targets).mean() for model in models
        ]
        return models[losses.index(min(losses))]
    outputs, rows = predict(base, observed.inputs).double(), group_rows(head)
    flat = outputs.reshape(len(outputs), -1)
    targets = observed.loss.dense(observed.targets, outputs).double().reshape(flat.shape)
    offset = fit_offset(flat, leverage(base, head, observed.inputs), rows, targets, observed.loss)
    return base_model(observed.architecture, broadcast, offset @ rows)


def candidate_models(observed: Observation, broadcast: Broadcast) -> list[nn.Module]:
    """For each candidate for the noise of the head, return the broadcast model with that noise subtracted."""
    noises = broadcast.head.noise(broadcast.head.direction) if broadcast.head else ()
    return [base_model(observed.architecture, broadcast, noise) for noise in noises]


class CanonicalHead(NamedTuple):
    """The head of one round in canonical form, with units in the same order as in the last round."""

    values: Tensor  # all elements of the head
    noise: Tensor  # (m, elements): the change in the elements caused by noise of size 1 in each group


def head_noise(plan: Plan, architecture: nn.Module, head: PublicHead) -> Tensor:
    """Return the change in the flat vector of all tensors caused by noise of size 1 in each group."""
    result = []
    for row in group_rows(head):
        model = copy.deepcopy(architecture).double()  # all values are zero
        move_head(model, head, row)
        result.append(flat_values(plan, model))
    return torch.stack(result)


def canonical_heads(observed: Observation, rounds: Sequence[VeiledHead]) -> list[CanonicalHead]:
    """Return the heads of all rounds in canonical form, with units in the same order as in the last round."""
    plan = analyse_architecture(observed)
    names = {name for _, head in rounds for name in (head.weight, head.bias) if name}
    flats = [flatten({**broadcast.parameters, **broadcast.buffers}, plan.layout.entries) for broadcast, _ in rounds]
    forms = [canonical_form(plan, flat, exclude=names) for flat in flats]
    inside = torch.cat([torch.arange(e.start, e.stop) for e in plan.layout.entries if e.name in names])
    result = []
    for (_, head), form in zip(rounds, forms, strict=True):
        elements = sources(plan, form.flat, forms[-1].flat, exclude=names)[inside.to(form.flat.device)]
        noise = head_noise(plan, observed.architecture, head) * form.factors
        result.append(CanonicalHead(form.flat[elements], noise[:, elements]))
    return result


def fit_noise(heads: Sequence[CanonicalHead]) -> Tensor:
    """Fit the size of each group's noise in each round so that the heads without noise change as little as possible.

    The result has shape (rounds, m). The objective is the sum of the squared changes of the head's elements between
    consecutive rounds, each divided by that element's mean squared change. The noise and the mean squared changes are
    estimated alternately (iteratively reweighted least squares). A normal prior, under which the noise is about as
    large as the head, determines what the data do not, since noise that is the same in all rounds is invisible.
    """
    rounds, groups = len(heads), len(heads[0].noise)
    design = torch.zeros(rounds - 1, len(heads[0].values), rounds, groups, dtype=torch.float64)
    for number, (now, later) in enumerate(itertools.pairwise(heads)):
        design[number, :, number], design[number, :, number + 1] = now.noise.T.cpu(), -later.noise.T.cpu()
    design = design.flatten(2)
    change = torch.stack([now.values - later.values for now, later in itertools.pairwise(heads)]).cpu()
    size = torch.stack([head.values.norm() / head.noise.norm(dim=1).clamp_min(TINY) for head in heads]).flatten().cpu()
    prior, nothing = torch.diag(1 / size.clamp_min(TINY)), torch.zeros(len(size), dtype=torch.float64)
    spread, result = torch.ones(change.shape[1], dtype=torch.float64) * change.square().mean(), nothing
    for _ in range(TURNS):
        weight = spread.clamp_min(TINY).rsqrt()
        left = torch.cat([(design * weight[:, None]).flatten(0, 1), prior])
        right = torch.cat([(change * weight).flatten(), nothing])
        result = torch.linalg.lstsq(left, right[:, None], driver="gelsd").solution[:, 0]
        spread = (change - design @ result).square().mean(0)
        spread = spread + SMOOTHING * spread.mean()
    return result.reshape(rounds, groups)


def pick_candidates(heads: Sequence[CanonicalHead], candidates: Sequence[Tensor]) -> list[int]:
    """Return the most likely candidate's index in each round: the path along which the heads change least (Viterbi)."""
    models = [head.values - offsets @ head.noise for head, offsets in zip(heads, candidates, strict=True)]
    cost, slopes = torch.zeros(len(models[0]), dtype=torch.float64, device=models[0].device), list[Tensor]()
    for now, later in itertools.pairwise(models):
        best = (cost[:, None] + torch.cdist(now, later, p=1)).min(0)
        cost, slopes = best.values, [*slopes, best.indices]
    path = [int(cost.argmin())]
    for step in reversed(slopes):
        path.insert(0, int(step[path[0]]))
    return path
