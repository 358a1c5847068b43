"""Attacks on the veil, which estimate the true model from the broadcasts that a client received.

`fit_own_labels` fits the noise of the head to the client's own labelled records. `remove_noise` needs no records. Since
noise is redrawn in every round, two broadcasts in canonical form (`attacks.canonical`, ignoring the head) differ only
by the noise of their heads and by one training step:

    head_t = C_t + sum_g c_tg N_tg,      C_t - C_{t+1} small

N_tg is public: r_a in the rows of group g, times the factors by which the canonical form multiplied the head's columns.
The result is a linear least-squares problem with m unknowns per round. Weights that hardly change during training have
more influence (`fit_noise`), so additional broadcasts help. With decoys, c_t is one of a few public candidates, and the
closest candidates of consecutive rounds reveal it (`pick_candidates`). See docs/threat-model.md.
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
NUM_ITERATIONS = 20  # alternations between weights and noise
SMOOTHING = 1e-2  # constant added to each weight's squared change, relative to the mean

VeiledHead = tuple[Broadcast, PublicHead]


def base_model(architecture: nn.Module, broadcast: Broadcast, noise: Tensor | None = None) -> nn.Module:
    """Return the broadcast model without the public offset of its head and, if given, without `noise`."""
    model = copy_with_values(architecture, {**broadcast.parameters, **broadcast.buffers})
    if noise is not None and broadcast.head is not None:
        move_head(model, broadcast.head, -noise.to(broadcast.head.direction.dtype))
    return model


def analyse_architecture(observation: Observation) -> Plan:
    """Return the plan of the federation's architecture, which is public."""
    return analyse(observation.architecture, observation.inputs[:2], head="exposed")


def remove_offset(observation: Observation) -> Observation:
    """Remove the public offset of the head, which the scheme sends separately for precision.

    This attack needs no data. The remaining noise is as large as the anchor's error (docs/maths.md, "Anchoring").
    """
    broadcast = observation.rounds[-1].broadcast
    if not isinstance(broadcast, Broadcast) or broadcast.head is None:
        return observation
    return dataclasses.replace(observation, model=base_model(observation.architecture, broadcast))


def fit_own_labels(observation: Observation) -> Observation:
    """Fit the noise of the head to the attacker's labels.

    The equation y = y^ - alpha r has m unknowns, which are the same for all records of a round.
    """
    broadcast = observation.rounds[-1].broadcast
    if not isinstance(broadcast, Broadcast):
        return observation
    return dataclasses.replace(observation, model=calibrate(observation, broadcast))


def remove_noise(observation: Observation, broadcasts: int = 2) -> Observation:
    """Remove the noise from the last broadcast, as far as recent broadcasts reveal it. The attack needs no data."""
    rounds = dict[str, VeiledHead]()
    for observed_round in observation.rounds[-broadcasts:]:
        broadcast = observed_round.broadcast
        if not isinstance(broadcast, Broadcast) or broadcast.head is None:
            raise DoesNotApply("broadcasts", "the head is not veiled")
        rounds.setdefault(broadcast.round, (broadcast, broadcast.head))
    if len(rounds) < 2:
        raise DoesNotApply("broadcasts", "the attack needs two broadcasts from different rounds")
    forms, (last_broadcast, head) = canonical_heads(observation, list(rounds.values())), list(rounds.values())[-1]
    if head.has_candidates:
        candidates = [head.candidates.double() for _, head in rounds.values()]
        offset = candidates[-1][pick_candidates(forms, candidates)[-1]]
    else:
        offset = fit_noise(forms)[-1].to(head.direction.device)
    return dataclasses.replace(
        observation, model=base_model(observation.architecture, last_broadcast, offset @ group_rows(head))
    )


def group_rows(head: PublicHead) -> Tensor:
    """Return the direction r_a restricted to each group, with shape (m, outputs)."""
    groups = torch.arange(head.groups, device=head.partition.device)
    return (head.partition == groups[:, None]) * head.direction.double()


def leverage(base: nn.Module, head: PublicHead, inputs: Tensor) -> Tensor:
    """Return alpha for each record: the change in the head's outputs if 1 is added to all of its perturbed values."""
    names = {head.weight: 1.0} | ({head.bias: float(head.noisy_bias)} if head.bias else {})
    values = {name: torch.full_like(base.get_parameter(name), value) for name, value in names.items()}
    return predict(copy_with_values(base, values), inputs)[:, :1].double()


def minimise(function: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Minimise a smooth function with L-BFGS, starting at `start`."""
    params = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([params], max_iter=LBFGS_STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        result = function(params)
        result.backward()  # type: ignore[no-untyped-call]
        return result

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return params.detach()


def fit_offset(outputs: Tensor, alpha: Tensor, rows: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    """Find the m numbers c that minimise the loss of outputs - alpha (c rows).

    `rows` has shape (m, outputs) (see `group_rows`). The solver is least squares for squared error, and L-BFGS starting
    at c = 0 for any other loss. If the loss is convex, so is the problem.
    """
    energy = (rows**2).sum(1) * float((alpha**2).sum())
    if isinstance(loss, SquaredError):
        return (((outputs - targets) * alpha).sum(0) @ rows.T) / energy
    unit = 1 / (energy / len(outputs)).sqrt()
    result = minimise(
        lambda params: loss.values(outputs - alpha * ((params * unit) @ rows), targets).mean(), torch.zeros_like(unit)
    )
    return result * unit


def calibrate(observation: Observation, broadcast: Broadcast) -> nn.Module:
    """Return the broadcast model without the noise of its head; the noise is fitted to the attacker's labels."""
    base, head = base_model(observation.architecture, broadcast), broadcast.head
    if head is None:
        return base
    if head.has_candidates:  # return the candidate that fits the labels best
        models = candidate_models(observation, broadcast)
        losses = [
            loss_values(observation.loss, predict(model, observation.inputs), observation.targets).mean()
            for model in models
        ]
        return models[losses.index(min(losses))]
    outputs, rows = predict(base, observation.inputs).double(), group_rows(head)
    flat = outputs.reshape(len(outputs), -1)
    targets = observation.loss.dense(observation.targets, outputs).double().reshape(flat.shape)
    offset = fit_offset(flat, leverage(base, head, observation.inputs), rows, targets, observation.loss)
    return base_model(observation.architecture, broadcast, offset @ rows)


def candidate_models(observation: Observation, broadcast: Broadcast) -> list[nn.Module]:
    """For each candidate for the noise of the head, return the broadcast model with that noise subtracted."""
    noises = broadcast.head.noise(broadcast.head.direction) if broadcast.head else ()
    return [base_model(observation.architecture, broadcast, noise) for noise in noises]


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


def canonical_heads(observation: Observation, rounds: Sequence[VeiledHead]) -> list[CanonicalHead]:
    """Return the heads of all rounds in canonical form, with units in the same order as in the last round."""
    plan = analyse_architecture(observation)
    names = {name for _, head in rounds for name in (head.weight, head.bias) if name}
    flat_tensors = [
        flatten({**broadcast.parameters, **broadcast.buffers}, plan.layout.entries) for broadcast, _ in rounds
    ]
    forms = [canonical_form(plan, flat, exclude=names) for flat in flat_tensors]
    head_elements = torch.cat(
        [torch.arange(entry.start, entry.stop) for entry in plan.layout.entries if entry.name in names]
    )
    result = []
    for (_, head), form in zip(rounds, forms, strict=True):
        elements = sources(plan, form.flat, forms[-1].flat, exclude=names)[head_elements.to(form.flat.device)]
        noise = head_noise(plan, observation.architecture, head) * form.factors
        result.append(CanonicalHead(form.flat[elements], noise[:, elements]))
    return result


def fit_noise(heads: Sequence[CanonicalHead]) -> Tensor:
    """Fit the size of each group's noise in each round so that the heads without noise change as little as possible.

    The result has shape (rounds, m). The objective is the sum of the squared changes of the head's elements between
    consecutive rounds, each divided by that element's mean squared change. The noise and the mean squared changes are
    estimated alternately (iteratively reweighted least squares). Noise that is the same in all rounds cannot be
    observed, so a normal prior, under which the noise is about as large as the head, makes the solution unique.
    """
    rounds, groups = len(heads), len(heads[0].noise)
    design = torch.zeros(rounds - 1, len(heads[0].values), rounds, groups, dtype=torch.float64)
    for index, (first, second) in enumerate(itertools.pairwise(heads)):
        design[index, :, index], design[index, :, index + 1] = first.noise.T.cpu(), -second.noise.T.cpu()
    design = design.flatten(2)
    change = torch.stack([first.values - second.values for first, second in itertools.pairwise(heads)]).cpu()
    scale = torch.stack([head.values.norm() / head.noise.norm(dim=1).clamp_min(TINY) for head in heads]).flatten().cpu()
    prior, zeros = torch.diag(1 / scale.clamp_min(TINY)), torch.zeros(len(scale), dtype=torch.float64)
    variance, result = torch.ones(change.shape[1], dtype=torch.float64) * change.square().mean(), zeros
    for _ in range(NUM_ITERATIONS):
        weight = variance.clamp_min(TINY).rsqrt()
        left = torch.cat([(design * weight[:, None]).flatten(0, 1), prior])
        right = torch.cat([(change * weight).flatten(), zeros])
        result = torch.linalg.lstsq(left, right[:, None], driver="gelsd").solution[:, 0]
        variance = (change - design @ result).square().mean(0)
        variance = variance + SMOOTHING * variance.mean()
    return result.reshape(rounds, groups)


def pick_candidates(heads: Sequence[CanonicalHead], candidates: Sequence[Tensor]) -> list[int]:
    """Return the most likely candidate's index in each round: the path along which the heads change least (Viterbi)."""
    models = [head.values - offsets @ head.noise for head, offsets in zip(heads, candidates, strict=True)]
    cost, predecessors = torch.zeros(len(models[0]), dtype=torch.float64, device=models[0].device), list[Tensor]()
    for first, second in itertools.pairwise(models):
        best = (cost[:, None] + torch.cdist(first, second, p=1)).min(0)
        cost, predecessors = best.values, [*predecessors, best.indices]
    path = [int(cost.argmin())]
    for indices in reversed(predecessors):
        path.insert(0, int(indices[path[0]]))
    return path
