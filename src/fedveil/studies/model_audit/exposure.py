"""The exposure of single records: how confidently does an attacker recognise each as a member?

A record's score is compared with the scores of records that the model was not trained on. If the model does not
remember the record, its score is exchangeable with these scores, so the p-value

    p = (1 + number of non-members with at least the same score) / (1 + number of non-members)

is at most alpha with a probability of at most alpha. Benjamini and Hochberg's procedure selects the records that stand
out. It keeps the expected fraction of false discoveries among them below a limit; Bates et al. (2023) prove this for
such p-values.
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
        false_positives: fraction of the non-members with at least the same score, with a 95 % interval. An attacker
            that names this record would also name these non-members.
        score: the record's score, in standard deviations above the mean of non-members.
        p: p-value of the hypothesis that the model does not remember the record.
        attack: name of the attack, which was chosen on other records.
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
    """The scores of some members, and of non-members, from one attack.

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
        (int(num_above), scored_members, int(record), float(score))
        for scored_members in parts
        for record, score, num_above in zip(
            scored_members.records,
            scored_members.scores,
            count_above(scored_members.scores, scored_members.others),
            strict=True,
        )
    ]
    p_values = np.array(
        [(1 + num_above) / (1 + len(scored_members.others)) for num_above, scored_members, _, _ in rows]
    )
    stands_out = benjamini_hochberg(p_values, FALSE_DISCOVERIES)
    standard_scores = [
        (score - float(scored_members.others.mean()))
        / max(float(scored_members.others.std()), np.finfo(np.float64).tiny)
        for _, scored_members, _, score in rows
    ]
    order = sorted(range(len(rows)), key=lambda index: (p_values[index], -standard_scores[index]))
    result = []
    for rank, index in enumerate(order, start=1):
        num_above, part, record, _ = rows[index]
        rate = proportion(num_above, len(part.others))
        result.append(
            RecordExposure(
                record, rank, rate, standard_scores[index], float(p_values[index]), part.attack, bool(stands_out[index])
            )
        )
    return tuple(result)


def count_above(scores: Scores, others: Scores) -> NDArray[np.int64]:
    """Return, for each score, the number of other records with at least this score."""
    sorted_others = np.sort(others)
    return np.asarray(len(sorted_others) - np.searchsorted(sorted_others, scores, "left"))


def benjamini_hochberg(p_values: NDArray[np.float64], level: float) -> NDArray[np.bool_]:
    """Return which hypotheses Benjamini and Hochberg's procedure (1995) rejects at the given false discovery rate."""
    sorted_values = np.sort(p_values)
    rejected = np.flatnonzero(sorted_values <= level * np.arange(1, len(p_values) + 1) / len(p_values))
    return p_values <= sorted_values[rejected[-1]] if len(rejected) else np.zeros(len(p_values), bool)
