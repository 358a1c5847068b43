"""`fedveil attack membership`: does a client learn which records the others trained on?

The attacker is client 0. It knows its own records, members all of them, and half of a set of non-members; it is tested
on the other clients' records and the other half.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from fedveil.attacks import Observed
from fedveil.attacks.features import LAYERS, record_features
from fedveil.attacks.observed import PUBLISHED
from fedveil.attacks.whitebox import Recipe
from fedveil.errors import BadArgument
from fedveil.progress import Progress
from fedveil.runs.config import Config
from fedveil.studies.attack import Asked, AttackStudy, Results, option
from fedveil.studies.federations import load_or_train, measure_quality
from fedveil.studies.jobs import Done, Failed, Job, Result
from fedveil.studies.membership import page
from fedveil.studies.membership.attacks import ByShadows, extras_of, judged, loss_attacks, whitebox
from fedveil.studies.membership.records import Records, records_of, shadow_jobs
from fedveil.studies.membership.results import Attacker, Membership, Scored, Sizes
from fedveil.studies.observation import observe_strongest
from fedveil.studies.study import Shown

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
        federation, data = load_or_train(config, self.run, progress, done.basis)
        records = records_of(config, data)
        seen = observe_strongest(federation, config.defence.name)
        found = {
            name: Attacker("V-out", self.attacks(progress, observed, records, name != PUBLISHED))
            for name, observed in seen.items()
        }
        quality, seed, sizes = (
            asdict(measure_quality(federation, data)),
            config.training.seed,
            Sizes(*map(len, records.parts)),
        )
        return Membership(**quality, defence=config.defence.name, seed=seed, records=sizes, attackers=found)

    def attacks(self, progress: Progress, observed: Observed, records: Records, cleaned: bool) -> Attacks:
        """All attacks by one attacker; `cleaned` says that its model is no longer the one it received."""
        options, training, pool = self.options, self.config.training, records.pool
        progress(0.0, "looking at records")
        extras = extras_of(observed, records) if options.full else ()
        features = record_features(observed.model, pool.tensor, pool.targets, observed.loss, extras=extras)
        layers = [name for name in LAYERS if name in features]
        sets = {name: [name] for name in layers} | {"three": layers}
        if extras:
            sets["full"] = list(features)
        recipe = Recipe(options.attack_epochs, options.attack_lr, seed=training.seed, device=training.device)
        attacks: Attacks = {}
        for place, (name, names) in enumerate(sets.items()):
            progress(place / len(sets), f"attack network, {name}")
            attacks[name], _ = whitebox(features, names, records, recipe, watched=True)
        for name, scores in loss_attacks(observed, features["last"], records).items():
            attacks[name] = judged(scores, records)
        try:
            shadows = ByShadows(self.config, self.folder, options.shadows, options.lira)
            for name, scores in shadows.scores(observed, features["last"], records, cleaned).items():
                attacks[name] = judged(scores, records)
        except (BadArgument, OSError) as error:
            attacks["RMIA"] = Failed(str(error))
        return attacks


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
        return shadow_jobs(asked.config, asked.defences, asked.options.shadows, folder, label=asked.label)

    def attack(self, asked: Asked[Options], defence: str, folder: Path) -> AttackMembership:
        """See `AttackMembership`."""
        return AttackMembership(asked.under(defence), asked.options, folder, self.run_of(asked, defence, folder))

    def present(self, asked: Asked[Options], results: Results[Membership]) -> Shown:
        """Table 3, all figures, intervals, ROC curves, attack networks."""
        return self.framed(asked, results, *page.presented(results), verdict=page.verdict(results))


MEMBERSHIP = MembershipStudy()
