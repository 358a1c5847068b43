"""Compute the records of a whole batch from the gradient of a network's first Linear layer, if a ReLU follows it.

The gradient of the layer's weights and bias is G = D^T (X, 1), where row k of X is record k and D_ki is the derivative
of the loss with respect to unit i's output for record k. With b records, G has rank b and its SVD gives G = L R, so
D^T = L Q and (X, 1) = Q^-1 R for an unknown matrix Q. Wherever unit i is inactive for record k, D_ki = 0. Column k of Q
is therefore a direction q for which many elements of L q are 0: q is the null vector of any b - 1 independent rows of L
that belong to units inactive for record k.

This is SPEAR (Dimitrov et al. 2024, arXiv 2403.03945) with two changes. First, units are drawn among those that are
inactive for a plausible record, which finds directions hundreds of times more often. Second, the directions are chosen
such that every record that they imply activates exactly the units for which its column of D is not 0.
"""

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedveil.attacks.first_layer import TINY, append_ones, layer_rows
from fedveil.attacks.leaked_gradients import Leak
from fedveil.attacks.observation import DoesNotApply

NUM_DRAWS = 20_000  # number of directions per attempt
MAX_ATTEMPTS = 6
POOL_SIZE = 200  # number of directions to keep according to each of two criteria
MIN_DISTANCE = 1e-3  # smallest distance of a unit vector from the span of other directions
MIN_AGREEMENT = 0.98  # minimum agreement of a recovered record
MAX_EXCHANGES = 100  # maximum number of directions to exchange


class BatchRecords(NamedTuple):
    """Records computed from a gradient, in arbitrary order."""

    inputs: Tensor  # one flattened record per row
    agreement: Tensor  # for each record, the fraction of units whose activity agrees with the gradient


class Factors(NamedTuple):
    """The gradient G = L R of the first layer, for units with a nonzero gradient, and the layer's parameters."""

    left: Tensor  # L with normalised rows, one per unit with a gradient, and one column per record
    right: Tensor  # R, with one row per record
    weights: Tensor  # weights and bias of the same units
    tolerance: float  # largest absolute value of an element of L q that counts as 0


class Directions(NamedTuple):
    """Unit vectors q, the zeros of L q, and the number of times that each vector was drawn."""

    directions: Tensor
    zeros: Tensor
    draws: Tensor


def check_relu(model: nn.Module, path: str) -> None:
    """Refuse a model without a ReLU directly after its first layer."""
    modules = [(name, module) for name, module in model.named_modules() if not module._modules]
    next_modules = [module for (name, _), (_, module) in itertools.pairwise(modules) if name == path]
    if not next_modules or not isinstance(next_modules[0], nn.ReLU):
        raise DoesNotApply("records of a batch", "no ReLU follows the first layer", "use an MLP with ReLU")


def factorise(leak: Leak, path: str, records: int) -> Factors:
    """Factorise the gradient of the first layer, which must have more units with a gradient than there are records.

    Records that are linearly dependent or that activate no unit make the rank smaller. Noise makes the rank larger;
    in that case, only the largest singular values are used.
    """
    gradient, layer = (
        layer_rows(values, path).cpu() for values in (leak.gradients, dict(leak.model.named_parameters()))
    )
    eps = torch.finfo(leak.gradients[f"{path}.bias"].dtype).eps
    norms = gradient.norm(dim=1)
    has_gradient = norms > math.sqrt(eps) * norms.max()
    gradient, layer = gradient[has_gradient], layer[has_gradient]
    _, values, right = torch.linalg.svd(gradient, full_matrices=False)
    rank = int((values > eps * max(gradient.shape) * values[:1]).sum()) if len(values) else 0
    if not 0 < records < min(gradient.shape) or not rank:
        message = f"{records} records are too many for {len(gradient)} units with a gradient"
        raise DoesNotApply("records of a batch", message, "use fewer records or a wider first layer")
    rank = min(rank, records)
    left = gradient @ right[:rank].T
    return Factors(left / left.norm(dim=1, keepdim=True), right[:rank], layer, math.sqrt(eps))


def draw_rows(inactive: Tensor, count: int, draws: int, rng: torch.Generator) -> Tensor:
    """Draw `count` units at a time, among those that are inactive for a random plausible record.

    `inactive` has one row per plausible record. Other units are used only if a record has too few inactive ones.
    """
    records = torch.randint(len(inactive), (draws,), generator=rng)
    order = torch.rand((draws, inactive.shape[1]), generator=rng) + inactive[records]
    return order.topk(count, dim=1).indices


def null_vectors(left: Tensor, rows: Tensor, rng: torch.Generator) -> Tensor:
    """Return the unit vectors that are orthogonal to the chosen rows; 0 if they are not unique."""
    width = left.shape[1]
    random_row = torch.randn((len(rows), 1, width), generator=rng, dtype=left.dtype)
    right_side = torch.zeros((len(rows), width, 1), dtype=left.dtype)
    right_side[:, -1] = 1
    result: Tensor = torch.linalg.solve_ex(torch.cat([left[rows], random_row], 1), right_side)[0][..., 0]
    result = result.nan_to_num(0.0, 0.0, 0.0)
    result /= result.norm(dim=1, keepdim=True).clamp_min(TINY)
    return result


def find_directions(factors: Factors, rows: Tensor, rng: torch.Generator) -> Directions:
    """Return the distinct directions defined by sets of rows, if they have more zeros than necessary."""
    left = factors.left
    candidates = null_vectors(left, rows, rng)
    zeros = (candidates @ left.T).abs() < factors.tolerance
    min_zeros = left.shape[1] if left.shape[1] > 1 else 0
    zeros, draws = torch.unique(zeros[zeros.sum(1) >= min_zeros], dim=0, return_counts=True)
    values, vectors = torch.linalg.eigh(torch.einsum("pu,ui,uj->pij", zeros.to(left), left, left))
    is_unique = values[:, 1:2].sqrt().flatten() > MIN_DISTANCE if left.shape[1] > 1 else draws > 0
    result = vectors[is_unique, :, 0]
    return merge_pool(Directions(result, (result @ left.T).abs() < factors.tolerance, draws[is_unique]))


def merge_pool(pool: Directions) -> Directions:
    """Merge directions with the same zeros; keep those with the most zeros, and those drawn most often."""
    zeros, group = torch.unique(pool.zeros, dim=0, return_inverse=True)
    draws = torch.zeros(len(zeros), dtype=torch.int64).scatter_add_(0, group, pool.draws)
    first = torch.full((len(zeros),), len(group)).scatter_reduce(0, group, torch.arange(len(group)), "amin")
    best = [values.argsort(descending=True, stable=True)[:POOL_SIZE] for values in (zeros.sum(1), draws)]
    indices = torch.unique(torch.cat(best))
    return Directions(pool.directions[first[indices]], zeros[indices], draws[indices])


def join_pools(pools: list[Directions]) -> Directions:
    """Merge several pools."""
    return merge_pool(Directions(*(torch.cat(parts) for parts in zip(*pools, strict=True))))


def agreements(factors: Factors, directions: Tensor) -> tuple[Tensor, Tensor]:
    """Return Q^-1 for sets of b directions, and the agreement of each implied record with the layer.

    `directions` has shape (..., b, b), with one direction per row. A record, Q^-1 R, is
    scaled such that its last element is 1. The agreement of a record is the fraction of units that are either active
    for the record and nonzero in its column of L Q, or neither.
    """
    identity = torch.eye(directions.shape[-1]).to(directions).expand(directions.shape)
    inverse = torch.linalg.solve_ex(directions.mT, identity)[0].nan_to_num(0.0, 0.0, 0.0)
    outputs = inverse @ (factors.right @ factors.weights.T) * (inverse @ factors.right[:, -1:]).sign()
    is_active = (directions @ factors.left.T).abs() >= factors.tolerance
    return inverse, ((outputs > 0) == is_active).double().mean(-1)


def choose_independent(pool: Directions, order: Tensor) -> list[int]:
    """Return the first b linearly independent directions in the given order, or fewer if there are not that many."""
    indices, basis = list[int](), pool.directions[:0]
    for index in order.tolist():
        residual = pool.directions[index] - pool.directions[index] @ basis.T @ basis
        if residual.norm() > MIN_DISTANCE:
            indices, basis = [*indices, index], torch.cat([basis, (residual / residual.norm())[None]])
        if len(indices) == pool.directions.shape[1]:
            break
    return indices


def exchange(factors: Factors, pool: Directions, indices: list[int]) -> tuple[list[int], Tensor]:
    """Exchange one direction at a time while the mean agreement increases; return the directions and agreements.

    Only directions whose records do not agree are exchanged: record k is orthogonal to all directions but q_k.
    """
    agreement = agreements(factors, pool.directions[indices])[1]
    for _ in range(MAX_EXCHANGES):
        positions = (agreement < MIN_AGREEMENT).nonzero()[:, 0]
        if not len(positions):
            break
        trials = torch.tensor(indices).repeat(len(pool.draws), len(positions), 1)
        trials[:, torch.arange(len(positions)), positions] = torch.arange(len(pool.draws))[:, None]
        trials = trials.flatten(0, 1)
        result = agreements(factors, pool.directions[trials])[1]
        best = int(result.mean(1).argmax())
        if float(result[best].mean()) <= float(agreement.mean()):
            break
        indices, agreement = trials[best].tolist(), result[best]
    return indices, agreement


def records_from_batch(leak: Leak, path: str, records: int, plausible: Tensor, rng: torch.Generator) -> BatchRecords:
    """Compute the records of a batch from the mean gradient of the first Linear layer.

    `plausible` contains inputs that resemble the records, such as other records or `fake_inputs`; the closer the
    resemblance, the larger the batches that can be reconstructed. `records` is the number of records, which a server
    knows. The sum of several clients' gradients is the gradient of one large batch. If the attack does not find a full
    set of directions, the result is empty.
    """
    check_relu(leak.model, path)
    factors = factorise(leak, path, records)
    rank = len(factors.right)
    inactive = append_ones(plausible).to(factors.weights) @ factors.weights.T <= 0
    pool, best, directions = None, torch.zeros(0), factors.left[:0]
    for _ in range(MAX_ATTEMPTS):
        rows = draw_rows(inactive, rank - 1, NUM_DRAWS, rng)
        result = find_directions(factors, rows, rng)
        pool = join_pools([pool, result]) if pool else result
        for order in (pool.zeros.sum(1), pool.draws):
            initial = choose_independent(pool, order.argsort(descending=True, stable=True))
            if len(initial) < rank:
                continue
            indices, agreement = exchange(factors, pool, initial)
            if not len(best) or agreement.mean() > best.mean():
                best, directions = agreement, pool.directions[indices]
        if len(best) and best.min() >= MIN_AGREEMENT:
            break
    if not len(best):
        return BatchRecords(factors.right[:0, :-1], best)
    inverse, agreement = agreements(factors, directions)
    rows = inverse @ factors.right
    return BatchRecords(rows[:, :-1] / rows[:, -1:], agreement)
