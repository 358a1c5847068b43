"""Membership scores for records: the loss, LiRA and RMIA. Larger scores indicate members.

LiRA and RMIA compare a number per record with the same number for shadows. The number that separates members best
depends on the loss. It is chosen from several forms by attacking the shadows themselves, without using the target.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import logsumexp
from torch import Tensor

from fedveil.attacks.scores import auc
from fedveil.errors import BadArgument
from fedveil.scheme.losses import BinaryCrossEntropy, CrossEntropy, Loss, SquaredError

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
MIN_SHADOWS = 64  # minimum number of shadows to estimate a standard deviation for each record
DEFAULT_A = 0.3  # RMIA's parameter a if there are too few shadows to choose it
A_GRID = tuple(step / 10 for step in range(11))
SCALES = (1, 2, 4, 8)  # RMIA compares exp(-scale loss / mean loss)
MAX_ATTACKED = 8  # maximum number of shadows to attack when choosing a form


def calibrated_scores(losses: Tensor, classes: Tensor, known_losses: Tensor, known_classes: Tensor) -> Tensor:
    """Return s(x) = mean(known losses in x's class) - loss(x); for a class without known losses, use the overall mean.

    `known_losses` contains the losses of known non-members.
    """
    overall_mean = float(known_losses.mean())
    means = losses.new_full((int(max(classes.max(), known_classes.max())) + 1,), overall_mean)
    for label in set(known_classes.tolist()):
        means[label] = known_losses[known_classes == label].mean()
    return means[classes] - losses


@dataclass(frozen=True, eq=False)
class Shadows:
    """Models that the attacker trained like the federation's model, on records drawn from a pool."""

    outputs: Array  # (shadows, pool, ...): outputs of the model that a client of each shadow federation receives
    membership: Mask  # (shadows, pool): the records that each shadow was trained on
    targets: Tensor  # (pool, ...), in the form that the loss expects: one-hot rows for named losses with classes
    loss: Loss  # the loss used to train the shadows

    def __post_init__(self) -> None:
        shadows, pool = self.membership.shape
        if self.outputs.shape[:2] != (shadows, pool) or len(self.targets) != pool:
            message = f"outputs have shape {self.outputs.shape} for {shadows} shadows and {len(self.targets)} records"
            raise BadArgument("shadows", message, "use the shape (shadows, pool, ...)")
        if self.membership.all(0).any():
            raise BadArgument("shadows", "a record is in every shadow", "split the pool into complementary halves")

    @property
    def classes(self) -> NDArray[np.int64] | None:
        """The class of each record; None if there are no classes, or the loss defines no probability of a class."""
        rows = self.targets
        if not isinstance(self.loss, CrossEntropy | SquaredError) or rows.dim() != 2 or rows.shape[1] < 2:
            return None
        one_hot = bool((((rows == 0) | (rows == 1)).all(1) & (rows.sum(1) == 1)).all())
        return np.asarray(rows.argmax(1).numpy()) if one_hot else None

    @property
    def temperature(self) -> float:
        """The divisor that turns outputs into logits.

        It is 1 for cross-entropy. Squared error is the negative logarithm of a normal density around the outputs. With
        variance v, the class posterior is softmax(outputs / v); v is estimated by the shadows' mean squared residual on
        records that they were not trained on.
        """
        if isinstance(self.loss, CrossEntropy):
            return 1.0
        return float(np.square(self.outputs - self.targets.numpy())[~self.membership].mean())

    def losses(self, outputs: Array) -> Array:
        """Return the loss of each record."""
        return self.loss.values(torch.from_numpy(outputs), self.targets).double().numpy()

    def signals(self, outputs: Array) -> dict[str, tuple[Array, Array]]:
        """Return named signals, one number per record, for the target (given its outputs) and for the shadows.

        "loss" is divided by its mean for records outside the shadows' training sets. If a loss has negative values, as
        Poisson's does, the smallest value of any model for the same record is subtracted first. "log-odds" refers to
        the true class, and is left out if there are no classes.
        """
        target, others = self.losses(outputs), np.stack([self.losses(output) for output in self.outputs])
        lowest = np.minimum(target, others.min(0)) if min(target.min(), others.min()) < 0 else np.zeros(len(target))
        scale = max(float((others - lowest)[~self.membership].mean()), np.finfo(np.float64).tiny)
        result = {"loss": ((target - lowest) / scale, (others - lowest) / scale)}
        if (classes := self.classes) is not None:
            t = self.temperature
            result["log-odds"] = confidence(outputs / t, classes), confidence(self.outputs / t, classes)
        return result


class ShadowScores(NamedTuple):
    """The scores of an attack, and the form of the attack that was chosen on the shadows."""

    scores: Array
    form: str


@dataclass(frozen=True, eq=False)
class Form:
    """A form of an attack: a number per record, and the function that compares the target with the shadows."""

    name: str
    target: Array
    shadow: Array
    compare: Callable[[Array, Array, Mask], Array]
    online: bool = False  # whether each record must be in at least one shadow

    def quality(self, membership: Mask, index: int) -> float:
        """Return the AUC when a shadow is attacked with the others, except its complement; NaN if too few are left."""
        others = [k for k in range(len(membership)) if k != index and (membership[k] == membership[index]).any()]
        is_usable = ~membership[others].all(0) if others else np.zeros(membership.shape[1], bool)
        is_usable &= membership[others].any(0) if self.online else True
        is_member = membership[index][is_usable]
        if not is_member.any() or is_member.all():
            return math.nan
        result = self.compare(
            self.shadow[index][is_usable], self.shadow[others][:, is_usable], membership[others][:, is_usable]
        )
        return auc(result[is_member], result[~is_member]).value


def shadow_scores(outputs: Array, shadows: Shadows, *, include_lira: bool) -> dict[str, ShadowScores]:
    """Return the RMIA score of every record and, if `include_lira`, its LiRA score, given the target's outputs."""
    result = {"RMIA": list(rmia_forms(outputs, shadows))}
    if include_lira:
        result["LiRA"] = list(lira_forms(outputs, shadows))
    best_forms = {name: choose_form(forms, shadows.membership) for name, forms in result.items()}
    return {
        name: ShadowScores(form.compare(form.target, form.shadow, shadows.membership), form.name)
        for name, form in best_forms.items()
    }


def choose_form(forms: Sequence[Form], membership: Mask) -> Form:
    """Return the form with the largest mean AUC when shadows are attacked, or the first if there are too few shadows.

    The target plays no part in the choice, so it cannot favour the attacker.
    """
    indices = range(min(len(membership), MAX_ATTACKED))
    means = [float(np.mean([form.quality(membership, index) for index in indices])) for form in forms]
    return forms[int(np.nanargmax(means))] if np.isfinite(means).any() else forms[0]


def rmia_forms(outputs: Array, shadows: Shadows) -> Iterator[Form]:
    """Yield forms of RMIA: likelihoods exp(-scale loss / mean loss), probabilities of the true class, and values of a.

    The first form is used if there are too few shadows: probabilities, exp(-loss), for cross-entropy, and exp(-loss /
    mean loss) for other losses. With squared error, most of a confident model's probabilities for the true class round
    to 1.
    """
    signals = shadows.signals(outputs)
    logs = {f"exp(-{scale} loss / mean)": [-scale * value for value in signals["loss"]] for scale in SCALES}
    if "log-odds" in signals:
        probabilities = [-np.logaddexp(0, -value) for value in signals["log-odds"]]
        is_cross_entropy = isinstance(shadows.loss, CrossEntropy)
        logs = {"probability": probabilities, **logs} if is_cross_entropy else {**logs, "probability": probabilities}
    elif isinstance(shadows.loss, BinaryCrossEntropy):
        target_losses, shadow_losses = (
            shadows.losses(outputs),
            np.stack([shadows.losses(output) for output in shadows.outputs]),
        )
        logs = {"probability": [-target_losses, -shadow_losses], **logs}
    for a in (DEFAULT_A, *A_GRID):
        for name, (target, shadow) in logs.items():
            yield Form(f"{name}, a = {a:g}", target, shadow, partial(rmia, a=a))


def lira_forms(outputs: Array, shadows: Shadows) -> Iterator[Form]:
    """Yield forms of LiRA: online (if every record is in a shadow) and offline, for log-odds and for -log(loss)."""
    eps = np.finfo(np.float64).eps
    signals = shadows.signals(outputs)
    phis = {"-log loss": [-np.log(np.maximum(value, eps)) for value in signals["loss"]]}
    if "log-odds" in signals:
        phis["log-odds"] = list(signals["log-odds"])
    if isinstance(shadows.loss, CrossEntropy):
        phis = dict(reversed(phis.items()))  # the paper's form comes first
    is_complete = bool(shadows.membership.any(0).all())
    for online in (True, False) if is_complete else (False,):
        for name, (target, shadow) in phis.items():
            variant = "online" if online else "offline"
            yield Form(f"{variant}, {name}", target, shadow, partial(lira, online=online), online)


def confidence(logits: Array, classes: NDArray[np.int64]) -> Array:
    """Return the log-odds of the true class, phi = log p_y - log(1 - p_y), from logits (..., records, classes)."""
    index = np.broadcast_to(classes, logits.shape[:-1])[..., None]
    true_logits = np.take_along_axis(logits, index, -1)[..., 0]
    others = logits.copy()
    np.put_along_axis(others, index, -math.inf, -1)
    return np.asarray(true_logits - logsumexp(others, axis=-1))


def lira(phi: Array, shadow: Array, membership: Mask, *, online: bool = True) -> Array:
    """Score records by the likelihood ratio of Carlini et al. (2022), given phi for the target and for the shadows.

    Online:  log N(phi; mu_in, var_in) - log N(phi; mu_out, var_out).  Offline:  (phi - mu_out) / sigma_out.
    For each record, mu is the median over shadows. With 64 or more shadows, sigma is computed for each record;
    otherwise all records share one sigma.

    The offline score is one-sided, as in the paper, which uses Phi of this score; the order is the same, but Phi rounds
    to 1. The script released with the paper uses a two-sided density.
    """
    mean_out, sigma_out = _normal(shadow, ~membership)
    out_score = (phi - mean_out) / sigma_out
    if not online:
        return np.asarray(out_score)
    mean_in, sigma_in = _normal(shadow, membership)
    in_score = (phi - mean_in) / sigma_in
    return np.asarray((out_score**2 - in_score**2) / 2 + np.log(sigma_out / sigma_in))


def _normal(shadow: Array, mask: Mask) -> tuple[Array, Array]:
    """Return each record's median and deviation over the masked shadows; with few shadows, use a common deviation."""
    values = np.where(mask, shadow, math.nan)
    median: Array = np.nanmedian(values, 0)
    if len(shadow) >= MIN_SHADOWS:
        deviation = np.nanstd(values, 0)
    else:
        deviation = np.full(len(median), np.sqrt(np.nanmean(np.square(values - median))))
    return median, np.maximum(deviation, 1e-12)


def rmia(target: Array, shadow: Array, membership: Mask, *, a: float = DEFAULT_A) -> Array:
    """Return the offline RMIA score (Zarifzadeh et al. 2024) from the logarithms of likelihoods p.

        log R_x = log p(x) - log P(x),    P(x) = ((1 + a) P_out(x) + (1 - a)) / 2

    Here P_out is the mean of p over the shadows that do not contain x. `target` and `shadow` are log p for the attacked
    model and for the shadows. The paper's score with gamma = 1, the fraction of a population z with R_x > R_z, is a
    step function of R_x; R_x itself has no ties, which matters at low false-positive rates.
    """
    other_likelihoods = np.where(membership, math.nan, np.exp(shadow))
    reference = ((1 + a) * np.nanmean(other_likelihoods, 0) + (1 - a)) / 2
    return np.asarray(target - np.log(np.maximum(reference, np.finfo(np.float64).tiny)))


def halves(records: int, shadows: int, rng: torch.Generator, size: int | None = None) -> Mask:
    """Choose the records of each shadow: complementary random halves, so that each record is in half of the shadows.

    If `size` is given (at most half of the records), both shadows of a pair contain `size` records, and some records
    are in neither. RMIA works equally well, since it only uses shadows that do not contain a record.
    """
    if shadows < 2 or shadows % 2:
        raise BadArgument("shadows", f"the number of shadows must be even, got {shadows}", "use 2, 4, 6 or more")
    half_size = records // 2
    first_size = half_size if size is None else min(size, half_size)
    second_size = records - first_size if size is None else first_size
    rows = []
    for _ in range(shadows // 2):
        order, pair = torch.randperm(records, generator=rng).numpy(), np.zeros((2, records), bool)
        pair[0, order[:first_size]] = pair[1, order[first_size : first_size + second_size]] = True
        rows += list(pair)
    return np.stack(rows)
