"""Membership scores for records: the loss, LiRA and RMIA. Larger scores indicate members."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import logsumexp, ndtr
from torch import Tensor

from fedveil.attacks.scores import auc
from fedveil.errors import BadArgument
from fedveil.scheme.losses import CrossEntropy, Loss, SquaredError

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
PER_RECORD = 64  # minimum number of shadows to estimate a standard deviation for each record
FALLBACK = 0.3  # RMIA's parameter a if there are too few shadows to choose it
GRID = tuple(step / 10 for step in range(11))


def calibrated_scores(losses: Tensor, classes: Tensor, known: Tensor, known_classes: Tensor) -> Tensor:
    """Return s(x) = mean(known losses in x's class) - loss(x); a class without known losses uses the overall mean.

    `known` contains the losses of known non-members.
    """
    fallback = float(known.mean())
    means = losses.new_full((int(max(classes.max(), known_classes.max())) + 1,), fallback)
    for number in set(known_classes.tolist()):
        means[number] = known[known_classes == number].mean()
    return means[classes] - losses


@dataclass(frozen=True, eq=False)
class Shadows:
    """Models that the attacker trained like the federation's model, on records drawn from a pool."""

    outputs: Array  # (shadows, pool, classes): outputs of the model that a client of each shadow federation receives
    inside: Mask  # (shadows, pool): the records that each shadow was trained on
    targets: Array  # (pool, classes), one-hot
    loss: Loss  # the loss used to train the shadows

    def __post_init__(self) -> None:
        shadows, pool = self.inside.shape
        if self.outputs.shape != (shadows, *self.targets.shape) or len(self.targets) != pool:
            what = f"outputs have shape {self.outputs.shape} for {shadows} shadows and {pool} records"
            raise BadArgument("shadows", what, "use the shape (shadows, pool, classes)")
        if self.inside.all(0).any():
            raise BadArgument("shadows", "a record is in every shadow", "split the pool into complementary halves")

    @property
    def classes(self) -> NDArray[np.int64]:
        """The class of each record."""
        return np.asarray(self.targets.argmax(1))

    @property
    def temperature(self) -> float:
        """The divisor that turns outputs into logits.

        It is 1 for cross-entropy. Squared error is the negative logarithm of a normal density around the outputs. With
        variance v, the class posterior is softmax(outputs / v); v is estimated by the shadows' mean squared residual on
        records that they were not trained on.
        """
        if isinstance(self.loss, CrossEntropy):
            return 1.0
        if not isinstance(self.loss, SquaredError):
            what = f"{self.loss.name} does not define class probabilities"
            raise BadArgument("shadows", what, "use cross_entropy or squared_error, or an attack without shadows")
        return float(np.square(self.outputs - self.targets)[~self.inside].mean())


def shadow_scores(
    outputs: Array, shadows: Shadows, population: NDArray[np.int64], *, include_lira: bool
) -> dict[str, Array]:
    """Return the RMIA score of every record and, if `include_lira`, its LiRA scores.

    `population` contains the indices of known non-members.
    """
    temperature, classes = shadows.temperature, shadows.classes
    phi, others = confidence(outputs / temperature, classes), confidence(shadows.outputs / temperature, classes)
    target, shadow = (np.exp(-np.logaddexp(0, -odds)) for odds in (phi, others))  # probabilities
    a = choose_a(shadow, shadows.inside)
    found = {"RMIA": rmia(target, shadow, shadows.inside, population, a=a)}
    if include_lira and not shadows.inside.any(0).all():
        raise BadArgument("LiRA", "a record is not in any shadow", "split the pool into complementary halves")
    if include_lira:
        found["LiRA online"] = lira(phi, others, shadows.inside)
        found["LiRA offline"] = lira(phi, others, shadows.inside, online=False)
    return found


def confidence(logits: Array, classes: NDArray[np.int64]) -> Array:
    """Return the log-odds of the true class, phi = log p_y - log(1 - p_y), from logits (..., records, classes)."""
    index = np.broadcast_to(classes, logits.shape[:-1])[..., None]
    true = np.take_along_axis(logits, index, -1)[..., 0]
    others = logits.copy()
    np.put_along_axis(others, index, -math.inf, -1)
    return np.asarray(true - logsumexp(others, axis=-1))


def lira(phi: Array, shadow: Array, inside: Mask, *, online: bool = True) -> Array:
    """Score records by the likelihood ratio of Carlini et al. (2022), given phi for the target and for the shadows.

    Online:  log N(phi; mu_in, var_in) - log N(phi; mu_out, var_out).  Offline:  Phi((phi - mu_out) / sigma_out).
    For each record, mu is the median over shadows. With 64 or more shadows, sigma is computed for each record;
    otherwise all records share one.

    The offline score is one-sided, as in the paper; the script released with the paper uses a two-sided density.
    """
    mean_out, sigma_out = _normal(shadow, ~inside)
    far = (phi - mean_out) / sigma_out
    if not online:
        return np.asarray(ndtr(far))
    mean_in, sigma_in = _normal(shadow, inside)
    near = (phi - mean_in) / sigma_in
    return np.asarray((far**2 - near**2) / 2 + np.log(sigma_out / sigma_in))


def _normal(shadow: Array, chosen: Mask) -> tuple[Array, Array]:
    """Return each record's median and deviation over the chosen shadows; with few shadows, all share one deviation."""
    values = np.where(chosen, shadow, math.nan)
    middle: Array = np.nanmedian(values, 0)
    if len(shadow) >= PER_RECORD:
        spread = np.nanstd(values, 0)
    else:
        spread = np.full(len(middle), np.sqrt(np.nanmean(np.square(values - middle))))
    return middle, np.maximum(spread, 1e-12)


def rmia(target: Array, shadow: Array, inside: Mask, population: NDArray[np.int64], *, a: float = FALLBACK) -> Array:
    """Return the offline RMIA score (Zarifzadeh et al. 2024): the fraction of the population z with R_x > R_z.

        R_x = p_y(x) / P(x),    P(x) = ((1 + a) P_out(x) + (1 - a)) / 2

    Here P_out is the mean of p_y over the shadows that do not contain x, and gamma = 1. `target` is p_y for the
    attacked model, and `population` contains the indices of the records z.
    """
    outside = np.where(inside, math.nan, shadow)
    reference = ((1 + a) * np.nanmean(outside, 0) + (1 - a)) / 2
    ratio = target / np.maximum(reference, np.finfo(np.float64).tiny)
    order = np.sort(ratio[population])
    return np.asarray(np.searchsorted(order, ratio, "left") / len(order))


def choose_a(shadow: Array, inside: Mask) -> float:
    """Choose RMIA's a from 0, 0.1, ..., 1 as the value with the largest AUC when the first shadow is attacked.

    The attack uses all other shadows, except the complement of the first.
    """
    rest = [k for k in range(1, len(shadow)) if (inside[k] == inside[0]).any()]
    usable = ~inside[rest].all(0) if rest else np.zeros(inside.shape[1], bool)
    ins, outs = usable & inside[0], usable & ~inside[0]
    if not ins.any() or not outs.any():
        return FALLBACK
    population = np.flatnonzero(outs[usable])

    def quality(a: float) -> float:
        found = rmia(shadow[0][usable], shadow[rest][:, usable], inside[rest][:, usable], population, a=a)
        return auc(found[ins[usable]], found[outs[usable]]).value

    return max(GRID, key=quality)


def halves(records: int, shadows: int, rng: torch.Generator, size: int | None = None) -> Mask:
    """Choose the records of each shadow: complementary random halves, so that each record is in half of the shadows.

    If `size` is given (at most half of the records), both shadows of a pair contain `size` records, and some records
    are in neither. RMIA works equally well, since it only uses shadows that do not contain a record.
    """
    if shadows < 2 or shadows % 2:
        raise BadArgument("shadows", f"the number of shadows must be even, got {shadows}", "use 2, 4, 6 or more")
    half = records // 2
    first = half if size is None else min(size, half)
    second = records - first if size is None else first
    rows = []
    for _ in range(shadows // 2):
        order, pair = torch.randperm(records, generator=rng).numpy(), np.zeros((2, records), bool)
        pair[0, order[:first]] = pair[1, order[first : first + second]] = True
        rows += list(pair)
    return np.stack(rows)
