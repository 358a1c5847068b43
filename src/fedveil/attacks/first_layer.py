"""One record from the gradient of a network's first Linear layer, without any search.

For one record x the gradient of row i of the first layer is delta_i (x, 1): every row is a multiple of the record, and
the bias holds the factor. With plain SGD, the difference of two broadcasts shows that gradient. A veil scales and
permutes the rows differently in each round; but rows scaled to unit length have lost their factor, and those of
consecutive rounds are close enough to be paired (`record_under_a_veil`).
"""

import math

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn import functional as F

from fedveil.attacks.leaks import Leak, from_difference, sketched_layers
from fedveil.attacks.observed import DoesNotApply, Observed
from fedveil.scheme.messages import Broadcast

TINY = 1e-30
SMOOTH = 1e-3  # ridge for the covariance of few records, over the mean square of a coordinate
SURE = 1e6  # weight of the coordinate that is always 1, in deviations


def first_linear(model: nn.Module) -> str:
    """The path of the first layer, which must be a Linear with a bias."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            return str(path)
        if not module._modules and any(True for _ in module.parameters()):
            break
    raise DoesNotApply("dense record", "the network does not begin with a Linear with a bias", "an MLP")


def joined(model_values: dict[str, Tensor], path: str) -> Tensor:
    """Weight and bias of a layer side by side, one row per unit."""
    return torch.cat([model_values[f"{path}.weight"], model_values[f"{path}.bias"].unsqueeze(1)], 1).double()


def record_from_gradient(leak: Leak, path: str) -> Tensor:
    """The record x that fits G_i = b_i x best, over the numbers that were received (`mask`)."""
    gradient = joined({name: value.detach() for name, value in leak.gradients.items()}, path)
    kept = joined({name: m.double() for name, m in leak.mask.items()}, path) if leak.mask else torch.ones_like(gradient)
    factor = gradient[:, -1:] * kept[:, -1:]
    both = kept[:, :-1] * kept[:, -1:]
    return (factor * both * gradient[:, :-1]).sum(0) / (factor**2 * both).sum(0).clamp_min(TINY)


def record_from_agreeing_rows(leak: Leak, path: str) -> Tensor:
    """One record from the gradient of several: the one that two units show alike.

    Row i of the gradient is sum_k delta_ik (x_k, 1). Divided by its last number it is a mean of the records, with other
    weights for every unit, unless a single record moves the unit (ReLU is 0 for all others): then it is that record.
    So rows that agree show a record, and no truth is needed to tell. The two that agree best are taken.
    """
    gradient = joined({name: value.detach() for name, value in leak.gradients.items()}, path)
    size, eps = gradient[:, -1].abs(), torch.finfo(leak.gradients[f"{path}.bias"].dtype).eps
    moved = gradient[size > math.sqrt(eps) * size.max()]
    if len(moved) < 2:
        raise DoesNotApply("dense record", "fewer than two units have a gradient", "a wider first layer")
    rows = moved[:, :-1] / moved[:, -1:]
    apart = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(math.inf)
    first, second = divmod(int(apart.argmin()), len(rows))
    return (rows[first] + rows[second]) / 2


def from_plain_difference(observed: Observed) -> Tensor:
    """As published: the difference of two broadcasts is taken for a gradient."""
    leak = from_difference(observed)
    path = first_linear(observed.architecture)
    found = record_from_gradient(leak, path)
    for name, layer in sketched_layers(leak.model):
        if name == f"{path}.weight":
            return layer.sketch.to(found).up(found)
    return found


def paired_rows(now: Tensor, later: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of unit length, and the change of each to the row of the later round in the same direction."""
    first, second = (F.normalize(rows, eps=TINY) for rows in (now, later))
    pairs = linear_sum_assignment(-(first @ second.T).cpu().numpy())[1]
    return first, second[torch.from_numpy(pairs).to(second.device)] - first


def common_direction(rows: tuple[Tensor, Tensor], own: Tensor) -> Tensor:
    """The direction x', orthogonal to the orthonormal rows of `own`, along which all rows moved, but for their own one.

    D_i = -kappa_i (I - N_i N_i^T)(own part + delta_i x). Outside the span of the attacker's own inputs the own part is
    0, and orthogonal to N_i the rest of D_i, q_i, is a multiple of the rest of x. x' is the direction that fits this
    best: the top eigenvector of sum_i |q_i|^2 n_i n_i^T + q_i q_i^T, with the rest n_i of N_i at unit length.
    """
    away, moved = (part - (part @ own.T) @ own for part in rows)
    away = F.normalize(away, eps=TINY)
    left = moved - (moved * away).sum(1, keepdim=True) * away
    found: Tensor = torch.linalg.svd(torch.cat([left.norm(dim=1, keepdim=True) * away, left]), full_matrices=False)[2]
    return found[0]


def likely_record(known: Tensor, own: Tensor, seen: Tensor) -> Tensor:
    """The most likely record, given only the direction of a part of it.

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


def record_under_a_veil(observed: Observed, at: int = -2) -> Tensor:
    """The record of the only other client of a round, from two veiled broadcasts, if the server uses plain SGD.

    Outside the span of the attacker's own inputs the record is found up to rounding; inside, where the attacker's own
    part of the step covers it, the most likely values are taken, given the attacker's records.
    """
    now, later = observed.rounds[at], observed.rounds[len(observed.rounds) + at + 1]
    if not isinstance(now.broadcast, Broadcast) or not isinstance(later.broadcast, Broadcast):
        raise DoesNotApply("dense record", "these broadcasts are not veiled")
    path = first_linear(observed.architecture)
    before, after = (joined(dict(seen.broadcast.parameters), path) for seen in (now, later))
    own = with_one(observed.inputs[now.rows])
    if len(own) >= before.shape[1]:
        raise DoesNotApply("dense record", f"{len(own)} own records leave no direction free", "a smaller own batch")
    span = torch.linalg.svd(own, full_matrices=False)[2][: int(torch.linalg.matrix_rank(own))]
    known = common_direction(paired_rows(before, after), span)
    return likely_record(known, own, observed.inputs.flatten(1).double())


def with_one(inputs: Tensor) -> Tensor:
    """Records as rows with a 1 appended, as a layer with a bias sees them."""
    rows = inputs.flatten(1).double()
    return torch.cat([rows, torch.ones_like(rows[:, :1])], 1)
