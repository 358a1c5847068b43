"""Results of membership attacks."""

from dataclasses import dataclass

from fedveil.attacks.scores import Estimate
from fedveil.attacks.whitebox import Epoch
from fedveil.studies.federations import Quality
from fedveil.studies.jobs import Failed, Result


@dataclass(frozen=True)
class AttackNetwork(Epoch):
    """The white-box network at the chosen epoch.

    Attributes:
        epoch: its number, starting at 1.
        last: the last epoch.
        collapsed: whether it gives the same answer to all of its training records.
    """

    epoch: int
    last: Epoch
    collapsed: bool


@dataclass(frozen=True)
class MembershipFigures:
    """Figures of one membership attack.

    Attributes:
        accuracy: balanced, at a threshold chosen on known records.
        auc: area under the ROC curve.
        tpr: true-positive rate by false-positive rate; None if there are too few records to estimate it.
    """

    accuracy: Estimate
    auc: Estimate
    tpr: dict[str, Estimate | None]


@dataclass(frozen=True)
class AttackScores(MembershipFigures):
    """One attack on the records of the test.

    Attributes:
        best_on_test: the paper's protocol: the best epoch's accuracy on the test itself.
        roc: (false, true) positive rates.
        network: of a white-box attack.
    """

    best_on_test: float | None = None
    roc: list[tuple[float, float]] | None = None
    network: AttackNetwork | None = None


@dataclass(frozen=True)
class Attacker:
    """One attacker: what it sees, and its attacks by name."""

    view: str
    attacks: dict[str, AttackScores | Failed]


@dataclass(frozen=True)
class Sizes:
    """Numbers of records: the attacker's, known non-members, and members and non-members of the test."""

    own: int
    known: int
    victims: int
    fresh: int


@dataclass(frozen=True)
class Membership(Quality, Result):
    """All attacks on one federation."""

    defence: str
    seed: int
    records: Sizes
    attackers: dict[str, Attacker]
