"""Run membership attacks: divide the records, train shadow federations, and score the attacks on test records."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.attacks import Observation
from fedveil.attacks.features import LAYERS, dense_targets, labels, losses, record_features
from fedveil.attacks.membership import Shadows, ShadowScores, calibrated_scores, halves, shadow_scores
from fedveil.attacks.registry import find_attackers
from fedveil.attacks.scores import Estimate, Scores, auc, balanced_accuracy, best_threshold, has_enough, roc, tpr_at
from fedveil.attacks.whitebox import Features, Recipe, Score, select, train_attack
from fedveil.data import Data, DataPart, split
from fedveil.defences import registry
from fedveil.defences.registry import find
from fedveil.errors import BadArgument
from fedveil.federation.evaluate import metrics, predict
from fedveil.federation.local import Federation
from fedveil.files import write_atomically
from fedveil.progress import Progress
from fedveil.records.shards import generator
from fedveil.runs.build import build_federation, load_data
from fedveil.runs.settings import Config
from fedveil.scheme.losses import Loss
from fedveil.studies.federations import Quality, observe, round_progress
from fedveil.studies.jobs import Failure, JobResults, Result, StudyJob

RATES = (0.01, 0.001)
GUESS = 0.5  # AUC of a constant score
NETWORK, SHADOWS = "white-box network", "RMIA"  # names of attacks
UNKNOWN_AUC = Estimate(0.5, 0.0, 1.0)  # for an attack that was not run on known records
Indices = NDArray[np.int64]
Attacks = dict[str, "AttackScores | Failure"]  # results by attack name


@dataclass(frozen=True, eq=False)
class RecordPool:
    """A pool of members and non-members, and the indices of its parts.

    Attributes:
        pool: all records.
        known_members: the attacker's own records.
        known_nonmembers: the non-members that the attacker knows.
        test_members: test records that are members: records of other clients.
        test_nonmembers: test records that are non-members, usually the same number.
    """

    pool: DataPart
    known_members: Indices
    known_nonmembers: Indices
    test_members: Indices
    test_nonmembers: Indices

    @property
    def parts(self) -> tuple[Indices, Indices, Indices, Indices]:
        """The indices of all parts."""
        return self.known_members, self.known_nonmembers, self.test_members, self.test_nonmembers


def divide_records(config: Config, data: Data, *, everyone: bool = False) -> RecordPool:
    """Divide the members and at most the same number of non-members into parts; the attacker knows half of these.

    Held-out records identical to a member are left out. If `everyone`, all non-members are used, and the attacker
    knows a fifth of them. The test is then not balanced, but has enough non-members to estimate low rates.
    """
    settings, seed = config.data, config.training.seed
    parts = split(data, settings.clients, how=settings.split, seed=seed, alpha=settings.alpha, column=settings.column)
    return divide_pool(data, parts, seed, everyone=everyone)


def divide_pool(data: Data, parts: Sequence[Tensor], seed: int, *, everyone: bool = False) -> RecordPool:
    """Divide the records as `divide_records` does; `parts` are the rows of each client in the training data."""
    count = len(data.train.targets)
    if len(parts) < 2:
        raise BadArgument("membership", "there is no other client to attack", "use --clients 2 or more")
    known_members, *other_rows = (rows.numpy() for rows in parts)  # the attacker is client 0
    members, rng = set(digests(data.train.tensor)), generator("non-members", seed)
    new_rows = [index for index, digest in enumerate(digests(data.test.tensor)) if digest not in members]
    order = torch.randperm(len(new_rows), generator=rng)[: None if everyone else count]
    nonmembers = data.test.take([new_rows[index] for index in order.tolist()])
    pool = DataPart(
        torch.cat([data.train.tensor, nonmembers.tensor]), torch.cat([data.train.targets, nonmembers.targets])
    )
    known_nonmembers, test_nonmembers = np.split(count + np.arange(len(order)), [len(order) // (5 if everyone else 2)])
    test_members = np.concatenate(other_rows)
    test_members = test_members[torch.randperm(len(test_members), generator=rng).numpy()]
    test_size = None if everyone else min(len(test_members), len(test_nonmembers))
    return RecordPool(pool, known_members, known_nonmembers, test_members[:test_size], test_nonmembers[:test_size])


def digests(inputs: Tensor) -> list[bytes]:
    """Return a digest of each record."""
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in inputs.numpy()]


def shadow_defence(defence: str) -> str:
    """Return the defence used to train shadows; a veiled federation uses "plain", which trains the same model.

    An unregistered defence is used unchanged.
    """
    if ":" not in defence and defence not in registry.names():
        return defence
    return find_attackers(find(defence)).shadows or defence


def shadow_file(folder: Path, defence: str, index: int) -> Path:
    """Return the path of the file with a shadow's training records and the outputs of its two models."""
    return folder / "shadows" / f"{shadow_defence(defence).replace(':', '.')}-{index}.npz"


@dataclass(frozen=True)
class Shadow(Result):
    """The result of training a shadow: its seed, and the metrics of its model on its training records."""

    seed: int
    inside: dict[str, float]


@dataclass(frozen=True)
class TrainShadow:
    """A task that trains a shadow on half of the pool, and writes its outputs for the whole pool.

    A shadow is a federation like the attacked one. The pool comes from `divide_records`, with the same `everyone` as
    for the attack. If `matched`, the shadow is trained on the same number of records as the attacked federation, but at
    most on half of the pool.
    """

    config: Config
    number: int
    shadows: int
    folder: Path
    everyone: bool = False
    matched: bool = False

    def __call__(self, progress: Progress, results: JobResults) -> Shadow:
        """Remove earlier outputs, train the shadow, and write its outputs."""
        config, data = self.config, load_data(self.config)
        path = shadow_file(self.folder, config.defence.name, self.number)
        path.unlink(missing_ok=True)
        pool = divide_records(config, data, everyone=self.everyone).pool
        size = len(data.train.targets) if self.matched else None
        rng = generator("shadows", config.training.seed, self.shadows)
        training_mask = halves(len(pool.targets), self.shadows, rng, size)[self.number]
        split_method = "iid" if config.data.split == "column" else config.data.split
        shadow_config = config.changed(seed=config.training.seed + 1 + self.number, split=split_method, column=None)
        federation = build_federation(
            shadow_config, Data(data.name, pool.take(training_mask), data.test, classes=data.classes)
        )
        federation.fit(
            shadow_config.training.epochs,
            on_round=round_progress(shadow_config.training.epochs, progress),
            verbose=False,
        )
        return Shadow(shadow_config.training.seed, write_shadow(federation, pool, training_mask, path))


def write_shadow(federation: Federation, pool: DataPart, training_mask: Indices, path: Path) -> dict[str, float]:
    """Write a trained shadow's outputs for the whole pool; return its metrics on its training records."""
    views = observe(federation).model, federation.model
    outputs = [predict(view, pool.tensor.to(federation.device)).cpu() for view in views]
    write_atomically(
        path, partial(np.savez, received=outputs[0].numpy(), cleaned=outputs[1].numpy(), inside=training_mask)
    )
    return metrics(outputs[1][training_mask], pool.targets[training_mask])


def shadow_jobs(
    config: Config, defences: Sequence[str], count: int, folder: Path, label: str = "", **flags: bool
) -> list[StudyJob[Result]]:
    """Return the jobs that train the shadows for all defences; refuse an odd number of shadows.

    The list is empty without shadows or other clients. `flags` are `everyone` and `matched` of `TrainShadow`.
    """
    if not count or config.data.clients < 2:
        return []
    halves(2, count, torch.Generator())
    jobs: list[StudyJob[Result]] = []
    for kind in dict.fromkeys(map(shadow_defence, defences)):
        tasks = [TrainShadow(config.changed(defence=kind), number, count, folder, **flags) for number in range(count)]
        jobs += [StudyJob(f"{label}shadow-{kind.replace(':', '.')}-{task.number}", task, Shadow) for task in tasks]
    return jobs


@dataclass(frozen=True)
class AttackScores:
    """The performance of one membership attack on the test records.

    Attributes:
        accuracy: balanced accuracy, at a threshold chosen on known records.
        auc: area under the ROC curve.
        tpr: true-positive rate by false-positive rate; None if there are too few records to estimate it.
        best_on_test: accuracy at the epoch with the best accuracy on the test records (the paper's protocol).
        roc: pairs (FPR, TPR) of the ROC curve.
        collapsed: whether a white-box network returns the same answer for all of its training records.
        known: AUC on records with known membership; for a network, only those held out from its training.
        broadcasts: number of broadcasts that were attacked.
        turned: whether the scores are reversed, because the known members had smaller scores than the known
            non-members.
        form: the form of the score of an attack with shadows, which was chosen on the shadows.
    """

    accuracy: Estimate
    auc: Estimate
    tpr: dict[str, Estimate | None]
    best_on_test: float | None = None
    roc: list[tuple[float, float]] | None = None
    collapsed: bool = False
    known: Estimate = UNKNOWN_AUC
    broadcasts: int = 1
    turned: bool = False
    form: str = ""


@dataclass(frozen=True)
class AttackerResults:
    """The results of one attacker's attacks, by name."""

    attacks: Attacks


@dataclass(frozen=True)
class Membership(Quality, Result):
    """The results of all attacks on one federation; `records` contains the size of each part of the pool."""

    defence: str
    seed: int
    records: dict[str, int]
    attackers: dict[str, AttackerResults]


@dataclass(frozen=True)
class ShadowAttacks:
    """The attacks that use shadow federations.

    Attributes:
        defence: name of the defence of the attacked federation.
        folder: folder with the outputs of the shadows.
        count: number of shadows.
        lira: whether to run LiRA as well as RMIA.
    """

    defence: str
    folder: Path
    count: int
    lira: bool

    def scores(
        self, observation: Observation, outputs: Tensor, records: RecordPool, noise_removed: bool
    ) -> dict[str, ShadowScores]:
        """Score all records with RMIA and, if requested, LiRA; return an empty dict without shadows.

        If `noise_removed`, the attacker compares its model with the models of the shadows' servers.
        """
        if not self.count:
            return {}
        targets = dense_targets(observation.loss, records.pool.targets, outputs)
        targets = targets.double() if targets.is_floating_point() else targets
        shadow_outputs, training_masks = [], []
        for index in range(self.count):
            with np.load(shadow_file(self.folder, self.defence, index)) as file:
                shadow_outputs.append(file["cleaned" if noise_removed else "received"])
                training_masks.append(file["inside"])
        shadows = Shadows(
            np.stack(shadow_outputs).astype(np.float64), np.stack(training_masks), targets, observation.loss
        )
        return shadow_scores(outputs.double().numpy(), shadows, include_lira=self.lira)


def loss_attacks(loss: Loss, outputs: Tensor, targets: Tensor, known_nonmembers: Indices) -> dict[str, Scores]:
    """Score all records by their loss and, if they have classes, relative to known non-members of the same class."""
    loss_values = losses(loss, outputs, targets)
    scores = {"loss": -loss_values}  # Yeom et al., 2018
    if targets.dim() == 1 and not targets.is_floating_point():
        classes, rows = labels(targets), torch.from_numpy(known_nonmembers)
        scores["loss by class"] = calibrated_scores(loss_values, classes, loss_values[rows], classes[rows])
    return {name: values.numpy() for name, values in scores.items()}


def run_whitebox(
    features: Features, names: Sequence[str], records: RecordPool, recipe: Recipe, *, track_test: bool = False
) -> AttackScores:
    """Train the network on known records, and return its performance on the test records.

    If `track_test`, the result includes the best accuracy of any epoch on the test records, as in the paper.
    """
    selected_features = {name: features[name] for name in names}
    known_members, known_nonmembers, test_members, test_nonmembers = (
        select(selected_features, torch.from_numpy(part)) for part in records.parts
    )
    curve: list[float] = []

    def record_epoch(epoch: int, score: Score) -> None:
        if track_test:
            curve.append(balanced_accuracy(score(test_members), score(test_nonmembers), 0.5).value)

    network = train_attack(known_members, known_nonmembers, recipe=recipe, on_epoch=record_epoch)
    member_scores, nonmember_scores = (part.numpy() for part in network.held_out)
    result = measure(
        network.score(test_members).numpy(), network.score(test_nonmembers).numpy(), member_scores, nonmember_scores
    )
    return replace(result, best_on_test=max(curve, default=None), collapsed=network.collapsed)


def measure(
    test_members: Scores, test_nonmembers: Scores, known_members: Scores, known_nonmembers: Scores, form: str = ""
) -> AttackScores:
    """Return the performance of an attack with 95 % intervals; rates are estimated only if there are enough records.

    The direction and the threshold are chosen on the known members and non-members. If the known members have smaller
    scores, all scores are reversed. The threshold is the one that separates the known records best.
    """
    known_auc = auc(known_members, known_nonmembers)
    if is_reversed := known_auc.value < GUESS:
        test_members, test_nonmembers, known_members, known_nonmembers = (
            -test_members,
            -test_nonmembers,
            -known_members,
            -known_nonmembers,
        )
        known_auc = auc(known_members, known_nonmembers)
    rates = {
        str(rate): tpr_at(test_members, test_nonmembers, rate) if has_enough(len(test_nonmembers), rate) else None
        for rate in RATES
    }
    accuracy = balanced_accuracy(test_members, test_nonmembers, best_threshold(known_members, known_nonmembers))
    test_auc, curve = auc(test_members, test_nonmembers), roc(test_members, test_nonmembers)
    return AttackScores(accuracy, test_auc, rates, roc=curve, known=known_auc, turned=is_reversed, form=form)


@dataclass(frozen=True, eq=False)
class RecordAttacks:
    """All membership attacks of one attacker.

    Attributes:
        records: the pool of records and its parts.
        shadows: the attacks that use shadows, RMIA and LiRA.
        recipe: settings for training the white-box network; None to skip it.
        full_features: whether the network also uses the label, the loss and the gradient of a final nn.Linear.
        by_layer: whether to train separate networks for each layer, for the last three layers and for all features, and
            to track their accuracy on the test records, as the paper does; by default, there is one network for all
            features.
    """

    records: RecordPool
    shadows: ShadowAttacks
    recipe: Recipe | None
    full_features: bool = True
    by_layer: bool = False

    def run(self, observation: Observation, noise_removed: bool, progress: Progress) -> Attacks:
        """Run all attacks; `noise_removed` indicates whether the attacker has removed the noise from the model."""
        records, pool, full_features = self.records, self.records.pool, self.full_features and self.recipe is not None
        features = record_features(observation.model, pool.tensor, pool.targets, observation.loss, full=full_features)
        result = self.train_networks(features, self.recipe, progress) if self.recipe else Attacks()
        scores = loss_attacks(observation.loss, features["last"], pool.targets, records.known_nonmembers)
        all_scores = {name: ShadowScores(score, "") for name, score in scores.items()}
        try:
            all_scores |= self.shadows.scores(observation, features["last"], records, noise_removed)
        except (BadArgument, OSError) as error:
            result[SHADOWS] = Failure(error.what if isinstance(error, BadArgument) else str(error))
        for name, (all_values, form) in all_scores.items():
            known_members, known_nonmembers, test_members, test_nonmembers = (
                all_values[part] for part in records.parts
            )
            result[name] = measure(test_members, test_nonmembers, known_members, known_nonmembers, form)
        return result

    def train_networks(self, features: Features, recipe: Recipe, progress: Progress) -> Attacks:
        """Train the white-box networks; the result is a `Failure` if there are too few records."""
        layers, result = [name for name in LAYERS if name in features], Attacks()
        feature_sets = {NETWORK: list(features)}
        if self.by_layer:
            all_features = {"full": list(features)} if len(features) > len(layers) else {}
            feature_sets = {name: [name] for name in layers} | {"three": layers} | all_features
        for index, (name, names) in enumerate(feature_sets.items()):
            progress(index / len(feature_sets), f"attack network, {name}")
            try:
                result[name] = run_whitebox(features, names, self.records, recipe, track_test=self.by_layer)
            except BadArgument as reason:
                result[name] = Failure(reason.what)
        return result
