"""Membership attacks of an audit: all attacks on each broadcast that an attacker sees."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedveil.attacks import Observation
from fedveil.attacks.features import record_features
from fedveil.attacks.scores import Scores, auc
from fedveil.attacks.whitebox import Recipe
from fedveil.errors import BadArgument
from fedveil.studies.audit.results import MemberAttack, Members
from fedveil.studies.estimates import Estimate, combine_broadcasts
from fedveil.studies.membership.attacks import ShadowAttacks, extra_features, loss_attacks, score_figures, whitebox
from fedveil.studies.membership.records import Records

MAX_LOOKS = 2  # broadcasts for which the attack network is trained
EPOCHS = 30  # of the attack network
NETWORK = "white-box network"
SHADOWS = "RMIA"


@dataclass(frozen=True, eq=False)
class MemberAttacks:
    """All attacks of one attacker on membership.

    Attributes:
        records: the attacker's, those it knows not to be members, and those of the test.
        shadows: RMIA and LiRA.
        networks: whether the white-box network is trained.
        seed: of the network.
    """

    records: Records
    shadows: ShadowAttacks
    networks: bool
    seed: int

    def run(self, observed: Observation, number: int, cleaned: bool) -> Members:
        """Attack one broadcast; `cleaned`: the attacker has removed noise from the model that it received."""
        records, left_out, attacks = self.records, self.unavailable(), dict[str, MemberAttack]()
        pool, networks = records.pool, self.networks and number < MAX_LOOKS
        extras = extra_features(observed, records) if networks else ()
        features = record_features(observed.model, pool.tensor, pool.targets, observed.loss, extras=extras)
        scores = loss_attacks(observed, features["last"], records)
        if networks:
            try:
                found, known = whitebox(features, list(features), records, Recipe(EPOCHS, seed=self.seed))
                attacks[NETWORK] = MemberAttack(found.accuracy, found.auc, found.tpr, known)
            except BadArgument as reason:  # too few records
                left_out[NETWORK] = reason.what
        try:
            scores |= self.shadows.scores(observed, features["last"], records, cleaned)
        except (BadArgument, OSError) as error:
            left_out[SHADOWS] = error.what if isinstance(error, BadArgument) else str(error)
        return Members(attacks | {name: attack_by_scores(own, records) for name, own in scores.items()}, left_out)

    def unavailable(self) -> dict[str, str]:
        """Return the attacks that lack classes or shadows, or were not asked for."""
        missing = {} if self.networks else {NETWORK: "not asked for"}
        if self.records.pool.targets.dim() != 1:
            return {"loss by class": "the targets have no classes", SHADOWS: "the targets have no classes", **missing}
        return missing if self.shadows.count else {SHADOWS: "no shadows were asked for", **missing}


def attack_by_scores(scores: Scores, records: Records) -> MemberAttack:
    """Return the figures of an attack that needs no training."""
    found, known = score_figures(scores, records), auc(scores[records.own], scores[records.known]).value
    return MemberAttack(found.accuracy, found.auc, found.tpr, known)


def join_broadcasts(looks: Sequence[Estimate | None]) -> Estimate | None:
    """Return the same figure of several broadcasts as one; None if one of them has none."""
    return combine_broadcasts([look for look in looks if look]) if all(looks) else None


def average_members(looks: Sequence[Members]) -> Members:
    """Average every attack over the broadcasts that it was run on."""
    found = {}
    for name in dict.fromkeys(name for look in looks for name in look.attacks):
        own = [look.attacks[name] for look in looks if name in look.attacks]
        known = sum(one.known for one in own) / len(own)
        accuracy, area = (combine_broadcasts([getattr(one, figure) for one in own]) for figure in ("accuracy", "auc"))
        rates = {rate: join_broadcasts([one.tpr[rate] for one in own]) for rate in own[0].tpr}
        found[name] = MemberAttack(accuracy, area, rates, known, len(own))
    return Members(found, looks[0].left_out)
