"""Results of an audit, and their means over broadcasts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedveil.attacks.scores import Estimate, average
from fedveil.studies.federations import Quality
from fedveil.studies.gradients.server_results import Curious
from fedveil.studies.jobs import Failure, Result
from fedveil.studies.membership.attacks import AttackScores

FLOOR = "floor"
AGREEMENT, ACCURACY, RANKING = "agreement, %", "accuracy, %", "ranking AUC"
MEMBERSHIP, BALANCED, TPR, RECORD = "membership AUC", "membership, %", "TPR at 1 % FPR, %", "PSNR, dB"


@dataclass(frozen=True)
class Members:
    """Membership of other clients' records, attack by attack.

    Attributes:
        attacks: figures by the name of the attack.
        left_out: attacks that do not apply, and why.
    """

    attacks: dict[str, AttackScores]
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def attack(self) -> str:
        """The attack that did best on records that the attacker knows; never chosen on the test."""
        return max(self.attacks, key=lambda name: self.attacks[name].known)

    @property
    def best(self) -> AttackScores:
        """The figures of that attack."""
        return self.attacks[self.attack]


@dataclass(frozen=True)
class ModelFigures:
    """Figures of one attacker's model on held-out records.

    Attributes:
        agreement: agreement with the server's model.
        accuracy: None where records have no classes.
        ranking: AUC of a model with one output, in the better direction.
        membership: None with a single client.
    """

    agreement: Estimate
    accuracy: Estimate | None = None
    ranking: Estimate | None = None
    membership: Members | None = None


@dataclass(frozen=True)
class Guessing:
    """Figures of the best constant answer on held-out records.

    Attributes:
        agreement: frequency of the most frequent answer of the server's model.
        accuracy: frequency of the most frequent class; None where records have no classes.
    """

    agreement: float
    accuracy: float | None = None


@dataclass(frozen=True)
class AuditResult(Quality, Result):
    """All figures of one federation.

    Attributes:
        broadcasts: number of broadcasts that were attacked.
        trials: number of records that attackers tried to rebuild.
        attackers: figures by attacker.
        rebuilt: PSNR in dB of rebuilt records by attacker, and of the floor: the mean of the attacker's records.
        guessing: figures of the best constant answer.
        inapplicable: attackers of the model that do not apply, and why.
        not_rebuilt: attackers that rebuild no record, and why.
        server: attacks of a curious server, on the undefended federation only, and if asked for.
    """

    defence: str
    broadcasts: int
    trials: int
    attackers: dict[str, ModelFigures]
    rebuilt: dict[str, Estimate]
    guessing: Guessing
    inapplicable: dict[str, str] = field(default_factory=dict)
    not_rebuilt: dict[str, str] = field(default_factory=dict)
    server: Curious | None = None

    @property
    def ranks(self) -> bool:
        """Whether agreement is that of a ranking: a model with one output leaks it under any additive noise."""
        return next(iter(self.attackers.values())).ranking is not None

    def figures(self, attacker: str) -> dict[str, Estimate | None]:
        """Return the figures of one attacker by column."""
        own, found = self.attackers.get(attacker), dict[str, Estimate | None]()
        if own:
            found |= {AGREEMENT: own.agreement, ACCURACY: own.accuracy, RANKING: own.ranking}
        if own and own.membership:
            best = own.membership.best
            found |= {MEMBERSHIP: best.auc, BALANCED: best.accuracy, TPR: best.tpr["0.01"]}
        return found | {RECORD: self.rebuilt.get(attacker)}

    @property
    def guesses(self) -> dict[str, float | None]:
        """The figures of the best constant answer by column."""
        fixed = {MEMBERSHIP: 0.5, BALANCED: 0.5, TPR: 0.01, RANKING: 0.5 if self.ranks else None}
        floor = self.rebuilt[FLOOR].value if FLOOR in self.rebuilt else None
        return {AGREEMENT: self.guessing.agreement, ACCURACY: self.guessing.accuracy, RECORD: floor, **fixed}

    @property
    def names(self) -> list[str]:
        """All attackers."""
        return list(dict.fromkeys([*self.attackers, *(name for name in self.rebuilt if name != FLOOR)]))


Audits = Mapping[str, AuditResult | Failure]  # by defence


def combine_broadcasts(broadcasts: Sequence[Estimate]) -> Estimate:
    """Average the same fraction over several broadcasts.

    The half width of the interval is the root of the sum of two squares: of Student's half width over broadcasts, and
    of the mean half width over records.
    """
    if len(broadcasts) == 1:
        return broadcasts[0]
    over = average([one.value for one in broadcasts])
    single = sum(one.high - one.low for one in broadcasts) / (2 * len(broadcasts))
    half = math.hypot(over.high - over.value, single)
    return Estimate(over.value, max(0.0, over.value - half), min(1.0, over.value + half))


def combine_if_complete(broadcasts: Sequence[Estimate | None]) -> Estimate | None:
    """Average a figure over broadcasts; None if one of them lacks it."""
    found = [one for one in broadcasts if one]
    return combine_broadcasts(found) if len(found) == len(broadcasts) else None


def average_members(broadcasts: Sequence[Members]) -> Members:
    """Average every attack over the broadcasts that it was run on."""
    found = {}
    for name in dict.fromkeys(name for one in broadcasts for name in one.attacks):
        own = [one.attacks[name] for one in broadcasts if name in one.attacks]
        accuracy, area = (combine_broadcasts([getattr(one, figure) for one in own]) for figure in ("accuracy", "auc"))
        rates = {rate: combine_if_complete([one.tpr[rate] for one in own]) for rate in own[0].tpr}
        known = sum(one.known for one in own) / len(own)
        found[name] = AttackScores(accuracy, area, rates, known=known, broadcasts=len(own))
    return Members(found, broadcasts[0].left_out)


def average_figures(broadcasts: Sequence[ModelFigures]) -> ModelFigures:
    """Average the figures of one attacker over broadcasts."""
    agreement = combine_broadcasts([one.agreement for one in broadcasts])
    accuracy = combine_if_complete([one.accuracy for one in broadcasts])
    ranking = combine_if_complete([one.ranking for one in broadcasts])
    members = [one.membership for one in broadcasts if one.membership]
    return ModelFigures(agreement, accuracy, ranking, average_members(members) if members else None)
