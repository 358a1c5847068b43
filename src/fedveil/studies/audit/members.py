"""Membership inside an audit: every attack on what an attacker sees, and which of them the attacker would choose."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedveil.attacks import Observed
from fedveil.attacks.features import record_features
from fedveil.attacks.scores import Scores, auc
from fedveil.attacks.whitebox import Recipe
from fedveil.errors import BadArgument
from fedveil.studies.audit.results import Members, Tried
from fedveil.studies.estimates import Estimate, combine_broadcasts
from fedveil.studies.membership.attacks import ByShadows, extras_of, judged, loss_attacks, whitebox
from fedveil.studies.membership.records import Records
from fedveil.studies.membership.results import Scored

LOOKS = 2  # broadcasts for which the attack network is trained
EPOCHS = 30  # of the attack network
NETWORK = "white-box network"
SHADOWS = "RMIA"


@dataclass(frozen=True, eq=False)
class MemberAttacks:
    """What an attacker does to learn who took part.

    Attributes:
        records: its own, those it knows not to be members, and the test's.
        by_shadows: RMIA and LiRA.
        networks: whether the white-box network is trained.
        seed: of the network.
    """

    records: Records
    by_shadows: ByShadows
    networks: bool
    seed: int

    def look(self, observed: Observed, number: int, cleaned: bool) -> Members:
        """All attacks on one broadcast; `cleaned` says that the attacker's model is no longer the one it received."""
        records, left_out, attacks = self.records, dict[str, str](), dict[str, Tried]()
        pool, networks = records.pool, self.networks and number < LOOKS
        extras = extras_of(observed, records) if networks else ()
        features = record_features(observed.model, pool.tensor, pool.targets, observed.loss, extras=extras)
        for name, scores in loss_attacks(observed, features["last"], records).items():
            attacks[name] = by_scores(scores, records)
        if networks:
            try:
                attacks[NETWORK] = tried(*whitebox(features, list(features), records, Recipe(EPOCHS, seed=self.seed)))
            except BadArgument as reason:  # too few records
                left_out[NETWORK] = reason.what
        try:
            for name, scores in self.by_shadows.scores(observed, features["last"], records, cleaned).items():
                attacks[name] = by_scores(scores, records)
        except (BadArgument, OSError) as error:
            left_out[SHADOWS] = error.what if isinstance(error, BadArgument) else str(error)
        return Members(attacks, self.not_asked() | left_out)

    def not_asked(self) -> dict[str, str]:
        """Attacks that need classes, shadows or time that they do not have."""
        without = {} if self.networks else {NETWORK: "not asked for"}
        if self.records.pool.targets.dim() != 1:
            return {"loss by class": "the targets have no classes", SHADOWS: "the targets have no classes", **without}
        return without if self.by_shadows.count else {SHADOWS: "no shadows were asked for", **without}


def by_scores(scores: Scores, records: Records) -> Tried:
    """An attack that needs no training."""
    return tried(judged(scores, records), auc(scores[records.own], scores[records.known]).value)


def tried(found: Scored, known: float) -> Tried:
    """The figures of an attack that an audit keeps."""
    return Tried(known, found.accuracy, found.auc, found.tpr)


def joined(looks: Sequence[Estimate | None]) -> Estimate | None:
    """The same figure of several broadcasts as one; None if one of them has none."""
    return combine_broadcasts([look for look in looks if look]) if all(looks) else None


def averaged_members(looks: Sequence[Members]) -> Members:
    """Every attack over the broadcasts under which it was run."""
    found = {}
    for name in dict.fromkeys(name for look in looks for name in look.attacks):
        own = [look.attacks[name] for look in looks if name in look.attacks]
        known = sum(one.known for one in own) / len(own)
        accuracy, area = (combine_broadcasts([getattr(one, figure) for one in own]) for figure in ("accuracy", "auc"))
        rates = {rate: joined([one.tpr[rate] for one in own]) for rate in own[0].tpr}
        found[name] = Tried(known, accuracy, area, rates, len(own))
    return Members(found, looks[0].left_out)
