"""Mask a model (paper, Sec. 4.1, "Parameter perturbation")."""

import copy
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedveil.errors import BadArgument, SecretReused
from fedveil.graph.plan import check_model
from fedveil.scheme.anchor import anchor, standard_error
from fedveil.scheme.cover import Cover, make_cover
from fedveil.scheme.decoys import draw_candidates
from fedveil.scheme.entropy import Entropy
from fedveil.scheme.messages import Broadcast, PublicHead, Tensors
from fedveil.scheme.nodes import chebyshev, lagrange
from fedveil.scheme.secret import How, Secret, Sent
from fedveil.scheme.terms import span, squared_error_coefficients

Reals = NDArray[np.float64]
DRAWS_A_WIDTH = 20  # if so many draws miss the interval, it doubles: the head's columns are biased to one side
MOST_DRAWS = 20 * DRAWS_A_WIDTH


class _Candidates(NamedTuple):
    """The offsets for which clients compute gradients, and how the server combines them."""

    offsets: Reals
    how: How


def _hidden(drawn: Reals, entropy: Entropy) -> _Candidates:
    """Move the true candidate, the first one, to a secret random place."""
    place = int(entropy.words(1)[0] % np.uint64(len(drawn)))
    offsets = np.concatenate([drawn[1 : 1 + place], drawn[:1], drawn[1 + place :]])
    return _Candidates(offsets, How([float(number == place) for number in range(len(drawn))]))


def _by_nodes(secret: Secret, base: Reals, d: float, widened: int) -> _Candidates | None:
    """Nodes of the interval that the public base implies; None if d lies outside, so the noise must be redrawn."""
    noise, count = secret._head, secret.nodes
    assert noise is not None
    assert count is not None
    direction = noise.direction.double().numpy()
    reach = 2.0**widened * secret.spread * standard_error(base, direction)
    if abs(d) > reach:
        return None
    shift = reach * span(secret.loss, direction)
    number = count(shift)
    place = float(d / reach) if reach else 0.0
    return _Candidates(reach * chebyshev(number)[:, None], How(lagrange(number, place), place, shift))


def _cover_head(secret: Secret, veiled: Tensors, cover: Cover, widened: int) -> tuple[PublicHead, How] | None:
    """Replace the scaled head by the base, in place; returns its public part, and how to undo it.

    base = V + (d o r_a) 1^T with d = -A(V): base + (offset o r_a) 1^T is the paper's head, with gamma = offset + d. The
    offset is drawn, not gamma, so that it reveals nothing about d. A bias that is large enough is one more column of V.

    None if d lies outside the interval that the public base implies, doubled `widened` times: then the noise must be
    redrawn.
    """
    plan, noise = secret.plan, secret._head
    assert plan.head is not None
    assert noise is not None
    weight, bias = veiled[plan.head.weight], veiled[plan.head.bias] if plan.head.bias else None
    rows = weight.movedim(plan.head.dim, 0)
    V = _columns(rows, bias)
    masked = bias is not None and not _too_small(V)
    if bias is not None and not masked:
        V, bias = V[:, :-1], None
    direction, partition = noise.direction.double().numpy(), noise.partition.numpy()
    d = -anchor(V, direction, partition, len(noise.offset))
    if secret.decoys:
        factors = cover.factors_of(plan.head.weight).movedim(plan.head.dim, 0)[0].reshape(-1).cpu().double().numpy()
        if masked and plan.head.bias:
            factors = np.append(factors, float(cover.factors_of(plan.head.bias)[0]))
        group_rows = (partition == np.arange(len(d))[:, None]) * direction
        drawn = draw_candidates(plan, V, factors, group_rows, d, secret.decoys, masked, secret.entropy)
        d = drawn[0]
    base = torch.from_numpy(_blurred(V + (d[partition] * direction)[:, None], V, weight.dtype, secret.entropy))
    found: _Candidates | None
    if secret.decoys:
        found = _hidden(drawn, secret.entropy)
    elif secret.nodes:
        found = _by_nodes(secret, base.to(weight.dtype).double().numpy(), float(d[0]), widened)
    else:
        how = How(squared_error_coefficients(d, direction, partition))
        found = _Candidates(np.empty((0, len(d))), how)
    if found is None:
        return None
    rows.copy_(base[:, : rows[0].numel()].reshape(rows.shape))
    if bias is not None:
        bias.copy_(base[:, -1])
    device = plan.layout.device
    public = PublicHead(
        plan.head.path,
        plan.head.weight,
        plan.head.bias,
        masked,
        noise.direction.to(device),
        noise.partition.to(device),
        torch.from_numpy(noise.offset).to(device),
        torch.from_numpy(found.offsets).to(device),
        bool(secret.decoys),
        plan.head.dim,
        plan.head.axis,
        plan.head.tail,
    )
    return public, found.how


def _too_small(V: Reals) -> bool:
    """Whether a bias, the last column, would reveal the noise rather than be hidden by it.

    A bias of zeros plus noise is the noise. A column estimates the noise as well as all others together if it is
    smaller than they are by the root of their number.
    """
    squares = (V * V).sum(0)
    columns = len(squares) - 1
    return bool(squares[-1] * columns < np.partition(squares[:-1], columns // 2)[columns // 2])


def _blurred(base: Reals, V: Reals, dtype: torch.dtype, entropy: Entropy) -> Reals:
    """The base with a random part of V's last digit added to each number.

    V is rounded to a grid. Otherwise, where base has finer digits than V, base - (d o r_a) 1^T would lie on that grid
    for the true d only.
    """
    digit = np.spacing(np.abs(V).astype(np.float32)) if dtype == torch.float32 else np.spacing(np.abs(V))
    found: Reals = base + digit * entropy.fractions(V.size).reshape(V.shape)
    return found


def _columns(rows: Tensor, bias: Tensor | None) -> Reals:
    """A head as a matrix, a bias as its last column, in float64."""
    matrix = rows.reshape(len(rows), -1)
    whole = matrix if bias is None else torch.cat([matrix, bias.unsqueeze(1)], 1)
    found: Reals = whole.cpu().double().numpy()
    return found


def perturb(model: nn.Module, secret: Secret) -> Broadcast:
    """Mask a model with a secret; the broadcast is everything that the server sends.

    Paper, Eq. (7)-(9): W^(l) = R(l) o W(l) with R(l)_ij = r(l)_i / r(l-1)_j, for every parameter and buffer; and
    W^(L) = R(L) o W(L) + R_a with R_a_ij = gamma_i r_a_i for the head.

    Differs from the paper: the head is sent as a base and a public offset, which have the same information, so that no
    precision is lost to the size of gamma; the head's bias is masked too.

    Guarantees: the model is not changed; a secret is used for one broadcast (SecretReused otherwise).
    """
    plan = secret.plan
    if secret._sent is not None:
        raise SecretReused("perturb", "this secret was used for a broadcast already", "draw_secret(plan) in each round")
    inside = check_model(plan, model)
    layout = plan.layout
    tensors = inside.parameters | inside.buffers
    # a model that diverged overflows here; the clients' updates will show it
    with torch.no_grad(), np.errstate(all="ignore"):
        for draws in range(MOST_DRAWS):
            cover = make_cover(plan, secret._noise.factors, secret._noise.shifts)
            by_name = cover.veil(tensors)
            if plan.head is None:
                head, how = None, How([1.0])
                break
            covered = _cover_head(secret, by_name, cover, draws // DRAWS_A_WIDTH)
            if covered:
                head, how = covered
                break
            secret.redraw()
        else:
            what = f"in {MOST_DRAWS} draws the head's offset never fell into the public interval of the nodes"
            fix = "decoys=2 in place of nodes"
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
    """The model as received by a client: a copy of `model` with the broadcast's values.

    The head is base + offset, as in the paper. With `centred` it is the base, without the public offset, which any
    client can compute and which predicts far better (docs/maths.md, "What a veil hides").
    """
    view = copy.deepcopy(model)
    view.load_state_dict(dict(broadcast.parameters) | dict(broadcast.buffers), strict=False)
    head = broadcast.head
    if head and not centred:
        noise = head.offset[head.partition] * head.direction.double()
        move_head(view, head, noise.to(head.direction.dtype))
    return view


def move_head(model: nn.Module, head: PublicHead, noise: Tensor) -> None:
    """Add one number per output to all weights of a model's head, and to its bias, in place."""
    weight = model.get_parameter(head.weight)
    shape = [1] * weight.dim()
    shape[head.dim] = -1
    with torch.no_grad():
        weight.add_(noise.reshape(shape))
        if head.bias and head.masked_bias:
            model.get_parameter(head.bias).add_(noise)
