"""What an audit returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedveil.attacks.scores import Estimate
from fedveil.studies.federations import Quality
from fedveil.studies.gradients.results import Curious
from fedveil.studies.jobs import Failed, Result


@dataclass(frozen=True)
class Tried:
    """One membership attack on other clients' records.

    Attributes:
        known: its AUC on records whose membership the attacker knows, held out from training.
        accuracy: balanced, at a threshold that was chosen on known records.
        auc: area under the ROC curve.
        tpr: true-positive rate by false-positive rate; None where too few records stand for it.
        broadcasts: under how many secrets it was run.
    """

    known: float
    accuracy: Estimate
    auc: Estimate
    tpr: dict[str, Estimate | None]
    broadcasts: int = 1


@dataclass(frozen=True)
class Members:
    """Membership of other clients' records, attack by attack.

    Attributes:
        attacks: by name.
        left_out: attacks that do not apply, and why.
    """

    attacks: dict[str, Tried]
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def attack(self) -> str:
        """The one that did best on records that the attacker knows; never chosen on the test."""
        return max(self.attacks, key=lambda name: self.attacks[name].known)

    @property
    def best(self) -> Tried:
        """Its figures."""
        return self.attacks[self.attack]


@dataclass(frozen=True)
class Figures:
    """What one attacker's model is worth, on held-out records.

    Attributes:
        agreement: with the server's model.
        accuracy: where records have classes.
        ranking: AUC of a model with one output, in the better direction.
        membership: None with a single client.
    """

    agreement: Estimate
    accuracy: Estimate | None = None
    ranking: Estimate | None = None
    membership: Members | None = None


@dataclass(frozen=True)
class Guessing:
    """What the best constant answer reaches on held-out records.

    Attributes:
        agreement: the share of the most frequent answer of the server's model.
        accuracy: the share of the most frequent class; None where records have no classes.
    """

    agreement: float
    accuracy: float | None = None


@dataclass(frozen=True)
class Audited(Quality, Result):
    """Every figure of one federation.

    Attributes:
        outputs: of the model.
        broadcasts: under how many secrets the model was looked at.
        trials: records that attackers tried to rebuild.
        attackers: figures by attacker.
        rebuilt: PSNR in dB of rebuilt records by attacker, and of the floor: the mean of the attacker's own records.
        guessing: what the best constant answer reaches.
        inapplicable: attackers of the model that do not apply, and why.
        not_rebuilt: attackers that rebuild no record, and why.
        server: what a curious server learns; of the undefended federation only, and if it was asked for.
    """

    defence: str
    outputs: int
    broadcasts: int
    trials: int
    attackers: dict[str, Figures]
    rebuilt: dict[str, Estimate]
    guessing: Guessing
    inapplicable: dict[str, str] = field(default_factory=dict)
    not_rebuilt: dict[str, str] = field(default_factory=dict)
    server: Curious | None = None

    @property
    def ranks(self) -> bool:
        """Whether agreement is that of a ranking: a model with one output leaks it whatever is added."""
        return next(iter(self.attackers.values())).ranking is not None

    def figure(self, attacker: str, name: str) -> Estimate | None:
        """One figure of one attacker: "agreement" (or ranking), "membership" (AUC) or "rebuilt" (dB)."""
        found = self.attackers.get(attacker)
        if name == "rebuilt":
            return self.rebuilt.get(attacker)
        if found and name == "agreement":
            return found.ranking or found.agreement
        return found.membership.best.auc if found and found.membership else None

    @property
    def names(self) -> list[str]:
        """Of every attacker."""
        return list(dict.fromkeys([*self.attackers, *(name for name in self.rebuilt if name != "floor")]))


Audits = Mapping[str, Audited | Failed]  # by defence
