"""Perturb a model (paper, Sec. 4.1, "Parameter perturbation")."""

import copy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedveil.graph.plan import Plan, check_model
from fedveil.scheme.anchor import anchor
from fedveil.scheme.decoys import Fit, draw_candidates
from fedveil.scheme.entropy import Entropy
from fedveil.scheme.losses import Loss
from fedveil.scheme.messages import Broadcast, PublicHead
from fedveil.scheme.noise import HeadNoise, UnitNoise
from fedveil.scheme.recovery import Recovery
from fedveil.scheme.terms import squared_error_coefficients
from fedveil.scheme.transform import BufferPool, Transform
from fedveil.wire import Tensors

Reals = NDArray[np.float64]


def _perturb_head(
    plan: Plan,
    perturbed: Tensors,
    transform: Transform,
    noise: HeadNoise,
    decoys: int,
    fits: list[Fit],
    entropy: Entropy,
) -> tuple[PublicHead, list[float]]:
    """Replace the scaled head by its base, in place; return its public part and the coefficients of recovery.

    base = V + (d o r_a) 1^T with d = -A(V): base + (offset o r_a) 1^T is the paper's head, with gamma = offset + d. The
    offset is drawn, not gamma, so that it reveals nothing about d. A bias that is large enough is one more column of V.
    """
    head = plan.head
    assert head is not None
    rows, bias = perturbed[head.weight].movedim(head.dim, 0), perturbed[head.bias] if head.bias else None
    matrix = rows.reshape(len(rows), -1)
    V: Reals = (matrix if bias is None else torch.cat([matrix, bias.unsqueeze(1)], 1)).cpu().double().numpy()
    if bias is not None and _is_bias_small(V):
        V, bias = V[:, :-1], None
    direction, partition = noise.direction.double().numpy(), noise.partition.numpy()
    d, false = -anchor(V, direction, partition, len(noise.offset)), []
    if decoys:
        factors = transform.find_factors(head.weight).movedim(head.dim, 0)[0].reshape(-1).cpu().double().numpy()
        if bias is not None and head.bias:
            factors = np.append(factors, float(transform.find_factors(head.bias)[0]))
        group_rows = (partition == np.arange(len(d))[:, None]) * direction
        d, *false = draw_candidates(fits, V, factors, group_rows, d, decoys, bias is not None, entropy)
    base = torch.from_numpy(_blur(V + (d[partition] * direction)[:, None], V, rows.dtype, entropy))
    rows.copy_(base[:, : matrix.shape[1]].reshape(rows.shape))
    if bias is not None:
        bias.copy_(base[:, -1])
    if decoys:  # the true offset is at a random index, which stays secret
        index = int(entropy.words(1)[0] % np.uint64(1 + len(false)))
        offsets = np.stack([*false[:index], d, *false[index:]])
        coefficients = [float(number == index) for number in range(len(offsets))]
    else:
        offsets, coefficients = np.empty((0, len(d))), squared_error_coefficients(d, direction, partition)
    numbers = (noise.direction, noise.partition, torch.from_numpy(noise.offset), torch.from_numpy(offsets))
    r_a, groups, offset, candidates = (tensor.to(plan.layout.device) for tensor in numbers)
    has_noise = bias is not None
    public = PublicHead(
        head.path, head.weight, head.bias, has_noise, r_a, groups, offset, candidates, head.dim, head.axis, head.tail
    )
    return public, coefficients


def _is_bias_small(V: Reals) -> bool:
    """Whether a bias, the last column, would reveal the noise rather than be hidden by it.

    A bias of zeros plus noise is the noise. A column estimates the noise as well as all others together if it is
    smaller than they are by the root of their number.
    """
    squares = (V * V).sum(0)
    columns = len(squares) - 1
    return bool(squares[-1] * columns < np.partition(squares[:-1], columns // 2)[columns // 2])


def _blur(base: Reals, V: Reals, dtype: torch.dtype, entropy: Entropy) -> Reals:
    """Add a random part of V's last digit to each number of the base.

    V is rounded to a grid. Otherwise, where base has finer digits than V, base - (d o r_a) 1^T would lie on that grid
    for the true d only.
    """
    digit = np.spacing(np.abs(V).astype(np.float32)) if dtype == torch.float32 else np.spacing(np.abs(V))
    return base + digit * entropy.fractions(V.size).reshape(V.shape)


def perturb_model(
    model: nn.Module,
    plan: Plan,
    loss: Loss,
    units: UnitNoise,
    head: HeadNoise | None,
    decoys: int,
    fits: list[Fit],
    pool: BufferPool,
    entropy: Entropy,
) -> tuple[Broadcast, Recovery]:
    """Perturb a model; return everything that the server sends, and the secret that recovers the gradient.

    Paper, Eq. (7)-(9): W^(l) = R(l) o W(l) with R(l)_ij = r(l)_i / r(l-1)_j, for every parameter and buffer; and
    W^(L) = R(L) o W(L) + R_a with R_a_ij = gamma_i r_a_i for the head.

    Differs from the paper: the head is sent as a base and a public offset, which have the same information, so that no
    precision is lost to the size of gamma; the head's bias gets noise too.

    Args:
        model: not changed.
        plan: the result of `fedveil.analyse`.
        loss: what clients minimise.
        units: factors and permutation, used for this broadcast only unless noise is kept.
        head: noise of the head; None if the head is exposed.
        decoys: number of false offsets.
        fits: see `draw_candidates`.
        pool: memory for large tensors.
        entropy: source of random numbers.
    """
    layout, token = plan.layout, entropy.token()
    inside = check_model(plan, model)
    tensors = inside.parameters | inside.buffers
    # a model that diverged overflows here; the clients' updates will show it
    with torch.no_grad(), np.errstate(all="ignore"):
        transform = Transform.from_noise(plan, units)
        by_name, memory = transform.apply(tensors, pool)
        public, coefficients = None, [1.0]
        if head is not None:
            public, coefficients = _perturb_head(plan, by_name, transform, head, decoys, fits, entropy)
    counters = {name: tensors[name].clone() for name in layout.counters}
    forms = {name: (value.shape, value.dtype) for name, value in counters.items()}
    buffers = {entry.name: by_name.pop(entry.name) for entry in layout.buffers}
    broadcast = Broadcast(
        token,
        layout.name,
        loss,
        by_name,
        buffers | counters,
        tuple(entry.name for entry in layout.trainable),
        tuple(path for path, training in plan.modes if training),
        public,
    )
    return broadcast, Recovery(plan, token, transform, coefficients, bool(decoys), forms, memory)


def client_view(model: nn.Module, broadcast: Broadcast, *, centred: bool = False) -> nn.Module:
    """Return the model as a client receives it: a copy of `model` with the broadcast's values.

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
