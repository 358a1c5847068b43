"""Attack any PyTorch model with all membership attacks, and rank the records by how much they stand out."""

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
from fedveil.studies.membership.attacks import GUESS, NETWORK, SHADOWS, AttackScores, Records, loss_attacks, measure
from fedveil.studies.model_audit.exposure import ScoredMembers, rank_exposures
from fedveil.studies.model_audit.records import WHERE, AuditedRecords, read_records
from fedveil.studies.model_audit.results import ModelAudit

Train = Callable[[tuple[Inputs, Tensor]], nn.Module]
EPOCHS = 30  # number of training epochs of the attack network
FOR_LIRA = 8  # minimum number of shadows for LiRA


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
    """Measure how well an attacker that has a model can tell which records it was trained on.

    The attacker knows half of the members and half of the others. It chooses its attack, direction and threshold on
    these, and is tested on the other halves. For the exposure of every member, it is run again with the halves
    exchanged. The audit finds what these attacks find; better attacks may exist.

    Args:
        model: the model, which returns one row of outputs per record. It is not changed.
        members: records that the model was trained on: (inputs, targets) as tensors, arrays or frames, a Dataset of
            (input, target), or a DataLoader. They are read into memory.
        others: records from the same source that it was not trained on, in the same form. Others from another source
            may differ for reasons that have nothing to do with training; the audit cannot tell this apart.
        loss: the loss that the model was trained with; by default, it is chosen as for `fedveil.Federation`.
        train: a function that trains a new model in the same way, given (inputs, targets) as tensors, and returns it.
            It is called once per shadow and adds RMIA and LiRA, the strongest attacks on most models. The shadows are
            trained on random halves of all the records.
        shadows: number of shadows, which must be even. LiRA needs at least 8.
        network: whether to train an attack network on the outputs of the last layers (`model` must take one tensor).
        seed: seed for the division of the records, the shadows and the attack network.
        progress: called with the completed fraction and a description.

    Example:
        >>> inputs, targets = torch.randn(80, 8), torch.randint(0, 2, (80,))
        >>> own, new = (inputs[:40], targets[:40]), (inputs[40:], targets[40:])
        >>> audit_model(nn.Linear(8, 2), own, new, network=False).label.value  # it was trained on nothing
        'TOO FEW TRIALS'
    """
    if not isinstance(model, nn.Module):
        fix = f"pass an instance: {model.__name__}()" if isinstance(model, type) else "pass a torch.nn.Module"
        raise BadArgument(WHERE, f"the model is a {type(model).__name__}, not a module", fix)
    records = read_records(model, members, others, seed)
    pool = records.pool
    chosen = choose_loss(model, records, loss)
    outputs = predict_pool(model, pool.inputs, "the model")
    with attribute_targets("the records"):
        dense = dense_targets(chosen, pool.targets, outputs)
        loss_attacks(chosen, outputs, pool.targets, records.order[1])  # refuses targets that do not fit the outputs
    left_out: dict[str, str] = {}
    features = read_features(model, records, chosen, left_out) if network else {}
    shadowed: dict[str, ShadowScores] = {}
    if train is None:
        left_out |= dict.fromkeys((SHADOWS, "LiRA"), "no function to train shadows was given")
    else:
        number, width = check_count(WHERE, "shadows", shadows), outputs.shape[1]
        trained = train_shadows(train, records, chosen, dense, width, number, seed, progress)
        shadowed = shadow_scores(outputs.double().numpy(), trained, include_lira=shadows >= FOR_LIRA)
        left_out |= {} if shadows >= FOR_LIRA else {"LiRA": f"it needs at least {FOR_LIRA} shadows"}
    folds = []
    for number in (0, 1):
        progress((1 + number) / 3, f"attacks, half {number + 1} of 2")
        folds.append(attack_fold(chosen, outputs, records.fold(number), features, shadowed, seed))
    scored = folds[0].results
    figures = verdicts.MEMBERSHIP.compare([(name, result.auc) for name, result in scored.items()], GUESS)
    verdict = verdicts.judge(verdicts.MEMBERSHIP, GUESS, figures, ())
    assert verdict is not None  # there is always the attack on the loss
    quality = [
        metrics(outputs[rows], pool.targets[rows], chosen)
        for rows in (slice(records.members), slice(records.members, None))
    ]
    exposures = rank_exposures([fold.scored_members() for fold in folds])
    best, sizes = folds[0].best, {"members": records.members, "others": len(pool.targets) - records.members}
    return ModelAudit(verdict, best, scored, exposures, sizes, chosen.name, quality[0], quality[1], left_out)


def choose_loss(model: nn.Module, records: AuditedRecords, loss: str | Loss | Function | None) -> Loss:
    """Return the loss; refuse a loss without a value for each record."""
    pool = records.pool
    if loss is None:
        loss = default_loss(one_output(model, pool.inputs), [Rows("the records", pool.inputs, pool.targets)])
    result = find_loss(loss)
    if result.couples:
        what = f"{result.name} has one value for a batch, not one for each record"
        raise BadArgument(WHERE, what, "pass a loss that does not compare records with each other")
    return result


def predict_pool(model: nn.Module, inputs: Inputs, owner: str) -> Tensor:
    """Return a model's outputs on the CPU; refuse outputs that are not finite or not one row per record."""
    first = next(model.parameters(), None)
    placed = inputs if first is None else move_inputs(inputs, first.device, first.dtype)
    try:
        outputs = predict(model, placed).detach().cpu()
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        what = f"{owner} does not accept the records: {(str(error).splitlines() or [type(error).__name__])[0]}"
        raise BadArgument(WHERE, what, "pass records of the shape that the model was trained on") from error
    if outputs.dim() != 2:
        what = f"outputs of {owner} have shape {tuple(outputs.shape)}"
        raise BadArgument(WHERE, what, "use a model that returns one row of outputs per record")
    if not bool(outputs.isfinite().all()):
        raise BadArgument(
            WHERE, f"an output of {owner} is not finite", "pass trained weights, and records in its range"
        )
    return outputs


def read_features(model: nn.Module, records: AuditedRecords, loss: Loss, left_out: dict[str, str]) -> Features:
    """Return the features for the attack network; if there are none, add the reason to `left_out`."""
    if not isinstance(records.pool.inputs, Tensor):
        left_out[NETWORK] = "each record has several tensors"
        return {}
    try:
        return record_features(model, records.pool.inputs, records.pool.targets, loss)
    except BadArgument as error:
        left_out[NETWORK] = error.what
        return {}


def train_shadows(
    train: Train,
    records: AuditedRecords,
    loss: Loss,
    dense: Tensor,
    width: int,
    count: int,
    seed: int,
    progress: Progress,
) -> Shadows:
    """Train shadows with `width` outputs on random halves of all records, and return their outputs."""
    pool = records.pool
    inside, outputs = halves(len(pool.targets), count, generator("model audit, shadows", seed)), []
    for number, rows in enumerate(inside):
        progress(number / count / 3, f"training shadow {number + 1}/{count}")
        shadow_part = pool.take(torch.from_numpy(np.flatnonzero(rows)))
        shadow = train((shadow_part.inputs, shadow_part.targets))
        if not isinstance(shadow, nn.Module):
            what = f"train returned {type(shadow).__name__}, not a torch.nn.Module"
            raise BadArgument(WHERE, what, "return the trained model")
        outputs.append(predict_pool(shadow, pool.inputs, "a shadow"))
        if outputs[-1].shape[1] != width:
            what = f"a shadow has {outputs[-1].shape[1]} outputs, but the model has {width}"
            raise BadArgument(WHERE, what, "train the same architecture")
    truth = dense.double() if dense.is_floating_point() else dense
    return Shadows(torch.stack(outputs).double().numpy(), inside, truth, loss)


@dataclass(frozen=True, eq=False)
class Fold:
    """The results of all attacks with one half of the records known to the attacker.

    Attributes:
        records: the records and their parts.
        results: performance of each attack on the test records.
        scores: scores of the test members and of the test others by attack, reversed if the attacker reverses them.
    """

    records: Records
    results: Mapping[str, AttackScores]
    scores: Mapping[str, tuple[Scores, Scores]]

    @property
    def best(self) -> str:
        """The attack with the largest lower end of the AUC on known records."""
        return max(self.results, key=lambda name: self.results[name].known.low)

    def scored_members(self) -> ScoredMembers:
        """Return the scores of the test members by the best attack."""
        members, others = self.scores[self.best]
        return ScoredMembers(self.records.victims, members, others, self.best)


def attack_fold(
    loss: Loss,
    outputs: Tensor,
    records: Records,
    features: Features,
    shadowed: Mapping[str, ShadowScores],
    seed: int,
) -> Fold:
    """Run all attacks with one half of the records known to the attacker."""
    result: dict[str, AttackScores] = {}
    scores: dict[str, tuple[Scores, Scores]] = {}

    def add(name: str, parts: Sequence[Scores], form: str = "", collapsed: bool = False) -> None:
        own_scores, known, victims, fresh = parts
        attack = measure(victims, fresh, own_scores, known, form)
        result[name] = replace(attack, collapsed=collapsed)
        scores[name] = (-victims, -fresh) if attack.turned else (victims, fresh)

    losses = loss_attacks(loss, outputs, records.pool.targets, records.known)
    all_scores = {name: ShadowScores(values, "") for name, values in losses.items()}
    for name, (values, form) in {**all_scores, **shadowed}.items():
        add(name, [values[part] for part in records.parts], form)
    if features:
        own_features, known, victims, fresh = (select(features, torch.from_numpy(part)) for part in records.parts)
        done = train_attack(own_features, known, recipe=Recipe(EPOCHS, seed=seed))
        held = [part.numpy() for part in done.held_out]
        add(NETWORK, [*held, done.score(victims).numpy(), done.score(fresh).numpy()], collapsed=done.collapsed)
    return Fold(records, result, scores)
