"""Compute a record from the gradient of a network's first Linear layer, without a search.

For one record x, the gradient of row i of the first layer is delta_i (x, 1): every row is a multiple of the record, and
the gradient of the bias is the factor. With plain SGD, the difference between two broadcasts reveals that gradient. A
veil scales and permutes the rows differently in each round. However, normalising the rows removes the factors, and the
normalised rows of consecutive rounds are close enough to be paired (`rebuild_veiled_record`).

Updates may be filtered: incomplete, truncated, delayed or with independent noise. The record is the same in all
rounds, and a filter reveals an interval for every element of the gradient: a value, a bound on what was truncated, or a
bound on what was left out. A matrix of rank one is fitted to the intervals of all rounds, with the attacker's own
records as a prior for x (`rebuild_filtered_record`).
"""

import math
from collections.abc import Mapping

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn import functional as F

from fedveil.attacks.leaked_gradients import Leak, from_difference, from_masked_difference, sketched_layers
from fedveil.attacks.observation import DoesNotApply, Observation
from fedveil.scheme.broadcast import Broadcast

TINY = 1e-30
SMOOTH = 1e-3  # ridge added to the covariance of few records, relative to the mean square of a coordinate
SWEEPS = 50  # iterations of alternating least squares
STEPS, STILL = 1000, 1e-9  # maximum number of steps of that fit, and the relative change at which it ends
NEAR = 0.01  # elements within this fraction of the largest magnitude may be truncated
SURE = 1e6  # weight of the appended coordinate, which is known to be 1


def first_linear(model: nn.Module) -> str:
    """Return the path of the first layer, which must be a Linear with a bias."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            return str(path)
        if not module._modules and any(True for _ in module.parameters()):
            break
    raise DoesNotApply("dense record", "the first layer of the network is not a Linear with a bias", "use an MLP")


def layer_rows(values: Mapping[str, Tensor], path: str) -> Tensor:
    """Concatenate the weight and bias of a layer, with one row per unit, in float64."""
    return torch.cat([values[f"{path}.weight"], values[f"{path}.bias"].unsqueeze(1)], 1).detach().double()


def append_ones(inputs: Tensor) -> Tensor:
    """Flatten each record and append a 1, which represents the bias of the first layer."""
    rows = inputs.flatten(1).double()
    return torch.cat([rows, torch.ones_like(rows[:, :1])], 1)


def record_from_gradient(leak: Leak, path: str) -> Tensor:
    """Fit the record x to G_i = b_i x, where G_i and b_i are the gradients of unit i's weights and bias."""
    gradient = layer_rows(leak.gradients, path)
    factor = gradient[:, -1:]
    return (factor * gradient[:, :-1]).sum(0) / factor.square().sum(0).clamp_min(TINY)


def record_from_agreeing_rows(leak: Leak, path: str) -> Tensor:
    """Find one record in the gradient of a batch by searching for two units that agree.

    Row i of the gradient is sum_k delta_ik (x_k, 1). Divided by its last element, it is a weighted mean of the records,
    and the weights differ between units. If only one record activates the unit (ReLU is 0 for the others), the mean is
    that record. Two rows that agree therefore reveal a record. The function uses the two closest rows.
    """
    gradient = layer_rows(leak.gradients, path)
    size, eps = gradient[:, -1].abs(), torch.finfo(leak.gradients[f"{path}.bias"].dtype).eps
    changed = gradient[size > math.sqrt(eps) * size.max()]
    if len(changed) < 2:
        raise DoesNotApply("dense record", "fewer than two units have a gradient", "use a wider first layer")
    rows = changed[:, :-1] / changed[:, -1:]
    distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(math.inf)
    first, second = divmod(int(distances.argmin()), len(rows))
    return (rows[first] + rows[second]) / 2


def rebuild_from_difference(observed: Observation) -> Tensor:
    """Rebuild a record with the published attack, which treats the difference between two broadcasts as a gradient."""
    leak = from_difference(observed)
    path = first_linear(observed.architecture)
    result = record_from_gradient(leak, path)
    for name, layer in sketched_layers(leak.model):
        if name == f"{path}.weight":
            return layer.sketch.to(result).back_project(result)
    return result


def pair_rows(now: Tensor, later: Tensor) -> tuple[Tensor, Tensor]:
    """Normalise the rows of two rounds and pair them by direction; return the earlier rows and their changes."""
    first, second = (F.normalize(rows, eps=TINY) for rows in (now, later))
    pairs = linear_sum_assignment(-(first @ second.T).cpu().numpy())[1]
    return first, second[torch.from_numpy(pairs).to(second.device)] - first


def common_direction(rows: tuple[Tensor, Tensor], basis: Tensor) -> Tensor:
    """Return the direction x' along which all rows moved, orthogonal to the span of the attacker's inputs.

    `rows` contains the normalised rows N_i and their changes D_i; `basis` has orthonormal rows that span the inputs.
    Row i changes by D_i = -kappa_i (I - N_i N_i^T)(own_i + delta_i x), where own_i, the attacker's contribution, lies
    in the span. Let n_i be the component of N_i orthogonal to the span, scaled to norm 1, and let q_i be the component
    of D_i orthogonal to the span and to n_i. Then q_i is a multiple of the same component of x. The direction x' that
    fits best is the top eigenvector of sum_i |q_i|^2 n_i n_i^T + q_i q_i^T.
    """
    component, change = (part - (part @ basis.T) @ basis for part in rows)
    component = F.normalize(component, eps=TINY)
    residual = change - (change * component).sum(1, keepdim=True) * component
    result: Tensor = torch.linalg.svd(
        torch.cat([residual.norm(dim=1, keepdim=True) * component, residual]), full_matrices=False
    )[2]
    return result[0]


def likely_record(direction: Tensor, own_rows: Tensor, sample: Tensor) -> Tensor:
    """Return the most likely record, given only the direction of one of its components.

    The record, with a 1 appended, is sigma * `direction` plus a vector in the span of `own_rows`. If the rows of
    `sample`, the attacker's records, come from a normal distribution, sigma has the density
    exp(-Q(sigma) / 2) |sigma|^(free - 1). Here Q is the smallest squared distance from the mean, and `free` is the
    dimension of the space orthogonal to the span.
    """
    mean = torch.cat([sample.mean(0), sample.new_ones(1)])
    spread = torch.cov(sample.T) if len(sample) > 1 else torch.zeros_like(torch.outer(sample[0], sample[0]))
    ridge = SMOOTH * float(sample.square().mean()) + TINY
    factor = torch.linalg.cholesky(spread + ridge * torch.eye(len(spread), dtype=sample.dtype, device=sample.device))
    columns = torch.cat([direction.unsqueeze(1), mean.unsqueeze(1), own_rows.T], 1)
    white = torch.linalg.solve_triangular(factor, columns[:-1], upper=False)
    white = torch.cat([white, SURE * columns[-1:]])
    target, others = white[:, :2], white[:, 2:]
    residual = target - others @ torch.linalg.lstsq(others, target).solution
    a, b = float(residual[:, 0] @ residual[:, 0]) + TINY, float(residual[:, 0] @ residual[:, 1])
    free = len(direction) - len(own_rows)
    root = math.sqrt(b * b + 4 * a * (free - 1))
    choices = [(b + sign * root) / (2 * a) for sign in (1, -1)]
    sigma = max(choices, key=lambda v: -0.5 * (a * v * v - 2 * b * v) + (free - 1) * math.log(abs(v) + TINY))
    inside = torch.linalg.lstsq(others, (target[:, 1] - sigma * target[:, 0]).unsqueeze(1)).solution[:, 0]
    record: Tensor = sigma * direction + own_rows.T @ inside
    return record[:-1]


def rebuild_veiled_record(observed: Observation) -> Tensor:
    """Rebuild the record of the only other client from two veiled broadcasts, if the server uses plain SGD.

    The component orthogonal to the span of the attacker's inputs is exact up to rounding. The component in the span is
    hidden by the attacker's own contribution to the step; its most likely value, given the attacker's records, is used.
    """
    now, later = observed.consecutive()
    if not isinstance(now.broadcast, Broadcast) or not isinstance(later.broadcast, Broadcast):
        raise DoesNotApply("dense record", "these broadcasts are not veiled")
    path = first_linear(observed.architecture)
    before, after = (layer_rows(sent.parameters, path) for sent in (now.broadcast, later.broadcast))
    own_rows = append_ones(observed.own_batch(now)[0])
    if len(own_rows) >= before.shape[1]:
        what = f"the attacker's {len(own_rows)} records span all directions"
        raise DoesNotApply("dense record", what, "use a smaller batch for the attacker")
    span = torch.linalg.svd(own_rows, full_matrices=False)[2][: int(torch.linalg.matrix_rank(own_rows))]
    known = common_direction(pair_rows(before, after), span)
    return likely_record(known, own_rows, observed.inputs.flatten(1).double())


def fit_rank_one(rows: Tensor, mask: Tensor) -> Tensor:
    """Fit u v^T to the elements of `rows` where `mask` is 1, by alternating least squares; return v."""
    rows = rows * mask
    v: Tensor = torch.linalg.svd(rows, full_matrices=False)[2][0]
    for _ in range(SWEEPS):
        factors = (rows @ v) / (mask @ v.square()).clamp_min(TINY)
        v = (rows.T @ factors) / (mask.T @ factors.square()).clamp_min(TINY)
        v = v / v.norm().clamp_min(TINY)
    return v


def rebuild_selected_record(observed: Observation) -> Tensor:
    """Rebuild one record from the gradients that a PPDL client selected in several rounds.

    Each round reveals some elements of a rank-one matrix, delta (x, 1)^T, with independent noise. The record is the
    same in all rounds. The attack stacks the rows of all rounds and fits a rank-one matrix to the elements that were
    sent. The noise averages out, and elements missing from one row or round are known from another.
    """
    if len(observed.rounds) < 2:
        raise DoesNotApply("dense record", "the attack needs at least two broadcasts")
    path = first_linear(observed.architecture)
    leaks = [from_masked_difference(observed, at) for at in range(len(observed.rounds) - 1)]
    rows, sent = ([layer_rows(getattr(leak, kind), path) for leak in leaks] for kind in ("gradients", "mask"))
    v = fit_rank_one(torch.cat(rows), torch.cat(sent))
    return v[:-1] / (v[-1] if v[-1].abs() > TINY else TINY)


def stack_rows(observed: Observation) -> tuple[Tensor, Tensor]:
    """Return the gradients of the first layer in all rounds, and masks of the elements that were sent.

    Both have the shape (rounds, units, inputs + 1).
    """
    if len(observed.rounds) < 2:
        raise DoesNotApply("dense record", "the attack needs at least two broadcasts")
    path = first_linear(observed.architecture)
    leaks = [from_masked_difference(observed, at) for at in range(len(observed.rounds) - 1)]
    rows, sent = ([layer_rows(getattr(leak, kind), path) for leak in leaks] for kind in ("gradients", "mask"))
    return torch.stack(rows), torch.stack(sent) > 0


def find_cutoffs(rows: Tensor, sent: Tensor) -> Tensor:
    """Return the smallest magnitude that was sent in each round, with the shape (rounds, 1, 1)."""
    magnitudes = torch.where(sent, rows.abs(), math.inf).flatten(1).amin(1)
    return torch.where(magnitudes.isfinite(), magnitudes, 0.0)[:, None, None]


def rebuild_filtered_record(observed: Observation) -> Tensor:
    """Rebuild a record from updates whose smallest elements are missing, whose largest are truncated, or with noise."""
    rows, sent = stack_rows(observed)
    cutoff, limit = find_cutoffs(rows, sent), (1 - NEAR) * rows.abs().max()
    low = torch.where(sent, torch.where(rows <= -limit, -math.inf, rows), -cutoff)
    high = torch.where(sent, torch.where(rows >= limit, math.inf, rows), cutoff)
    return fit_record(low.flatten(0, 1), high.flatten(0, 1), observed.inputs.flatten(1).double())


def rebuild_delayed_record(observed: Observation) -> Tensor:
    """Rebuild a record from updates whose missing elements are added to the next update (top-k with memory).

    The sum over all rounds misses only what is unsent at the end, which is below the last round's smallest element.
    """
    rows, sent = stack_rows(observed)
    cutoff = torch.where(sent[-1], 0.0, find_cutoffs(rows, sent)[-1])
    total = (rows * sent).sum(0)
    low, high = ((total + side * cutoff) / len(rows) for side in (-1, 1))
    return fit_record(low, high, observed.inputs.flatten(1).double())


def fit_record(low: Tensor, high: Tensor, sample: Tensor) -> Tensor:
    """Return the most likely record x, given that rows b_i (x, 1) + noise are between `low` and `high`.

    The prior of x is the normal distribution of the attacker's records, `sample`. The search starts from the best
    matrix of rank one. In turn, it estimates the factors b_i, the variance of the noise and x, and moves each element
    to the value in its interval that is closest to b_i (x, 1). The best matrix of rank one fits noise alone with a norm
    of about sqrt(variance) (sqrt(rows) + sqrt(columns)), so the data count only as far as they exceed this.
    """
    mean, spread = sample.mean(0), torch.cov(sample.T) if len(sample) > 1 else torch.zeros_like(sample[0]).diag()
    ridge = SMOOTH * float(sample.square().mean()) + TINY
    prior = torch.linalg.inv(spread + ridge * torch.eye(len(mean)).to(spread))
    rows = torch.zeros_like(low).clamp(low, high)
    record_and_one = fit_rank_one(rows, torch.ones_like(rows))
    record_and_one = record_and_one / torch.where(record_and_one[-1].abs() > TINY, record_and_one[-1], TINY)
    free, noise_norm = rows.numel() - sum(rows.shape), sum(math.sqrt(size) for size in rows.shape) ** 2
    for _ in range(STEPS):
        factors = (rows @ record_and_one) / record_and_one.square().sum().clamp_min(TINY)
        guess = factors[:, None] * record_and_one
        rows = guess.clamp(low, high)
        noise = (rows - guess).square().sum() / max(free, 1) + TINY
        precision = (1 - noise_norm * noise / guess.square().sum().clamp_min(TINY)).clamp_min(0) / noise
        weight, pull = precision * factors.square().sum(), precision * (factors @ rows)[:-1]
        record = torch.linalg.solve(prior + weight * torch.eye(len(mean)).to(prior), prior @ mean + pull)
        change = (record - record_and_one[:-1]).abs().max()
        record_and_one = torch.cat([record, record.new_ones(1)])
        if change <= STILL * record.abs().max():
            break
    return record_and_one[:-1]
