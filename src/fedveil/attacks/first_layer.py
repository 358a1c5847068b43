"""Compute a record from the gradient of a network's first Linear layer, without a search.

For one record x the gradient of row i of the first layer is delta_i (x, 1): every row is a multiple of the record, and
the bias holds the factor. With plain SGD, the difference of two broadcasts reveals that gradient. A veil scales and
permutes the rows differently in each round. But rows normalised to unit length have lost their factor, and those of
consecutive rounds are close enough to be paired (`rebuild_veiled_record`).
"""

import math
from collections.abc import Mapping

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn import functional as F

from fedveil.attacks.leaked_gradients import Leak, from_difference, from_masked_difference, sketched_layers
from fedveil.attacks.observation import DoesNotApply, Observation
from fedveil.scheme.messages import Broadcast

TINY = 1e-30
SMOOTH = 1e-3  # ridge for the covariance of few records, relative to the mean square of a coordinate
SWEEPS = 50  # of alternating least squares
SURE = 1e6  # weight of the coordinate that is always 1, in deviations


def first_linear(model: nn.Module) -> str:
    """Return the path of the first layer, which must be a Linear with a bias."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            return str(path)
        if not module._modules and any(True for _ in module.parameters()):
            break
    raise DoesNotApply("dense record", "the network does not begin with a Linear that has a bias", "use an MLP")


def layer_rows(values: Mapping[str, Tensor], path: str) -> Tensor:
    """Join the weight and bias of a layer, one row per unit, in float64."""
    return torch.cat([values[f"{path}.weight"], values[f"{path}.bias"].unsqueeze(1)], 1).detach().double()


def append_one(inputs: Tensor) -> Tensor:
    """Return records as rows with a 1 appended, as a layer with a bias sees them."""
    rows = inputs.flatten(1).double()
    return torch.cat([rows, torch.ones_like(rows[:, :1])], 1)


def record_from_gradient(leak: Leak, path: str) -> Tensor:
    """Fit the record x to G_i = b_i x."""
    gradient = layer_rows(leak.gradients, path)
    factor = gradient[:, -1:]
    return (factor * gradient[:, :-1]).sum(0) / factor.square().sum(0).clamp_min(TINY)


def record_from_agreeing_rows(leak: Leak, path: str) -> Tensor:
    """Find one record in the gradient of several: the one on which two units agree.

    Row i of the gradient is sum_k delta_ik (x_k, 1). Divided by its last element it is a mean of the records, with
    different weights for every unit, unless a single record activates the unit (ReLU is 0 for all others): then it is
    that record. So rows that agree reveal a record, without any knowledge of it. The two that agree best are used.
    """
    gradient = layer_rows(leak.gradients, path)
    size, eps = gradient[:, -1].abs(), torch.finfo(leak.gradients[f"{path}.bias"].dtype).eps
    moved = gradient[size > math.sqrt(eps) * size.max()]
    if len(moved) < 2:
        raise DoesNotApply("dense record", "fewer than two units have a gradient", "use a wider first layer")
    rows = moved[:, :-1] / moved[:, -1:]
    distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(math.inf)
    first, second = divmod(int(distances.argmin()), len(rows))
    return (rows[first] + rows[second]) / 2


def rebuild_from_difference(observed: Observation) -> Tensor:
    """Rebuild a record as published: treat the difference of two broadcasts as a gradient."""
    leak = from_difference(observed)
    path = first_linear(observed.architecture)
    found = record_from_gradient(leak, path)
    for name, layer in sketched_layers(leak.model):
        if name == f"{path}.weight":
            return layer.sketch.to(found).up(found)
    return found


def pair_rows(now: Tensor, later: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows of norm 1, and the change from each to the row of the later round with the nearest direction."""
    first, second = (F.normalize(rows, eps=TINY) for rows in (now, later))
    pairs = linear_sum_assignment(-(first @ second.T).cpu().numpy())[1]
    return first, second[torch.from_numpy(pairs).to(second.device)] - first


def common_direction(rows: tuple[Tensor, Tensor], own: Tensor) -> Tensor:
    """Return the direction x', orthogonal to the orthonormal rows of `own`, along which all rows moved.

    D_i = -kappa_i (I - N_i N_i^T)(own part + delta_i x). Outside the span of the attacker's own inputs, the own part is
    0; orthogonal to N_i, the rest of D_i, q_i, is a multiple of the rest of x. x' is the direction that fits this
    best: the top eigenvector of sum_i |q_i|^2 n_i n_i^T + q_i q_i^T, with the rest n_i of N_i scaled to norm 1.
    """
    away, moved = (part - (part @ own.T) @ own for part in rows)
    away = F.normalize(away, eps=TINY)
    left = moved - (moved * away).sum(1, keepdim=True) * away
    found: Tensor = torch.linalg.svd(torch.cat([left.norm(dim=1, keepdim=True) * away, left]), full_matrices=False)[2]
    return found[0]


def likely_record(known: Tensor, own: Tensor, seen: Tensor) -> Tensor:
    """Return the most likely record, given only the direction of a part of it.

    The record, with a 1 appended, is sigma `known` plus anything in the span of `own`. With the attacker's records
    `seen` as a sample of a normal distribution, sigma has the density exp(-Q(sigma) / 2) |sigma|^(free - 1), where Q is
    the least squared distance from the mean and `free` the dimension of the known part.
    """
    mean = torch.cat([seen.mean(0), seen.new_ones(1)])
    spread = torch.cov(seen.T) if len(seen) > 1 else torch.zeros_like(torch.outer(seen[0], seen[0]))
    ridge = SMOOTH * float(seen.square().mean()) + TINY
    root = torch.linalg.cholesky(spread + ridge * torch.eye(len(spread), dtype=seen.dtype, device=seen.device))
    columns = torch.cat([known.unsqueeze(1), mean.unsqueeze(1), own.T], 1)
    white = torch.linalg.solve_triangular(root, columns[:-1], upper=False)
    white = torch.cat([white, SURE * columns[-1:]])
    wanted, others = white[:, :2], white[:, 2:]
    left = wanted - others @ torch.linalg.lstsq(others, wanted).solution
    a, b = float(left[:, 0] @ left[:, 0]) + TINY, float(left[:, 0] @ left[:, 1])
    free = len(known) - len(own)
    wide = math.sqrt(b * b + 4 * a * (free - 1))
    choices = [(b + sign * wide) / (2 * a) for sign in (1, -1)]
    sigma = max(choices, key=lambda v: -0.5 * (a * v * v - 2 * b * v) + (free - 1) * math.log(abs(v) + TINY))
    inside = torch.linalg.lstsq(others, (wanted[:, 1] - sigma * wanted[:, 0]).unsqueeze(1)).solution[:, 0]
    record: Tensor = sigma * known + own.T @ inside
    return record[:-1]


def rebuild_veiled_record(observed: Observation) -> Tensor:
    """Rebuild the record of the only other client of a round from two veiled broadcasts, if the server uses plain SGD.

    Outside the span of the attacker's own inputs, the record is found up to rounding; inside, where the attacker's own
    part of the step hides it, the most likely values given the attacker's records are used.
    """
    now, later = observed.consecutive()
    if not isinstance(now.broadcast, Broadcast) or not isinstance(later.broadcast, Broadcast):
        raise DoesNotApply("dense record", "these broadcasts are not veiled")
    path = first_linear(observed.architecture)
    before, after = (layer_rows(sent.parameters, path) for sent in (now.broadcast, later.broadcast))
    own = append_one(observed.own_batch(now)[0])
    if len(own) >= before.shape[1]:
        what = f"{len(own)} own records leave no direction free"
        raise DoesNotApply("dense record", what, "use a smaller own batch")
    span = torch.linalg.svd(own, full_matrices=False)[2][: int(torch.linalg.matrix_rank(own))]
    known = common_direction(pair_rows(before, after), span)
    return likely_record(known, own, observed.inputs.flatten(1).double())


def rank_one(rows: Tensor, sent: Tensor) -> Tensor:
    """Fit rows = factors v^T where `sent` is 1, by alternating least squares; return v."""
    rows = rows * sent
    v: Tensor = torch.linalg.svd(rows, full_matrices=False)[2][0]
    for _ in range(SWEEPS):
        factors = (rows @ v) / (sent @ v.square()).clamp_min(TINY)
        v = (rows.T @ factors) / (sent.T @ factors.square()).clamp_min(TINY)
        v = v / v.norm().clamp_min(TINY)
    return v


def rebuild_selected_record(observed: Observation) -> Tensor:
    """Rebuild one record from the gradients that a PPDL client selected in several rounds.

    Each round reveals some elements of a rank-one matrix, delta (x, 1)^T, with independent noise; the record is the
    same in all of them. The rows of all rounds are stacked, and a rank-one matrix is fitted to the elements that were
    sent. So noise averages out, and an element that was not selected in one row or round comes from another.
    """
    if len(observed.rounds) < 2:
        raise DoesNotApply("dense record", "it needs two broadcasts or more")
    path = first_linear(observed.architecture)
    leaks = [from_masked_difference(observed, at) for at in range(len(observed.rounds) - 1)]
    rows, sent = ([layer_rows(getattr(leak, kind), path) for leak in leaks] for kind in ("gradients", "mask"))
    v = rank_one(torch.cat(rows), torch.cat(sent))
    return v[:-1] / (v[-1] if v[-1].abs() > TINY else TINY)
