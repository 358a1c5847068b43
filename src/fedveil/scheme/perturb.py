"""Mask a model (paper, Sec. 4.1, "Parameter perturbation")."""

import copy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedveil.errors import SecretReused
from fedveil.graph.plan import check_model
from fedveil.scheme.anchor import anchor
from fedveil.scheme.cover import Cover, make_cover
from fedveil.scheme.decoys import draw_candidates
from fedveil.scheme.entropy import Entropy
from fedveil.scheme.messages import Broadcast, PublicHead
from fedveil.scheme.secret import Secret, Undo
from fedveil.scheme.terms import squared_error_coefficients
from fedveil.wire import Tensors

Reals = NDArray[np.float64]


def _cover_head(secret: Secret, veiled: Tensors, cover: Cover) -> tuple[PublicHead, list[float]]:
    """Replace the scaled head by the base, in place; returns its public part, and the coefficients that undo it.

    base = V + (d o r_a) 1^T with d = -A(V): base + (offset o r_a) 1^T is the paper's head, with gamma = offset + d. The
    offset is drawn, not gamma, so that it reveals nothing about d. A bias that is large enough is one more column of V.
    """
    head, noise, entropy = secret.plan.head, secret._head, secret.entropy
    assert head is not None
    assert noise is not None
    rows, bias = veiled[head.weight].movedim(head.dim, 0), veiled[head.bias] if head.bias else None
    matrix = rows.reshape(len(rows), -1)
    V: Reals = (matrix if bias is None else torch.cat([matrix, bias.unsqueeze(1)], 1)).cpu().double().numpy()
    if bias is not None and _too_small(V):
        V, bias = V[:, :-1], None
    masked = bias is not None
    direction, partition = noise.direction.double().numpy(), noise.partition.numpy()
    d = -anchor(V, direction, partition, len(noise.offset))
    if secret.decoys:
        factors = cover.factors_of(head.weight).movedim(head.dim, 0)[0].reshape(-1).cpu().double().numpy()
        if masked and head.bias:
            factors = np.append(factors, float(cover.factors_of(head.bias)[0]))
        group_rows = (partition == np.arange(len(d))[:, None]) * direction
        d, *false = draw_candidates(secret.plan, V, factors, group_rows, d, secret.decoys, masked, entropy)
    base = torch.from_numpy(_blurred(V + (d[partition] * direction)[:, None], V, rows.dtype, entropy))
    rows.copy_(base[:, : matrix.shape[1]].reshape(rows.shape))
    if bias is not None:
        bias.copy_(base[:, -1])
    if secret.decoys:  # a random place, which stays secret, for the true offset
        place = int(entropy.words(1)[0] % np.uint64(1 + len(false)))
        offsets = np.stack([*false[:place], d, *false[place:]])
        coefficients = [float(number == place) for number in range(len(offsets))]
    else:
        offsets, coefficients = np.empty((0, len(d))), squared_error_coefficients(d, direction, partition)
    numbers = (noise.direction, noise.partition, torch.from_numpy(noise.offset), torch.from_numpy(offsets))
    r_a, groups, offset, candidates = (tensor.to(secret.plan.layout.device) for tensor in numbers)
    public = PublicHead(
        head.path, head.weight, head.bias, masked, r_a, groups, offset, candidates, head.dim, head.axis, head.tail
    )
    return public, coefficients


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
    return base + digit * entropy.fractions(V.size).reshape(V.shape)


def perturb(model: nn.Module, secret: Secret) -> Broadcast:
    """Mask a model with a secret; the broadcast is everything that the server sends.

    Paper, Eq. (7)-(9): W^(l) = R(l) o W(l) with R(l)_ij = r(l)_i / r(l-1)_j, for every parameter and buffer; and
    W^(L) = R(L) o W(L) + R_a with R_a_ij = gamma_i r_a_i for the head.

    Differs from the paper: the head is sent as a base and a public offset, which have the same information, so that no
    precision is lost to the size of gamma; the head's bias is masked too.

    Guarantees: the model is not changed; a secret is used for one broadcast (SecretReused otherwise).
    """
    plan, layout = secret.plan, secret.plan.layout
    if secret._undo is not None:
        raise SecretReused("perturb", "this secret was used for a broadcast already", "draw_secret(plan) in each round")
    inside = check_model(plan, model)
    tensors = inside.parameters | inside.buffers
    # a model that diverged overflows here; the clients' updates will show it
    with torch.no_grad(), np.errstate(all="ignore"):
        cover = make_cover(plan, secret._noise.factors, secret._noise.shifts)
        by_name = cover.veil(tensors)
        head, coefficients = _cover_head(secret, by_name, cover) if plan.head else (None, [1.0])
    counters = {name: tensors[name].clone() for name in layout.counters}
    secret._undo = Undo(cover, coefficients, {name: (value.shape, value.dtype) for name, value in counters.items()})
    buffers = {entry.name: by_name.pop(entry.name) for entry in layout.buffers}
    return Broadcast(
        secret.round,
        layout.name,
        secret.loss,
        by_name,
        buffers | counters,
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
