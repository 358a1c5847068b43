"""What an audit returns."""

from dataclasses import dataclass

from fedveil.attacks.scores import Estimate
from fedveil.studies.jobs import Result
from fedveil.studies.victim import Quality


@dataclass(frozen=True)
class Members:
    """Membership of other clients' records by a loss threshold: balanced accuracy, AUC, TPR by FPR."""

    attack: str
    accuracy: Estimate
    auc: Estimate
    tpr: dict[str, Estimate | None]


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
class Audited(Quality, Result):
    """Every figure of one federation.

    Attributes:
        outputs: of the model.
        broadcasts: under how many secrets the model was looked at.
        trials: records that attackers tried to rebuild.
        attackers: figures by attacker.
        rebuilt: PSNR in dB of rebuilt records by attacker, and of the floor: the mean of the attacker's own records.
        left_out: why no record was rebuilt.
    """

    defence: str
    outputs: int
    broadcasts: int
    trials: int
    attackers: dict[str, Figures]
    rebuilt: dict[str, Estimate]
    left_out: str | None = None

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
        return found.membership.auc if found and found.membership else None

    @property
    def names(self) -> list[str]:
        """Of every attacker."""
        return list(dict.fromkeys([*self.attackers, *(name for name in self.rebuilt if name != "floor")]))
