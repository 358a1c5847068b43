"""Attack any PyTorch model with all membership attacks, and rank the records by their exposure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from fedveil.attacks.features import dense_targets, record_features
from fedveil.attacks.membership import Shadows, ShadowScores, halves, shadow_scores
from fedveil.attacks.scores import Scores
from fedveil.attacks.whitebox import Features, Recipe, select, train_attack
from fedveil.checks import check_count
from fedveil.errors import BadArgument
from fedveil.federation.evaluate import metrics, move_inputs, predict
from fedveil.federation.targets import attribute_targets, default_loss, one_output
from fedveil.progress import Progress, ignore_progress
from fedveil.records.inputs import Inputs
from fedveil.records.shards import generator
from fedveil.records.sources import Rows, UserRecords
from fedveil.scheme.losses import Function, Loss, find_loss
from fedveil.studies import verdicts
from fedveil.studies.membership.attacks import GUESS, NETWORK, SHADOWS, AttackScores, RecordPool, loss_attacks, measure
from fedveil.studies.model_audit.exposure import ScoredMembers, rank_exposures
from fedveil.studies.model_audit.records import FUNCTION, AuditedRecords, read_records
from fedveil.studies.model_audit.results import ModelAudit

Train = Callable[[tuple[Inputs, Tensor]], nn.Module]
EPOCHS = 30  # number of training epochs of the attack network
MIN_LIRA_SHADOWS = 8  # minimum number of shadows for LiRA


def audit_model(
    model: nn.Module,
    members: UserRecords,
    others: UserRecords,
    *,
    loss: str | Loss | Function | None = None,
    train: Train | None = None,
    shadows: int = 16,
    network: bool = True,
    seed: int = 0,
    progress: Progress = ignore_progress,
) -> ModelAudit:
    """Measure how well an attacker that has a model can tell which records the model was trained on.

    The attacker knows half of the members and half of the others. It chooses its attack, direction and threshold on
    these, and is tested on the other halves. To measure the exposure of every member, the attacks run again with the
    halves exchanged. The audit shows what these attacks achieve; better attacks may exist.

    Args:
        model: the model, which returns one row of outputs per record. It is not changed.
        members: records that the model was trained on: (inputs, targets) as tensors, arrays or frames, a Dataset of
            (input, target), or a DataLoader. They are read into memory.
        others: records that the model was not trained on, from the same source and in the same form. Records from
            another source may differ for reasons unrelated to training, which the audit would report as a leak.
        loss: the loss that the model was trained with; by default, it is chosen as for `fedveil.Federation`.
        train: a function that trains a new model in the same way, given (inputs, targets) as tensors, and returns it.
            It is called once per shadow, and adds RMIA and LiRA, the strongest attacks on most models. Shadows are
            trained on random halves of all records.
        shadows: number of shadows, which must be even. LiRA needs at least 8.
        network: whether to train an attack network on the outputs of the last layers (`model` must take one tensor).
        seed: seed for the division of the records, the shadows and the attack network.
        progress: called with the completed fraction and a description.

    Example:
        >>> inputs, targets = torch.randn(80, 8), torch.randint(0, 2, (80,))
        >>> members, others = (inputs[:40], targets[:40]), (inputs[40:], targets[40:])
        >>> audit_model(nn.Linear(8, 2), members, others, network=False).label.value  # the model is not trained
        'TOO FEW TRIALS'
    """
    if not isinstance(model, nn.Module):
        fix = f"pass an instance: {model.__name__}()" if isinstance(model, type) else "pass a torch.nn.Module"
        raise BadArgument(FUNCTION, f"the model is a {type(model).__name__}, not a module", fix)
    records = read_records(model, members, others, seed)
    pool = records.pool
    loss_function = choose_loss(model, records, loss)
    outputs = predict_pool(model, pool.inputs, "the model")
    with attribute_targets("the records"):
        dense_labels = dense_targets(loss_function, pool.targets, outputs)
        loss_attacks(
            loss_function, outputs, pool.targets, records.order[1]
        )  # refuses targets that do not fit the outputs
    omitted_attacks: dict[str, str] = {}
    features = read_features(model, records, loss_function, omitted_attacks) if network else {}
    shadow_results: dict[str, ShadowScores] = {}
    if train is None:
        omitted_attacks |= dict.fromkeys((SHADOWS, "LiRA"), "no function to train shadows was given")
    else:
        num_shadows, num_outputs = check_count(FUNCTION, "shadows", shadows), outputs.shape[1]
        shadow_outputs = train_shadows(
            train, records, loss_function, dense_labels, num_outputs, num_shadows, seed, progress
        )
        shadow_results = shadow_scores(
            outputs.double().numpy(), shadow_outputs, include_lira=shadows >= MIN_LIRA_SHADOWS
        )
        omitted_attacks |= (
            {} if shadows >= MIN_LIRA_SHADOWS else {"LiRA": f"it needs at least {MIN_LIRA_SHADOWS} shadows"}
        )
    folds = []
    for index in (0, 1):
        progress((1 + index) / 3, f"attacks, half {index + 1} of 2")
        folds.append(attack_fold(loss_function, outputs, records.fold(index), features, shadow_results, seed))
    attack_scores = folds[0].results
    estimates = verdicts.MEMBERSHIP.compare([(name, result.auc) for name, result in attack_scores.items()], GUESS)
    verdict = verdicts.judge(verdicts.MEMBERSHIP, GUESS, estimates, ())
    assert verdict is not None  # the attack on the loss is always run
    quality = [
        metrics(outputs[rows], pool.targets[rows], loss_function)
        for rows in (slice(records.num_members), slice(records.num_members, None))
    ]
    exposures = rank_exposures([fold.scored_members() for fold in folds])
    best, sizes = folds[0].best, {"members": records.num_members, "others": len(pool.targets) - records.num_members}
    return ModelAudit(
        verdict, best, attack_scores, exposures, sizes, loss_function.name, quality[0], quality[1], omitted_attacks
    )


def choose_loss(model: nn.Module, records: AuditedRecords, loss: str | Loss | Function | None) -> Loss:
    """Return the loss; refuse a loss that has no separate value for each record."""
    pool = records.pool
    if loss is None:
        loss = default_loss(one_output(model, pool.inputs), [Rows("the records", pool.inputs, pool.targets)])
    result = find_loss(loss)
    if result.couples:
        message = f"{result.name} has one value for a batch, not one for each record"
        raise BadArgument(FUNCTION, message, "pass a loss that does not compare records with each other")
    return result


def predict_pool(model: nn.Module, inputs: Inputs, owner: str) -> Tensor:
    """Return a model's outputs on the CPU; refuse outputs that are not finite or not one row per record."""
    parameter = next(model.parameters(), None)
    moved_inputs = inputs if parameter is None else move_inputs(inputs, parameter.device, parameter.dtype)
    try:
        outputs = predict(model, moved_inputs).detach().cpu()
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        message = f"{owner} does not accept the records: {(str(error).splitlines() or [type(error).__name__])[0]}"
        raise BadArgument(FUNCTION, message, "pass records of the shape that the model was trained on") from error
    if outputs.dim() != 2:
        message = f"expected one row of outputs per record from {owner}, got shape {tuple(outputs.shape)}"
        raise BadArgument(FUNCTION, message, "use a model that returns one row of outputs per record")
    if not bool(outputs.isfinite().all()):
        raise BadArgument(
            FUNCTION, f"an output of {owner} is not finite", "pass trained weights, and records scaled as in training"
        )
    return outputs


def read_features(model: nn.Module, records: AuditedRecords, loss: Loss, omitted_attacks: dict[str, str]) -> Features:
    """Return the features for the attack network; if there are none, add the reason to `omitted_attacks`."""
    if not isinstance(records.pool.inputs, Tensor):
        omitted_attacks[NETWORK] = "each record has several tensors"
        return {}
    try:
        return record_features(model, records.pool.inputs, records.pool.targets, loss)
    except BadArgument as error:
        omitted_attacks[NETWORK] = error.what
        return {}


def train_shadows(
    train: Train,
    records: AuditedRecords,
    loss: Loss,
    dense_labels: Tensor,
    num_outputs: int,
    count: int,
    seed: int,
    progress: Progress,
) -> Shadows:
    """Train shadows with `num_outputs` outputs on random halves of all records, and return their outputs."""
    pool = records.pool
    training_masks, outputs = halves(len(pool.targets), count, generator("model audit, shadows", seed)), []
    for index, rows in enumerate(training_masks):
        progress(index / count / 3, f"training shadow {index + 1}/{count}")
        shadow_part = pool.take(torch.from_numpy(np.flatnonzero(rows)))
        shadow = train((shadow_part.inputs, shadow_part.targets))
        if not isinstance(shadow, nn.Module):
            message = f"train returned {type(shadow).__name__}, not a torch.nn.Module"
            raise BadArgument(FUNCTION, message, "return the trained model from train")
        outputs.append(predict_pool(shadow, pool.inputs, "a shadow"))
        if outputs[-1].shape[1] != num_outputs:
            message = f"a shadow has {outputs[-1].shape[1]} outputs, but the model has {num_outputs}"
            raise BadArgument(FUNCTION, message, "train a model of the same architecture")
    targets = dense_labels.double() if dense_labels.is_floating_point() else dense_labels
    return Shadows(torch.stack(outputs).double().numpy(), training_masks, targets, loss)


@dataclass(frozen=True, eq=False)
class Fold:
    """The results of all attacks with one half of the records known to the attacker.

    Attributes:
        records: the records and their parts.
        results: performance of each attack on the test records.
        scores: scores of the test members and of the test others by attack, reversed if the attacker reverses them.
    """

    records: RecordPool
    results: Mapping[str, AttackScores]
    scores: Mapping[str, tuple[Scores, Scores]]

    @property
    def best(self) -> str:
        """The attack with the largest lower bound of the AUC on known records."""
        return max(self.results, key=lambda name: self.results[name].known.low)

    def scored_members(self) -> ScoredMembers:
        """Return the scores of the test members from the best attack."""
        members, others = self.scores[self.best]
        return ScoredMembers(self.records.test_members, members, others, self.best)


def attack_fold(
    loss: Loss,
    outputs: Tensor,
    records: RecordPool,
    features: Features,
    shadow_results: Mapping[str, ShadowScores],
    seed: int,
) -> Fold:
    """Run all attacks with one half of the records known to the attacker."""
    result: dict[str, AttackScores] = {}
    scores: dict[str, tuple[Scores, Scores]] = {}

    def add(name: str, parts: Sequence[Scores], form: str = "", collapsed: bool = False) -> None:
        known_members, known_others, test_members, test_others = parts
        attack = measure(test_members, test_others, known_members, known_others, form)
        result[name] = replace(attack, collapsed=collapsed)
        scores[name] = (-test_members, -test_others) if attack.turned else (test_members, test_others)

    losses = loss_attacks(loss, outputs, records.pool.targets, records.known_nonmembers)
    all_scores = {name: ShadowScores(values, "") for name, values in losses.items()}
    for name, (values, form) in {**all_scores, **shadow_results}.items():
        add(name, [values[part] for part in records.parts], form)
    if features:
        member_features, known_others, test_members, test_others = (
            select(features, torch.from_numpy(part)) for part in records.parts
        )
        network = train_attack(member_features, known_others, recipe=Recipe(EPOCHS, seed=seed))
        held_out = [part.numpy() for part in network.held_out]
        add(
            NETWORK,
            [*held_out, network.score(test_members).numpy(), network.score(test_others).numpy()],
            collapsed=network.collapsed,
        )
    return Fold(records, result, scores)
