"""Results of an audit."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedveil.attacks.scores import Estimate
from fedveil.studies.federations import Quality
from fedveil.studies.gradients.results import Curious
from fedveil.studies.jobs import Failed, Result
from fedveil.studies.membership.results import MembershipFigures

FLOOR = "floor"


@dataclass(frozen=True)
class MemberAttack(MembershipFigures):
    """One membership attack on other clients' records.

    Attributes:
        known: its AUC on records whose membership the attacker knows, held out from training.
        broadcasts: number of broadcasts that it was run on.
    """

    known: float
    broadcasts: int = 1


@dataclass(frozen=True)
class Members:
    """Membership of other clients' records, attack by attack.

    Attributes:
        attacks: by name.
        left_out: attacks that do not apply, and why.
    """

    attacks: dict[str, MemberAttack]
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def attack(self) -> str:
        """The attack that did best on records that the attacker knows; never chosen on the test."""
        return max(self.attacks, key=lambda name: self.attacks[name].known)

    @property
    def best(self) -> MemberAttack:
        """The figures of that attack."""
        return self.attacks[self.attack]


@dataclass(frozen=True)
class ModelFigures:
    """Figures of one attacker's model on held-out records.

    Attributes:
        agreement: with the server's model.
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
        outputs: number of outputs of the model.
        broadcasts: number of broadcasts that were attacked.
        trials: number of records that attackers tried to rebuild.
        attackers: figures by attacker.
        rebuilt: PSNR in dB of rebuilt records by attacker, and of the floor: the mean of the attacker's records.
        guessing: figures of the best constant answer.
        inapplicable: attackers of the model that do not apply, and why.
        not_rebuilt: attackers that rebuild no record, and why.
        server: attacks of a curious server; of the undefended federation only, and if asked for.
    """

    defence: str
    outputs: int
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

    @property
    def names(self) -> list[str]:
        """All attackers."""
        return list(dict.fromkeys([*self.attackers, *(name for name in self.rebuilt if name != FLOOR)]))


Audits = Mapping[str, AuditResult | Failed]  # by defence
