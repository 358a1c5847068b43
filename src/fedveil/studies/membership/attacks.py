"""All membership attacks on the records of a federation, and their figures on the records of the test."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fedveil.attacks import Observation
from fedveil.attacks.features import dense_targets, ends_in_linear, labels, losses
from fedveil.attacks.membership import Shadows, calibrated_scores, loss_scores, shadow_scores
from fedveil.attacks.scores import Scores, auc, balanced_accuracy, best_threshold, has_enough, roc, tpr_at
from fedveil.attacks.whitebox import Features, Recipe, Score, select, train_attack
from fedveil.runs.config import Config
from fedveil.studies.membership.records import Records, read_shadows
from fedveil.studies.membership.results import AttackNetwork, AttackScores

RATES = (0.01, 0.001)


@dataclass(frozen=True)
class ShadowAttacks:
    """Attacks by federations that the attacker trained.

    Attributes:
        config: of the attacked federation.
        folder: of the outputs of the shadows.
        count: number of shadows.
        lira: whether LiRA is run besides RMIA.
    """

    config: Config
    folder: Path
    count: int
    lira: bool

    def scores(self, observed: Observation, outputs: Tensor, records: Records, cleaned: bool) -> dict[str, Scores]:
        """Score all records by RMIA and LiRA; empty without shadows or classes.

        `cleaned`: the attacker has removed noise from the model that it received.
        """
        targets = records.pool.targets
        if not self.count or targets.dim() != 1:
            return {}
        truth = dense_targets(observed.loss, targets, outputs).double().numpy()
        shadows = Shadows(*read_shadows(self.config, self.count, self.folder, cleaned), truth, observed.loss)
        return shadow_scores(outputs.double().numpy(), shadows, records.known, both=self.lira)


def extra_features(observed: Observation, records: Records) -> tuple[str, ...]:
    """Return the features of the full network besides layers; a gradient needs a model that ends in nn.Linear."""
    gradient = ("gradient",) if ends_in_linear(observed.model, records.pool.tensor) else ()
    return ("label", "loss", *gradient)


def loss_attacks(observed: Observation, outputs: Tensor, records: Records) -> dict[str, Scores]:
    """Score all records by their loss, as it is and calibrated by class."""
    found = losses(observed.loss, outputs, records.pool.targets)
    scores = {"loss": loss_scores(found)}
    if records.pool.targets.dim() == 1:
        classes, known = labels(records.pool.targets), torch.from_numpy(records.known)
        scores["loss by class"] = calibrated_scores(found, classes, found[known], classes[known])
    return {name: values.numpy() for name, values in scores.items()}


def whitebox(
    features: Features, names: Sequence[str], records: Records, recipe: Recipe, *, watched: bool = False
) -> tuple[AttackScores, float]:
    """Train the network on known records; return its figures on the test, and its AUC on held-out known records.

    If `watched`, the figures include the paper's best epoch on the test itself.
    """
    seen = {name: features[name] for name in names}
    own, known, victims, fresh = (select(seen, torch.from_numpy(part)) for part in records.parts)
    curve: list[float] = []

    def watch(number: int, score: Score) -> None:
        if watched:
            curve.append(balanced_accuracy(score(victims), score(fresh), 0.5).value)

    done = train_attack(own, known, recipe=recipe, on_epoch=watch)
    held = [part.numpy() for part in done.held_out]
    chosen = asdict(done.epochs[done.chosen])
    network = AttackNetwork(**chosen, epoch=done.chosen + 1, last=done.epochs[-1], collapsed=done.collapsed)
    found = measure(done.score(victims).numpy(), done.score(fresh).numpy(), best_threshold(*held))
    return replace(found, best_on_test=max(curve, default=None), network=network), auc(*held).value


def score_figures(scores: Scores, records: Records) -> AttackScores:
    """Return the figures of the test at the threshold that is best on the records that the attacker knows."""
    threshold = best_threshold(scores[records.own], scores[records.known])
    return measure(scores[records.victims], scores[records.fresh], threshold)


def measure(members: Scores, others: Scores, threshold: float) -> AttackScores:
    """Return all figures of a test with 95 % intervals; a rate needs enough records."""
    rates = {str(rate): tpr_at(members, others, rate) if has_enough(len(others), rate) else None for rate in RATES}
    accuracy = balanced_accuracy(members, others, threshold)
    return AttackScores(accuracy, auc(members, others), rates, roc=roc(members, others))
