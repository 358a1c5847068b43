"""The exposure of single records: how confidently does an attacker recognise each as a member?

A record's score is compared with the scores of records that the model was not trained on. If the model does not
remember it, it is exchangeable with these, so the p-value

    p = (1 + number of non-members with at least the same score) / (1 + number of non-members)

is at most alpha with probability alpha. The records that stand out are chosen with Benjamini and Hochberg's procedure,
which keeps the expected fraction of wrong ones among them below a limit (Bates et al. 2023 for such p-values).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedveil.attacks.scores import Estimate, Scores, proportion

FALSE_DISCOVERIES = 0.05  # expected fraction of false discoveries among the members that stand out


@dataclass(frozen=True)
class RecordExposure:
    """The exposure of one member.

    Attributes:
        record: index of the record among the members, from 0.
        rank: rank by exposure, from 1.
        false_positives: fraction of the non-members that look at least as much like a member, with a 95 % interval. An
            attacker that names this record would also name these.
        score: the record's score, in standard deviations above the mean of non-members.
        p: the p-value for a record that the model does not remember.
        attack: the attack, which was chosen on other records.
        stands_out: whether the record is among those that stand out.
    """

    record: int
    rank: int
    false_positives: Estimate
    score: float
    p: float
    attack: str
    stands_out: bool


@dataclass(frozen=True, eq=False)
class ScoredMembers:
    """The scores of some members, and of non-members, by one attack.

    Attributes:
        records: indices of the members.
        scores: their scores; larger scores indicate members.
        others: scores of the non-members, which were not used to choose the attack.
        attack: name of the attack.
    """

    records: NDArray[np.int64]
    scores: Scores
    others: Scores
    attack: str


def rank_exposures(parts: Sequence[ScoredMembers]) -> tuple[RecordExposure, ...]:
    """Return the exposure of every member, the most exposed first."""
    rows = [
        (int(above), scored, int(record), float(score))
        for scored in parts
        for record, score, above in zip(
            scored.records, scored.scores, count_above(scored.scores, scored.others), strict=True
        )
    ]
    p = np.array([(1 + above) / (1 + len(scored.others)) for above, scored, _, _ in rows])
    chosen = benjamini_hochberg(p, FALSE_DISCOVERIES)
    heights = [
        (score - float(scored.others.mean())) / max(float(scored.others.std()), np.finfo(np.float64).tiny)
        for _, scored, _, score in rows
    ]
    order = sorted(range(len(rows)), key=lambda index: (p[index], -heights[index]))
    result = []
    for rank, index in enumerate(order, start=1):
        above, part, record, _ = rows[index]
        rate = proportion(above, len(part.others))
        result.append(
            RecordExposure(record, rank, rate, heights[index], float(p[index]), part.attack, bool(chosen[index]))
        )
    return tuple(result)


def count_above(scores: Scores, others: Scores) -> NDArray[np.int64]:
    """Return, for each score, the number of other records with at least this score."""
    order = np.sort(others)
    return np.asarray(len(order) - np.searchsorted(order, scores, "left"))


def benjamini_hochberg(p: NDArray[np.float64], level: float) -> NDArray[np.bool_]:
    """Return which hypotheses Benjamini and Hochberg's procedure (1995) rejects at the given false discovery rate."""
    order = np.sort(p)
    below = np.flatnonzero(order <= level * np.arange(1, len(p) + 1) / len(p))
    return p <= order[below[-1]] if len(below) else np.zeros(len(p), bool)
