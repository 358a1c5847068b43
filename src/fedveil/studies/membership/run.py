"""`fedveil attack membership`: does a client learn which records the others trained on?

The attacker is client 0. It knows its own records, members all of them, and half of a set of non-members; it is tested
on the other clients' records and the other half.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.attacks import Observed
from fedveil.attacks.adaptive import PUBLISHED, STRONGEST
from fedveil.attacks.features import LAYERS, dense_targets, labels, losses, record_features
from fedveil.attacks.membership import Shadows, calibrated_scores, halves, loss_scores, shadow_scores
from fedveil.attacks.scores import auc, balanced_accuracy, best_threshold, enough, roc, tpr_at
from fedveil.attacks.whitebox import Features, Recipe, Score, select, train_attack
from fedveil.errors import BadArgument
from fedveil.runs.config import Config
from fedveil.studies.attack import Experiment
from fedveil.studies.jobs import Cell, Result, Tell
from fedveil.studies.membership.page import present
from fedveil.studies.membership.records import (
    Records,
    inside_of,
    records_of,
    shadow_defence,
    shadow_file,
    train_shadow,
)
from fedveil.studies.victim import observe_all, scene_of, trained

__all__ = ["MEMBERSHIP", "Records", "Settings", "judged", "loss_attacks", "records_of", "shadow_cells"]

RATES = (0.01, 0.001)
EXTRAS = ("label", "loss", "gradient")


@dataclass(frozen=True)
class Settings:
    """The attack's own flags.

    Attributes:
        shadows: federations that the attacker trains itself, for RMIA and LiRA; 0 for none.
        lira: LiRA too; 16 shadows or more give it a chance.
        full: the white-box network with label, loss and last-layer gradient too.
        attack_epochs, attack_lr: of the white-box network.
    """

    shadows: int = 4
    lira: bool = False
    full: bool = True
    attack_epochs: int = 50
    attack_lr: float = 1e-3


def shadow_cells(config: Config, settings: Settings, defences: Sequence[str], folder: Path) -> list[Cell]:
    """All shadows of all defences."""
    if not settings.shadows:
        return []
    halves(2, settings.shadows, torch.Generator())  # refuses odd numbers before anything is trained
    kinds = dict.fromkeys(map(shadow_defence, defences))
    return [
        Cell(
            f"shadow-{kind}-{number}",
            train_shadow,
            {
                "config": dataclasses.replace(config, defence=kind),
                "number": number,
                "shadows": settings.shadows,
                "files": [shadow_file(folder, kind, number, cleaned) for cleaned in (False, True)],
            },
        )
        for kind in kinds
        for number in range(settings.shadows)
    ]


def attack(tell: Tell, config: Config, settings: Settings, folder: Path, run: Path) -> Result:
    """All attacks on one federation, by all attackers."""
    federation, data = trained(config, run, tell)
    scene = scene_of(federation, data)
    records = records_of(config, data)
    seen = observe_all(federation, config.defence, tuple(STRONGEST.values()))
    found = {
        name: {"view": "V-out", **attack_sight(tell, observed, config, settings, folder, records, name != PUBLISHED)}
        for name, observed in seen.items()
    }
    sizes = {name: len(getattr(records, name)) for name in ("own", "known", "victims", "fresh")}
    quality = {"metric": scene.metric, "train": scene.train, "test": scene.test, "gap": scene.gap}
    return {"defence": config.defence, "seed": config.seed, **quality, "records": sizes, "attackers": found}


def attack_sight(
    tell: Tell, observed: Observed, config: Config, settings: Settings, folder: Path, records: Records, cleaned: bool
) -> dict[str, Any]:
    """All attacks by one attacker; `cleaned` says that its model is no longer as it was sent."""
    extras = EXTRAS if settings.full and records.pool.targets.dim() == 1 else ()
    tell(0.0, "looking at records")
    features = record_features(observed.model, records.pool.tensor, records.pool.targets, observed.loss, extras=extras)
    attacks: dict[str, Any] = {}
    sets = feature_sets(features)
    for place, (name, names) in enumerate(sets.items()):
        tell(place / len(sets), f"attack network, {name}")
        chosen = {feature: features[feature] for feature in names}
        attacks[name] = whitebox(chosen, records, config, settings)
    for name, scores in loss_attacks(observed, features["last"], records).items():
        attacks[name] = judged(scores, records)
    try:
        files = [shadow_file(folder, config.defence, number, cleaned) for number in range(settings.shadows)]
        for name, scores in shadow_attacks(observed, features["last"], records, config, settings, files).items():
            attacks[name] = judged(scores, records)
    except (BadArgument, OSError) as error:
        attacks["RMIA"] = {"failed": str(error)}
    return {"attacks": attacks}


def feature_sets(features: Features) -> dict[str, list[str]]:
    """What each attack network sees: a layer, all three, and everything."""
    layers = [name for name in LAYERS if name in features]
    sets = {name: [name] for name in layers}
    sets["three"] = layers
    if len(features) > len(layers):
        sets["full"] = list(features)
    return sets


def whitebox(features: Features, records: Records, config: Config, settings: Settings) -> dict[str, Any]:
    """Train the network on known records, judge it on the test's; the paper's best-on-test epoch stands apart."""
    victims, fresh = (select(features, torch.from_numpy(part)) for part in (records.victims, records.fresh))
    curve: list[float] = []

    def watch(number: int, score: Score) -> None:
        curve.append(balanced_accuracy(score(victims), score(fresh), 0.5).value)

    recipe = Recipe(settings.attack_epochs, settings.attack_lr, seed=config.seed, device=config.device)
    own, known = (select(features, torch.from_numpy(part)) for part in (records.own, records.known))
    done = train_attack(own, known, recipe=recipe, on_epoch=watch)
    threshold = best_threshold(*(part.numpy() for part in done.held))
    chosen = done.epochs[done.chosen]
    return {
        **measured(done.score(victims).numpy(), done.score(fresh).numpy(), threshold),
        "best_on_test": max(curve),
        "network": {
            "epoch": done.chosen + 1,
            "train": chosen.train,
            "positive": chosen.positive,
            "validation": chosen.validation,
            "last": dataclasses.asdict(done.epochs[-1]),
            "collapsed": done.collapsed,
        },
    }


def loss_attacks(observed: Observed, outputs: Tensor, records: Records) -> dict[str, NDArray[np.float64]]:
    """Scores of all records by their loss, plain and by class."""
    found = losses(observed.loss, outputs, records.pool.targets)
    scores = {"loss": loss_scores(found)}
    if records.pool.targets.dim() == 1:
        classes, known = labels(records.pool.targets), torch.from_numpy(records.known)
        scores["loss by class"] = calibrated_scores(found, classes, found[known], classes[known])
    return {name: values.numpy() for name, values in scores.items()}


def shadow_attacks(
    observed: Observed, outputs: Tensor, records: Records, config: Config, settings: Settings, files: Sequence[Path]
) -> dict[str, NDArray[np.float64]]:
    """Scores of all records by RMIA and LiRA; none without shadows or classes."""
    if not settings.shadows or records.pool.targets.dim() != 1:
        return {}
    shadows = Shadows(
        np.stack([np.load(file) for file in files]).astype(np.float64),
        inside_of(config, len(outputs), settings.shadows),
        dense_targets(observed.loss, records.pool.targets, outputs).double().numpy(),
        observed.loss,
    )
    return shadow_scores(outputs.double().numpy(), shadows, records.known, both=settings.lira)


def judged(scores: NDArray[np.float64], records: Records) -> dict[str, Any]:
    """The test, with the threshold that is best on the records that the attacker knows."""
    threshold = best_threshold(scores[records.own], scores[records.known])
    return measured(scores[records.victims], scores[records.fresh], threshold)


def measured(members: NDArray[np.float64], others: NDArray[np.float64], threshold: float) -> dict[str, Any]:
    """All figures of a test, with 95 % intervals; no rate that too few records stand for."""
    rates = {
        str(rate): dataclasses.asdict(tpr_at(members, others, rate)) if enough(len(others), rate) else None
        for rate in RATES
    }
    return {
        "accuracy": dataclasses.asdict(balanced_accuracy(members, others, threshold)),
        "auc": dataclasses.asdict(auc(members, others)),
        "tpr": rates,
        "roc": roc(members, others),
    }


DEFAULTS: Mapping[str, Any] = {
    "data": "cifar10",
    "train_size": 4000,
    "test_size": 4000,
    "clients": 2,
    "model": "cnn",
    "width": 16,
    "epochs": 25,
}

MEMBERSHIP = Experiment(
    name="membership",
    summary="which records the other clients trained on",
    defaults=DEFAULTS,
    settings=Settings,
    trains=True,
    shared=shadow_cells,
    attack=attack,
    present=present,
)
