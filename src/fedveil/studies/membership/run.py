"""`fedveil attack membership`: does a client learn which records the others trained on?

The attacker is client 0. It knows its own records, which are members, and half of a set of non-members. It is tested on
the other clients' records and the other half.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from fedveil.attacks import Observation
from fedveil.attacks.features import LAYERS, record_features
from fedveil.attacks.observation import PUBLISHED
from fedveil.attacks.whitebox import Recipe
from fedveil.errors import BadArgument
from fedveil.progress import Progress
from fedveil.runs.config import Config
from fedveil.studies.attack import AttackRequest, AttackStudy, Results, option
from fedveil.studies.federations import load_or_train, measure_quality
from fedveil.studies.jobs import Done, Failed, Job, Result
from fedveil.studies.membership import page
from fedveil.studies.membership.attacks import ShadowAttacks, extra_features, loss_attacks, score_figures, whitebox
from fedveil.studies.membership.records import Records, divide_records, shadow_jobs
from fedveil.studies.membership.results import Attacker, AttackScores, Membership, Sizes
from fedveil.studies.observation import observe_strongest
from fedveil.studies.study import Shown

Attacks = dict[str, AttackScores | Failed]


@dataclass(frozen=True)
class MembershipOptions:
    """Flags of the attack."""

    shadows: int = option(4, "number of shadow federations for RMIA and LiRA; 0 for none")
    lira: bool = option(False, "run LiRA too, which needs 16 shadows or more")
    full: bool = option(True, "run the white-box network with label, loss and gradient of the final layer too")
    attack_epochs: int = option(50, "epochs of the white-box network")
    attack_lr: float = option(1e-3, "learning rate of the white-box network")


@dataclass(frozen=True)
class AttackMembership:
    """All attacks by all attackers on one federation."""

    config: Config
    options: MembershipOptions
    folder: Path
    run: Path

    def __call__(self, progress: Progress, done: Done) -> Membership:
        """Observe the last broadcast, and run the attacks of each attacker."""
        config = self.config
        federation, data = load_or_train(config, self.run, progress, done.basis)
        records = divide_records(config, data)
        seen = observe_strongest(federation, config.defence.name)
        found = {
            name: Attacker("V-out", self.attacks(progress, observed, records, name != PUBLISHED))
            for name, observed in seen.items()
        }
        quality = asdict(measure_quality(federation, data))  # of the model after the rounds that were observed
        sizes, seed = Sizes(*map(len, records.parts)), config.training.seed
        return Membership(**quality, defence=config.defence.name, seed=seed, records=sizes, attackers=found)

    def attacks(self, progress: Progress, observed: Observation, records: Records, cleaned: bool) -> Attacks:
        """Run all attacks of one attacker; `cleaned`: it has removed noise from the model that it received."""
        options, training, pool = self.options, self.config.training, records.pool
        progress(0.0, "looking at records")
        extras = extra_features(observed, records) if options.full else ()
        features = record_features(observed.model, pool.tensor, pool.targets, observed.loss, extras=extras)
        layers = [name for name in LAYERS if name in features]
        sets = {name: [name] for name in layers} | {"three": layers}
        if extras:
            sets["full"] = list(features)
        recipe = Recipe(options.attack_epochs, options.attack_lr, seed=training.seed, device=training.device)
        attacks: Attacks = {}
        for number, (name, names) in enumerate(sets.items()):
            progress(number / len(sets), f"attack network, {name}")
            attacks[name], _ = whitebox(features, names, records, recipe, watched=True)
        for name, scores in loss_attacks(observed, features["last"], records).items():
            attacks[name] = score_figures(scores, records)
        try:
            shadows = ShadowAttacks(self.config, self.folder, options.shadows, options.lira)
            for name, scores in shadows.scores(observed, features["last"], records, cleaned).items():
                attacks[name] = score_figures(scores, records)
        except (BadArgument, OSError) as error:
            attacks["RMIA"] = Failed(str(error))
        return attacks


class MembershipStudy(AttackStudy[MembershipOptions, Membership]):
    """Membership inference."""

    name = "membership"
    summary = "which records the other clients trained on"
    options = MembershipOptions
    result = Membership
    needs_shared = False
    defaults = dict(  # noqa: RUF012
        data="cifar10", train_size=4000, test_size=4000, clients=2, model="cnn", width=16, epochs=25
    )

    def shared(self, asked: AttackRequest[MembershipOptions], folder: Path) -> list[Job[Result]]:
        """Return all shadows of all defences."""
        return shadow_jobs(asked.config, asked.defences, asked.options.shadows, folder, label=asked.label)

    def attack(self, asked: AttackRequest[MembershipOptions], defence: str, folder: Path) -> AttackMembership:
        """Return all attacks on one defence."""
        run = self.run_folder(asked, defence, folder)
        return AttackMembership(asked.config_for(defence), asked.options, folder, run)

    def show(self, asked: AttackRequest[MembershipOptions], results: Results[Membership]) -> Shown:
        """Return Table 3, all figures, intervals, ROC curves and the attack networks."""
        return page.show(results)


MEMBERSHIP = MembershipStudy()
