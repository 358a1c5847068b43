"""`fedveil attack membership`: does a client learn which records the others trained on?

The attacker is client 0. It knows its own records, members all of them, and half of a set of non-members; it is tested
on the other clients' records and the other half.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fedveil.attacks import Observed
from fedveil.attacks.features import LAYERS, dense_targets, labels, losses, record_features
from fedveil.attacks.membership import Shadows, calibrated_scores, halves, loss_scores, shadow_scores
from fedveil.attacks.observed import PUBLISHED
from fedveil.attacks.scores import Scores, auc, balanced_accuracy, best_threshold, enough, roc, tpr_at
from fedveil.attacks.whitebox import Features, Recipe, Score, select, train_attack
from fedveil.errors import BadArgument
from fedveil.runs.config import Config
from fedveil.studies.attack import Asked, AttackStudy, Results, option
from fedveil.studies.jobs import Done, Failed, Job, Progress, Result
from fedveil.studies.membership import page
from fedveil.studies.membership.records import Records, Shadow, TrainShadow, read_shadows, records_of, shadow_defence
from fedveil.studies.membership.results import Attacker, AttackNetwork, Membership, Scored, Sizes
from fedveil.studies.study import Shown
from fedveil.studies.victim import observe_strongest, quality_of, trained

RATES = (0.01, 0.001)
EXTRAS = ("label", "loss", "gradient")
Attacks = dict[str, Scored | Failed]


@dataclass(frozen=True)
class Options:
    """The attack's own flags."""

    shadows: int = option(4, "federations that the attacker trains itself, for RMIA and LiRA; 0 for none")
    lira: bool = option(False, "LiRA too; 16 shadows or more give it a chance")
    full: bool = option(True, "the white-box network with label, loss and gradient of the final layer too")
    attack_epochs: int = option(50, "epochs of the white-box network")
    attack_lr: float = option(1e-3, "learning rate of the white-box network")


@dataclass(frozen=True)
class AttackMembership:
    """All attacks on one federation, by all attackers."""

    config: Config
    options: Options
    folder: Path
    run: Path

    def __call__(self, progress: Progress, done: Done) -> Membership:
        """Observe the last broadcast, and attack what each attacker makes of it."""
        config = self.config
        federation, data = trained(config, self.run, progress)
        records = records_of(config, data)
        seen = observe_strongest(federation, config.defence.name)
        found = {
            name: Attacker("V-out", self.attacks(progress, observed, records, name != PUBLISHED))
            for name, observed in seen.items()
        }
        quality, seed, sizes = (
            asdict(quality_of(federation, data)),
            config.training.seed,
            Sizes(*map(len, records.parts)),
        )
        return Membership(**quality, defence=config.defence.name, seed=seed, records=sizes, attackers=found)

    def attacks(self, progress: Progress, observed: Observed, records: Records, cleaned: bool) -> Attacks:
        """All attacks by one attacker; `cleaned` says that its model is no longer the one it received."""
        pool = records.pool
        extras = EXTRAS if self.options.full and pool.targets.dim() == 1 else ()
        progress(0.0, "looking at records")
        features = record_features(observed.model, pool.tensor, pool.targets, observed.loss, extras=extras)
        layers = [name for name in LAYERS if name in features]
        sets = {name: [name] for name in layers} | {"three": layers}
        if extras:
            sets["full"] = list(features)
        attacks: Attacks = {}
        for place, (name, names) in enumerate(sets.items()):
            progress(place / len(sets), f"attack network, {name}")
            attacks[name] = self.whitebox({feature: features[feature] for feature in names}, records)
        for name, scores in loss_attacks(observed, features["last"], records).items():
            attacks[name] = judged(scores, records)
        try:
            for name, scores in self.by_shadows(observed, features["last"], records, cleaned).items():
                attacks[name] = judged(scores, records)
        except (BadArgument, OSError) as error:
            attacks["RMIA"] = Failed(str(error))
        return attacks

    def whitebox(self, features: Features, records: Records) -> Scored:
        """Train the network on known records, judge it on the test's; the paper's best-on-test epoch stands apart."""
        own, known, victims, fresh = (select(features, torch.from_numpy(part)) for part in records.parts)
        curve: list[float] = []

        def watch(number: int, score: Score) -> None:
            curve.append(balanced_accuracy(score(victims), score(fresh), 0.5).value)

        training, options = self.config.training, self.options
        recipe = Recipe(options.attack_epochs, options.attack_lr, seed=training.seed, device=training.device)
        done = train_attack(own, known, recipe=recipe, on_epoch=watch)
        threshold = best_threshold(*(part.numpy() for part in done.held))
        chosen = asdict(done.epochs[done.chosen])
        network = AttackNetwork(**chosen, epoch=done.chosen + 1, last=done.epochs[-1], collapsed=done.collapsed)
        found = measured(done.score(victims).numpy(), done.score(fresh).numpy(), threshold)
        return replace(found, best_on_test=max(curve), network=network)

    def by_shadows(self, observed: Observed, outputs: Tensor, records: Records, cleaned: bool) -> dict[str, Scores]:
        """Scores of all records by RMIA and LiRA; none without shadows or classes."""
        count, targets = self.options.shadows, records.pool.targets
        if not count or targets.dim() != 1:
            return {}
        truth = dense_targets(observed.loss, targets, outputs).double().numpy()
        shadows = Shadows(*read_shadows(self.config, count, self.folder, cleaned), truth, observed.loss)
        return shadow_scores(outputs.double().numpy(), shadows, records.known, both=self.options.lira)


def loss_attacks(observed: Observed, outputs: Tensor, records: Records) -> dict[str, Scores]:
    """Scores of all records by their loss, plain and by class."""
    found = losses(observed.loss, outputs, records.pool.targets)
    scores = {"loss": loss_scores(found)}
    if records.pool.targets.dim() == 1:
        classes, known = labels(records.pool.targets), torch.from_numpy(records.known)
        scores["loss by class"] = calibrated_scores(found, classes, found[known], classes[known])
    return {name: values.numpy() for name, values in scores.items()}


def judged(scores: Scores, records: Records) -> Scored:
    """The test, with the threshold that is best on the records that the attacker knows."""
    threshold = best_threshold(scores[records.own], scores[records.known])
    return measured(scores[records.victims], scores[records.fresh], threshold)


def measured(members: Scores, others: Scores, threshold: float) -> Scored:
    """All figures of a test, with 95 % intervals; no rate that too few records stand for."""
    rates = {str(rate): tpr_at(members, others, rate) if enough(len(others), rate) else None for rate in RATES}
    accuracy = balanced_accuracy(members, others, threshold)
    return Scored(accuracy, auc(members, others), rates, roc=roc(members, others))


class MembershipStudy(AttackStudy[Options, Membership]):
    """Which records the other clients trained on."""

    name = "membership"
    summary = "which records the other clients trained on"
    options = Options
    result = Membership
    needs_shared = False
    defaults = dict(  # noqa: RUF012
        data="cifar10", train_size=4000, test_size=4000, clients=2, model="cnn", width=16, epochs=25
    )

    def shared(self, asked: Asked[Options], folder: Path) -> list[Job[Result]]:
        """All shadows of all defences."""
        count = asked.options.shadows
        if count:
            halves(2, count, torch.Generator())  # refuses odd numbers before anything is trained
        kinds = dict.fromkeys(map(shadow_defence, asked.defences))
        return [
            Job(f"{asked.label}shadow-{kind}-{number}", TrainShadow(asked.under(kind), number, count, folder), Shadow)
            for kind in kinds
            for number in range(count)
        ]

    def attack(self, asked: Asked[Options], defence: str, folder: Path) -> AttackMembership:
        """See `AttackMembership`."""
        return AttackMembership(asked.under(defence), asked.options, folder, self.run_of(asked, defence, folder))

    def present(self, asked: Asked[Options], results: Results[Membership]) -> Shown:
        """Table 3, all figures, intervals, ROC curves, attack networks."""
        return self.framed(asked, results, *page.presented(results))


MEMBERSHIP = MembershipStudy()
