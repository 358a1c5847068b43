"""Compute a record from the gradient of a network's first Linear layer, without a search.

For one record x, the gradient of row i of the first layer is delta_i (x, 1): every row is a multiple of the record, and
the gradient of the bias is the factor. With plain SGD, the difference between two broadcasts reveals that gradient. A
veil scales and permutes the rows differently in each round. However, normalising the rows removes the factors, and the
normalised rows of consecutive rounds are close enough to be paired (`rebuild_veiled_record`).

Updates may be filtered: incomplete, truncated, delayed or noisy. The record is the same in all
rounds, and a filter reveals an interval for every element of the gradient: a value, a bound on a truncated value, or a
bound on an omitted value. A matrix of rank one is fitted to the intervals of all rounds, with the attacker's own
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
RIDGE = 1e-3  # ridge added to the covariance of few records, relative to the mean square of a coordinate
NUM_SWEEPS = 50  # iterations of alternating least squares
MAX_STEPS, TOLERANCE = 1000, 1e-9  # maximum number of steps of `fit_record`, and the relative change at which it stops
TRUNCATION_MARGIN = 0.01  # elements within this fraction of the largest magnitude may be truncated
ONE_WEIGHT = 1e6  # weight of the appended coordinate, which is known to be 1


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
    that record. Two rows that agree therefore reveal a record. The function averages the two closest rows.
    """
    gradient = layer_rows(leak.gradients, path)
    magnitudes, eps = gradient[:, -1].abs(), torch.finfo(leak.gradients[f"{path}.bias"].dtype).eps
    active_rows = gradient[magnitudes > math.sqrt(eps) * magnitudes.max()]
    if len(active_rows) < 2:
        raise DoesNotApply("dense record", "fewer than two units have a gradient", "use a wider first layer")
    rows = active_rows[:, :-1] / active_rows[:, -1:]
    distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(math.inf)
    first, second = divmod(int(distances.argmin()), len(rows))
    return (rows[first] + rows[second]) / 2


def rebuild_from_difference(observation: Observation) -> Tensor:
    """Rebuild a record with the published attack, which treats the difference between two broadcasts as a gradient."""
    leak = from_difference(observation)
    path = first_linear(observation.architecture)
    result = record_from_gradient(leak, path)
    for name, layer in sketched_layers(leak.model):
        if name == f"{path}.weight":
            return layer.sketch.to(result).back_project(result)
    return result


def pair_rows(earlier: Tensor, later: Tensor) -> tuple[Tensor, Tensor]:
    """Normalise the rows of two rounds and pair them by direction; return the earlier rows and their changes."""
    first, second = (F.normalize(rows, eps=TINY) for rows in (earlier, later))
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
    `sample`, the attacker's records, come from a normal distribution, sigma has the density exp(-Q(sigma) / 2)
    |sigma|^(num_free - 1). Here Q is the smallest squared distance from the mean, and `num_free` is the dimension of
    the space orthogonal to the span.
    """
    mean = torch.cat([sample.mean(0), sample.new_ones(1)])
    covariance = torch.cov(sample.T) if len(sample) > 1 else torch.zeros_like(torch.outer(sample[0], sample[0]))
    ridge = RIDGE * float(sample.square().mean()) + TINY
    factor = torch.linalg.cholesky(
        covariance + ridge * torch.eye(len(covariance), dtype=sample.dtype, device=sample.device)
    )
    columns = torch.cat([direction.unsqueeze(1), mean.unsqueeze(1), own_rows.T], 1)
    whitened = torch.linalg.solve_triangular(factor, columns[:-1], upper=False)
    whitened = torch.cat([whitened, ONE_WEIGHT * columns[-1:]])
    target, others = whitened[:, :2], whitened[:, 2:]
    residual = target - others @ torch.linalg.lstsq(others, target).solution
    a, b = float(residual[:, 0] @ residual[:, 0]) + TINY, float(residual[:, 0] @ residual[:, 1])
    num_free = len(direction) - len(own_rows)
    root = math.sqrt(b * b + 4 * a * (num_free - 1))
    candidates = [(b + sign * root) / (2 * a) for sign in (1, -1)]
    sigma = max(candidates, key=lambda v: -0.5 * (a * v * v - 2 * b * v) + (num_free - 1) * math.log(abs(v) + TINY))
    coefficients = torch.linalg.lstsq(others, (target[:, 1] - sigma * target[:, 0]).unsqueeze(1)).solution[:, 0]
    record: Tensor = sigma * direction + own_rows.T @ coefficients
    return record[:-1]


def rebuild_veiled_record(observation: Observation) -> Tensor:
    """Rebuild the record of the only other client from two veiled broadcasts, if the server uses plain SGD.

    The component orthogonal to the span of the attacker's inputs is exact up to rounding. The component in the span is
    hidden by the attacker's own contribution to the step; its most likely value, given the attacker's records, is used.
    """
    first, second = observation.consecutive_rounds()
    if not isinstance(first.broadcast, Broadcast) or not isinstance(second.broadcast, Broadcast):
        raise DoesNotApply("dense record", "these broadcasts are not veiled")
    path = first_linear(observation.architecture)
    before, after = (layer_rows(broadcast.parameters, path) for broadcast in (first.broadcast, second.broadcast))
    own_rows = append_ones(observation.own_batch(first)[0])
    if len(own_rows) >= before.shape[1]:
        message = f"the attacker's {len(own_rows)} records span all directions"
        raise DoesNotApply("dense record", message, "use a smaller batch for the attacker")
    span = torch.linalg.svd(own_rows, full_matrices=False)[2][: int(torch.linalg.matrix_rank(own_rows))]
    direction = common_direction(pair_rows(before, after), span)
    return likely_record(direction, own_rows, observation.inputs.flatten(1).double())


def fit_rank_one(rows: Tensor, mask: Tensor) -> Tensor:
    """Fit u v^T to the elements of `rows` where `mask` is 1, by alternating least squares; return v."""
    rows = rows * mask
    v: Tensor = torch.linalg.svd(rows, full_matrices=False)[2][0]
    for _ in range(NUM_SWEEPS):
        factors = (rows @ v) / (mask @ v.square()).clamp_min(TINY)
        v = (rows.T @ factors) / (mask.T @ factors.square()).clamp_min(TINY)
        v = v / v.norm().clamp_min(TINY)
    return v


def rebuild_selected_record(observation: Observation) -> Tensor:
    """Rebuild one record from the gradients that a PPDL client selected in several rounds.

    Each round reveals some elements of a rank-one matrix, delta (x, 1)^T, with independent noise. The record is the
    same in all rounds. The attack stacks the rows of all rounds and fits a rank-one matrix to the elements that were
    sent. The noise averages out, and elements missing from one row or round are known from others.
    """
    if len(observation.rounds) < 2:
        raise DoesNotApply("dense record", "the attack needs at least two broadcasts")
    path = first_linear(observation.architecture)
    leaks = [from_masked_difference(observation, index) for index in range(len(observation.rounds) - 1)]
    rows, masks = ([layer_rows(getattr(leak, name), path) for leak in leaks] for name in ("gradients", "mask"))
    v = fit_rank_one(torch.cat(rows), torch.cat(masks))
    return v[:-1] / (v[-1] if v[-1].abs() > TINY else TINY)


def stack_rows(observation: Observation) -> tuple[Tensor, Tensor]:
    """Return the gradients of the first layer in all rounds, and masks of the elements that were sent.

    Both have the shape (rounds, units, inputs + 1).
    """
    if len(observation.rounds) < 2:
        raise DoesNotApply("dense record", "the attack needs at least two broadcasts")
    path = first_linear(observation.architecture)
    leaks = [from_masked_difference(observation, index) for index in range(len(observation.rounds) - 1)]
    rows, masks = ([layer_rows(getattr(leak, name), path) for leak in leaks] for name in ("gradients", "mask"))
    return torch.stack(rows), torch.stack(masks) > 0


def find_cutoffs(rows: Tensor, masks: Tensor) -> Tensor:
    """Return the smallest magnitude that was sent in each round, with the shape (rounds, 1, 1)."""
    magnitudes = torch.where(masks, rows.abs(), math.inf).flatten(1).amin(1)
    return torch.where(magnitudes.isfinite(), magnitudes, 0.0)[:, None, None]


def rebuild_filtered_record(observation: Observation) -> Tensor:
    """Rebuild a record from noisy updates whose smallest elements are missing or whose largest are truncated."""
    rows, masks = stack_rows(observation)
    cutoff, limit = find_cutoffs(rows, masks), (1 - TRUNCATION_MARGIN) * rows.abs().max()
    low = torch.where(masks, torch.where(rows <= -limit, -math.inf, rows), -cutoff)
    high = torch.where(masks, torch.where(rows >= limit, math.inf, rows), cutoff)
    return fit_record(low.flatten(0, 1), high.flatten(0, 1), observation.inputs.flatten(1).double())


def rebuild_delayed_record(observation: Observation) -> Tensor:
    """Rebuild a record from updates whose missing elements are added to the next update (top-k with memory).

    The sum over all rounds lacks only the elements that are still unsent at the end. They are smaller than the smallest
    element of the last round.
    """
    rows, masks = stack_rows(observation)
    cutoff = torch.where(masks[-1], 0.0, find_cutoffs(rows, masks)[-1])
    total = (rows * masks).sum(0)
    low, high = ((total + side * cutoff) / len(rows) for side in (-1, 1))
    return fit_record(low, high, observation.inputs.flatten(1).double())


def fit_record(low: Tensor, high: Tensor, sample: Tensor) -> Tensor:
    """Return the most likely record x, given that rows b_i (x, 1) + noise are between `low` and `high`.

    The prior of x is the normal distribution of the attacker's records, `sample`. The search starts from the best
    matrix of rank one. It alternates between estimating the factors b_i, the variance of the noise and x, and moving
    each element to the value in its interval that is closest to b_i (x, 1). The best matrix of rank one fits noise
    alone with a norm of about sqrt(variance) (sqrt(rows) + sqrt(columns)), so only the excess over this norm counts as
    data.
    """
    mean, covariance = sample.mean(0), torch.cov(sample.T) if len(sample) > 1 else torch.zeros_like(sample[0]).diag()
    ridge = RIDGE * float(sample.square().mean()) + TINY
    prior = torch.linalg.inv(covariance + ridge * torch.eye(len(mean)).to(covariance))
    rows = torch.zeros_like(low).clamp(low, high)
    record_and_one = fit_rank_one(rows, torch.ones_like(rows))
    record_and_one = record_and_one / torch.where(record_and_one[-1].abs() > TINY, record_and_one[-1], TINY)
    num_free, noise_norm = rows.numel() - sum(rows.shape), sum(math.sqrt(size) for size in rows.shape) ** 2
    for _ in range(MAX_STEPS):
        factors = (rows @ record_and_one) / record_and_one.square().sum().clamp_min(TINY)
        estimate = factors[:, None] * record_and_one
        rows = estimate.clamp(low, high)
        noise = (rows - estimate).square().sum() / max(num_free, 1) + TINY
        precision = (1 - noise_norm * noise / estimate.square().sum().clamp_min(TINY)).clamp_min(0) / noise
        weight, data_term = precision * factors.square().sum(), precision * (factors @ rows)[:-1]
        record = torch.linalg.solve(prior + weight * torch.eye(len(mean)).to(prior), prior @ mean + data_term)
        change = (record - record_and_one[:-1]).abs().max()
        record_and_one = torch.cat([record, record.new_ones(1)])
        if change <= TOLERANCE * record.abs().max():
            break
    return record_and_one[:-1]
