"""Covering a model (paper, Sec. 4.1, "Parameter perturbation")."""

import copy

import numpy as np
import torch
from torch import nn

from fedveil.errors import BadArgument, SecretReused
from fedveil.graph.plan import check_model
from fedveil.scheme.anchor import anchor, standard_error
from fedveil.scheme.cover import make_cover
from fedveil.scheme.losses import SquaredError
from fedveil.scheme.messages import Broadcast, PublicHead, Tensors
from fedveil.scheme.nodes import chebyshev, lagrange
from fedveil.scheme.secret import How, Secret, Sent
from fedveil.scheme.terms import span, squared_error_coefficients

DRAWS_A_WIDTH = 20  # if that many draws miss the interval, it doubles: the head's columns lean to one side
MOST_DRAWS = 20 * DRAWS_A_WIDTH


def _cover_head(secret: Secret, veiled: Tensors, widened: int) -> tuple[PublicHead, How] | None:
    """Put the anchored head in place of the scaled one; its public part, and what undoes it.

    base = V + (d o r_a) 1^T with d = -A(V), and offset = gamma - d: base + (offset o r_a) 1^T is the paper's head.
    A bias is one more column of V.

    None if d lies outside of the interval that the public base implies, doubled `widened` times: then other noise must
    be drawn.
    """
    plan, noise = secret.plan, secret._head
    assert plan.head is not None
    assert noise is not None
    weight, bias = veiled[plan.head.weight], veiled[plan.head.bias] if plan.head.bias else None
    rows = weight.movedim(plan.head.dim, 0)
    matrix = rows.reshape(len(rows), -1)
    V = (matrix if bias is None else torch.cat([matrix, bias.unsqueeze(1)], 1)).cpu().double().numpy()
    direction, partition = noise.direction.double().numpy(), noise.partition.numpy()
    with np.errstate(all="ignore"):  # a model that diverged overflows here; clients' answers will show it
        d = -anchor(V, direction, partition, len(noise.gamma))
    base = torch.from_numpy(V + (d[partition] * direction)[:, None])
    if isinstance(secret.loss, SquaredError):
        nodes, how = np.empty(0), How(squared_error_coefficients(d, direction, partition))
    else:
        with np.errstate(all="ignore"):
            reach = 2.0**widened * secret.spread * standard_error(base.to(weight.dtype).double().numpy(), direction)
        if abs(d[0]) > reach:
            return None
        shift = reach * span(secret.loss, direction)
        count = secret.nodes(shift)
        place = float(d[0] / reach) if reach else 0.0
        nodes, how = reach * chebyshev(count), How(lagrange(count, place), place, shift)
    rows.copy_(base[:, : matrix.shape[1]].reshape(rows.shape))
    if bias is not None:
        bias.copy_(base[:, -1])
    device = plan.layout.device
    public = PublicHead(
        plan.head.path,
        plan.head.weight,
        plan.head.bias,
        noise.direction.to(device),
        noise.partition.to(device),
        torch.from_numpy(noise.gamma - d).to(device),
        torch.from_numpy(nodes).to(device),
        plan.head.dim,
        plan.head.axis,
        plan.head.last,
    )
    return public, how


def perturb(model: nn.Module, secret: Secret) -> Broadcast:
    """Cover a model with a secret: all that leaves the server, and nothing else.

    Paper, Eq. (7)-(9): W^(l) = R(l) o W(l) with R(l)_ij = r(l)_i / r(l-1)_j, for every parameter and buffer; and
    W^(L) = R(L) o W(L) + R_a with R_a_ij = gamma_i r_a_i for the head.

    Differs from the paper: the head is sent as a centred matrix and a public offset of the same information, so that
    no precision is lost to the size of gamma; the head's bias is hidden with it.

    Guarantees: the model is not changed; a secret covers one broadcast (SecretReused otherwise).
    """
    plan = secret.plan
    if secret._sent is not None:
        raise SecretReused("perturb", "this secret has covered a broadcast already", "draw_secret(plan) for each round")
    inside = check_model(plan, model)
    layout = plan.layout
    tensors = inside.parameters | inside.buffers
    with torch.no_grad():
        for draws in range(MOST_DRAWS):
            cover = make_cover(plan, secret._noise.factors, secret._noise.shifts)
            by_name = cover.veil(tensors)
            if plan.head is None:
                head, how = None, How([1.0])
                break
            covered = _cover_head(secret, by_name, draws // DRAWS_A_WIDTH)
            if covered:
                head, how = covered
                break
            secret.redraw()
        else:
            what = f"in {MOST_DRAWS} draws the head's offset never fell into an interval that clients could know"
            fix = "a head with more inputs or a bias, squared error, or analyse(..., head='exposed')"
            raise BadArgument("perturb", what, fix)
    secret._sent = Sent(cover, how)
    buffers = {entry.name: by_name.pop(entry.name) for entry in layout.buffers}
    return Broadcast(
        secret.round,
        layout.name,
        secret.loss,
        by_name,
        buffers | {name: tensors[name].clone() for name in layout.counters},
        tuple(entry.name for entry in layout.trainable),
        tuple(path for path, training in plan.modes if training),
        head,
    )


def client_view(model: nn.Module, broadcast: Broadcast, *, centred: bool = False) -> nn.Module:
    """The model as a client has it: a copy of `model` with the broadcast's values.

    As the paper sends it, base + offset, unless `centred`: then the head without the public offset, which any client
    can form and which predicts far better (docs/maths.md, "What a veil hides").
    """
    view = copy.deepcopy(model)
    values = dict(broadcast.parameters) | dict(broadcast.buffers)
    head = broadcast.head
    if head and not centred:
        noise = (head.offset[head.partition] * head.direction.double()).to(head.direction.dtype)
        shape = [1] * values[head.weight].dim()
        shape[head.dim] = -1
        values[head.weight] = values[head.weight] + noise.reshape(shape)
        if head.bias:
            values[head.bias] = values[head.bias] + noise
    view.load_state_dict(values, strict=False)
    return view
