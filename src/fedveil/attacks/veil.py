"""Attackers of the veil: each turns what a client saw into a model that is closer to the true one.

They use only the broadcasts and, to fit the noise, the client's own labelled records (docs/threat-model.md).
"""

import copy
import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedveil.attacks.observed import Observed
from fedveil.federation.evaluate import predict
from fedveil.graph import analyse
from fedveil.graph.plan import Plan
from fedveil.scheme.losses import Loss, SquaredError
from fedveil.scheme.messages import Broadcast, PublicHead
from fedveil.scheme.outputs import values
from fedveil.scheme.perturb import move_head

STEPS = 200


def with_values(architecture: nn.Module, values: dict[str, Tensor]) -> nn.Module:
    """A network of that architecture with these values."""
    model = copy.deepcopy(architecture)
    model.load_state_dict(values, strict=False)
    return model


def base_of(architecture: nn.Module, broadcast: Broadcast) -> nn.Module:
    """The model as received, without the public offset of its head."""
    return with_values(architecture, {**broadcast.parameters, **broadcast.buffers})


def centred(observed: Observed) -> Observed:
    """Offset removed: the head without its public offset, which the scheme sends separately for precision.

    Needs no data. The remaining noise is as large as the anchor's error (docs/maths.md, "Anchoring").
    """
    sent = observed.rounds[-1].broadcast
    if not isinstance(sent, Broadcast) or sent.head is None:
        return observed
    return dataclasses.replace(observed, model=base_of(observed.architecture, sent))


def group_rows(head: PublicHead) -> Tensor:
    """(m, outputs): the direction r_a in the places of each group, else 0."""
    groups = torch.arange(head.groups, device=head.partition.device)
    return (head.partition == groups[:, None]) * head.direction.double()


def leverage(base: nn.Module, head: PublicHead, inputs: Tensor) -> Tensor:
    """For each record alpha: how much the head's outputs grow when 1 is added to all of its masked values."""
    ones = copy.deepcopy(base)
    with torch.no_grad():
        ones.get_parameter(head.weight).fill_(1.0)
        if head.bias:
            ones.get_parameter(head.bias).fill_(float(head.masked_bias))
    return predict(ones, inputs)[:, :1].double()


def minimise(value: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Where a smooth function is least, by L-BFGS from a start."""
    free = start.clone().requires_grad_()
    search = torch.optim.LBFGS([free], max_iter=STEPS, line_search_fn="strong_wolfe")

    def evaluated() -> Tensor:
        search.zero_grad()
        found = value(free)
        found.backward()  # type: ignore[no-untyped-call]
        return found

    search.step(evaluated)  # type: ignore[no-untyped-call]
    return free.detach()


def fit_offset(outputs: Tensor, alpha: Tensor, rows: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    """The m numbers c for which outputs - alpha (c rows) fit the targets best.

    `rows` is (m, n_L): r_a in the places of each group, else 0. Squared error: least squares. Any other loss: L-BFGS
    from c = 0, convex if the loss is.
    """
    energy = (rows**2).sum(1) * float((alpha**2).sum())
    if isinstance(loss, SquaredError):
        return (((outputs - targets) * alpha).sum(0) @ rows.T) / energy
    unit = 1 / (energy / len(outputs)).sqrt()
    found = minimise(
        lambda free: loss.values(outputs - alpha * ((free * unit) @ rows), targets).mean(), torch.zeros_like(unit)
    )
    return found * unit


def calibrate(observed: Observed, sent: Broadcast) -> nn.Module:
    """A round's model with the noise of its head fitted with the attacker's own labels, and subtracted."""
    base, head = base_of(observed.architecture, sent), sent.head
    if head is None:
        return base
    if head.decoys:
        return picked(observed, sent)
    outputs = predict(base, observed.inputs).double()
    flat = outputs.reshape(len(outputs), -1)
    rows = group_rows(head)
    targets = observed.loss.dense(observed.targets, outputs).double().reshape(flat.shape)
    offset = fit_offset(flat, leverage(base, head, observed.inputs), rows, targets, observed.loss)
    move_head(base, head, -(offset @ rows).to(head.direction.dtype))
    return base


def candidate_models(observed: Observed, sent: Broadcast) -> list[nn.Module]:
    """A round's model once for each candidate for the noise of its head, with that noise subtracted."""
    head = sent.head
    if head is None:
        return []
    found = [base_of(observed.architecture, sent) for _ in head.candidates]
    for model, noise in zip(found, head.noise(head.direction), strict=True):
        move_head(model, head, -noise)
    return found


def picked(observed: Observed, sent: Broadcast) -> nn.Module:
    """The candidate whose head fits the attacker's own records best."""

    def misfit(model: nn.Module) -> float:
        return float(values(observed.loss, predict(model, observed.inputs), observed.targets).mean())

    return min(candidate_models(observed, sent), key=misfit)


def calibrated(observed: Observed) -> Observed:
    """Own labels: y = y^ - alpha r has m unknowns that all records of a round share; fit them with own records."""
    sent = observed.rounds[-1].broadcast
    return dataclasses.replace(observed, model=calibrate(observed, sent)) if isinstance(sent, Broadcast) else observed


def plan_of(observed: Observed) -> Plan:
    """Which layers of this architecture can be masked, which is public."""
    return analyse(observed.architecture, observed.inputs[:2], head="exposed")
