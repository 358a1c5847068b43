"""Membership of a record, inferred from a model: LiRA, RMIA in two forms, and the loss alone.

A pool (the training records) is divided 9 times into complementary halves, and a federation is trained on each half. In
turn each of the 18 models is the target; it and its complement are left out, and the other 16 are the shadows. Scores
of both targets of a pair are pooled: every record is a member once and a non-member once; 9 pairs give an interval.
"""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.cells import Figures
from benchmarks.protections.tasks import TASKS, Protection, make_federation, records
from benchmarks.protections.training import metric
from fedveil import Veil
from fedveil.attacks.membership import A_GRID, DEFAULT_A, Form, choose_form, confidence, halves, lira, rmia
from fedveil.attacks.scores import auc, tpr_at
from fedveil.federation.evaluate import predict
from fedveil.records.shards import generator

Array = NDArray[np.float64]
TARGETS = 18
FALSE_POSITIVES = 0.01
MODEL, VEILED = "model", "veiled"  # views: the model itself, and one veiled broadcast as received


def choose_members(name: str) -> NDArray[np.bool_]:
    """Return which records of the pool each target is trained on."""
    return halves(len(records(name).train.targets), TARGETS, generator("protections", "members"))


def train_target(name: str, epsilon: float | None, number: int, folder: Path) -> Figures:
    """Train a target, and write the log-odds that each view of it gives the true class of each record."""
    chosen = torch.from_numpy(np.flatnonzero(choose_members(name)[number]))
    federation = make_federation(name, Protection(epsilon=epsilon), 1000 + number, chosen)
    federation.fit(rounds=TASKS[name].rounds)
    model, data = federation.model, records(name)
    inputs = torch.cat([data.train.tensor, data.test.tensor])
    views = {MODEL: model}
    if epsilon is None:
        veil = Veil()
        sent = veil.server(model, data.train.tensor[:2], federation.loss).start_round(model).broadcast
        views[VEILED] = veil.client_view(model, sent)
    targets = torch.cat([data.train.targets, data.test.targets])
    for view, seen in views.items():
        np.save(odds_file(name, epsilon, number, view, folder), log_odds(predict(seen, inputs), targets))
    return {"metric": metric(name, predict(model, data.test.tensor))}


def odds_file(name: str, epsilon: float | None, number: int, view: str, folder: Path) -> Path:
    """Return the file with the log-odds of a target."""
    return folder / f"{name}-odds-{epsilon or 0:g}-{number}-{view}.npy"


def log_odds(outputs: Tensor, targets: Tensor) -> Array:
    """Return the log-odds of each record's true class; a single output is a logit."""
    logits = outputs.double().numpy()
    if logits.shape[1] == 1:
        logits = np.concatenate([np.zeros_like(logits), logits], 1)
    return confidence(logits, targets.reshape(-1).long().numpy())


def infer_members(name: str, epsilon: float | None, view: str, folder: Path) -> Figures:
    """Attack every target; return AUC and TPR at 1 % FPR of each attack, for each pair of targets.

    Shadows are the attacker's own models, so it has them without a veil.
    """
    inside = choose_members(name)
    clear = np.stack([np.load(odds_file(name, epsilon, number, MODEL, folder)) for number in range(TARGETS)])
    seen = np.stack([np.load(odds_file(name, epsilon, number, view, folder)) for number in range(TARGETS)])
    found: dict[str, dict[str, list[float]]] = {}
    for first in range(0, TARGETS, 2):
        rest = [number for number in range(TARGETS) if number not in (first, first + 1)]
        pair = [record_scores(seen[number], clear[rest], inside[rest]) for number in (first, first + 1)]
        for attack in pair[0]:
            parts = zip(pair, inside[first : first + 2], strict=True)
            ins, outs = zip(*((scores[attack][own], scores[attack][~own]) for scores, own in parts), strict=True)
            members, others = np.concatenate(ins), np.concatenate(outs)
            own = found.setdefault(attack, {"auc": [], "tpr": []})
            own["auc"].append(auc(members, others).value)
            own["tpr"].append(tpr_at(members, others, FALSE_POSITIVES).value)
    return {**found, "records": int(inside.shape[1])}


def log_likelihoods(phi: Array, shadow: Array, inside: NDArray[np.bool_]) -> tuple[Array, Array]:
    """Return -loss / v for the target and the shadows; v is the median loss of records outside a shadow.

    RMIA compares exp(-loss / v). With v = 1 these are probabilities, which round to 1.0 for most records of a confident
    model.
    """
    losses, others = np.logaddexp(0, -phi), np.logaddexp(0, -shadow)
    scale = max(float(np.median(others[~inside])), np.finfo(np.float64).tiny)
    return -losses / scale, -others / scale


def record_scores(target: Array, shadows: Array, inside: NDArray[np.bool_]) -> dict[str, Array]:
    """Score the records of the pool, which come first in the log-odds of the target and the shadows."""
    pool = inside.shape[1]
    phi, known = target[:pool], shadows[:, :pool]

    def compare(p: Array, q: Array) -> Array:
        forms = [Form("RMIA", p, q, partial(rmia, a=a)) for a in (DEFAULT_A, *A_GRID)]
        return choose_form(forms, inside).compare(p, q, inside)

    return {
        "LiRA": lira(phi, known, inside),
        "LiRA offline": lira(phi, known, inside, online=False),
        "RMIA": compare(*(-np.logaddexp(0, -odds) for odds in (phi, known))),
        "RMIA, losses": compare(*log_likelihoods(phi, known, inside)),
        "loss": phi,  # the loss is a decreasing function of the log-odds
    }
