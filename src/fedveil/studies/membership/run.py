"""`fedveil attack membership`: test whether a client learns which records the other clients trained on.

The attacker is client 0. It knows its own records, which are members, and half of a set of non-members. It is tested on
the other clients' records and the other half of the non-members.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from fedveil.attacks.observation import PUBLISHED
from fedveil.attacks.whitebox import Recipe
from fedveil.progress import Progress
from fedveil.report import NOTHING, Curves, Intervals, Section, Table, Text
from fedveil.runs.settings import Config
from fedveil.studies.attack import AttackRequest, AttackStudy, option, read_federations
from fedveil.studies.federations import load_or_train, measure_quality, observe_strongest
from fedveil.studies.jobs import Failure, JobResults, Result, StudyJob, successes
from fedveil.studies.membership import attacks as membership
from fedveil.studies.membership.attacks import GUESS, AttackScores, Membership
from fedveil.studies.study import Presentation, format_estimate, format_percent, mark, read_texts
from fedveil.studies.verdicts import MEMBERSHIP as MEASURE
from fedveil.studies.verdicts import Verdict, headline, judge_defences, verdict_section

TEXTS = read_texts()["membership"]
LAYERS = {"last": "last layer", "second": "second to last", "third": "third to last", "three": "last three"}
NETWORKS = {**LAYERS, "full": "last three, label, loss, gradient"}
BEST_EPOCH = "last three, best epoch on test (the paper's protocol)"
HEADER = ("defence", "view, attacker", "test {}", "train-test gap", *LAYERS.values(), BEST_EPOCH)
FIGURES = ("balanced accuracy, %", "AUC", "TPR at 1 % FPR, %", "TPR at 0.1 % FPR, %", "best epoch on test, %", "remark")


@dataclass(frozen=True)
class MembershipOptions:
    """Flags of the attack."""

    shadows: int = option(4, "number of shadow federations for RMIA and LiRA; 0 for none")
    lira: bool = option(False, "also run LiRA, which needs at least 16 shadows")
    full: bool = option(True, "also run a white-box network with the label, the loss and the head's gradient as inputs")
    attack_epochs: int = option(50, "number of training epochs of the white-box network")
    attack_lr: float = option(1e-3, "learning rate of the white-box network")


@dataclass(frozen=True)
class AttackMembership:
    """A task that runs all attacks of all attackers on one federation."""

    config: Config
    options: MembershipOptions
    folder: Path
    run: Path

    def __call__(self, progress: Progress, results: JobResults) -> Membership:
        """Observe the last broadcast and run the attacks of each attacker."""
        config, options, training = self.config, self.options, self.config.training
        federation, data = load_or_train(config, self.run, progress, results.basis)
        records = membership.divide_records(config, data)
        observations = observe_strongest(federation, config.defence.name)
        recipe = Recipe(options.attack_epochs, options.attack_lr, seed=training.seed, device=training.device)
        shadows = membership.ShadowAttacks(config.defence.name, self.folder, options.shadows, options.lira)
        attacks = membership.RecordAttacks(records, shadows, recipe, options.full, by_layer=True)
        result = {
            name: membership.AttackerResults(attacks.run(observation, name != PUBLISHED, progress))
            for name, observation in observations.items()
        }
        quality = asdict(measure_quality(federation, data))  # measured after the observed rounds
        sizes = dict(zip(("own", "known", "victims", "fresh"), map(len, records.parts), strict=True))
        return Membership(**quality, defence=config.defence.name, seed=training.seed, records=sizes, attackers=result)


class MembershipStudy(AttackStudy[MembershipOptions, Membership]):
    """The membership inference attack."""

    name = "membership"
    summary = "infer which records the other clients trained on"
    options = MembershipOptions
    result = Membership
    requires_shared_jobs = False
    defaults = read_federations()["attack"]["membership"]

    def shared_jobs(self, request: AttackRequest[MembershipOptions], folder: Path) -> list[StudyJob[Result]]:
        """Return the jobs that train the shadows for all defences."""
        return membership.shadow_jobs(
            request.config, request.defences, request.options.shadows, folder, label=request.label
        )

    def attack(self, request: AttackRequest[MembershipOptions], defence: str, folder: Path) -> AttackMembership:
        """Return the task that runs all attacks on one defence."""
        run = self.run_folder(request, defence, folder)
        return AttackMembership(request.config_for(defence), request.options, folder, run)

    def show(self, request: AttackRequest[MembershipOptions], results: Mapping[str, Membership]) -> Presentation:
        """Return the paper's Table 3, all scores, intervals and ROC curves."""
        rows, verdicts = list_attackers(results), judge_attackers(results)
        sections: list[Section] = [
            Text("How to read it", TEXTS.reading),
            auc_chart(rows),
            Table("All figures", ["defence", "attacker", "attack", *FIGURES], list(chain(*map(figure_rows, rows)))),
            *roc_sections(rows),
        ]
        header = [title.format(rows[0].result.metric if rows else "accuracy") for title in HEADER]
        table, top_sections = list(map(main_row, rows)), verdict_section(verdicts)
        return Presentation("", headline(verdicts), header, table, TEXTS.note, sections, top_sections)


class AttackerRow(NamedTuple):
    """The results of one attacker under one defence; `scores` contains the attacks that did not fail."""

    defence: str
    attacker: str
    attacks: Mapping[str, AttackScores | Failure]
    scores: Mapping[str, AttackScores]
    result: Membership


def list_attackers(results: Mapping[str, Membership]) -> list[AttackerRow]:
    """Return the results of every attacker under every defence."""
    return [
        AttackerRow(defence, f"V-out, {name}", attacker.attacks, successes(attacker.attacks), result)
        for defence, result in results.items()
        for name, attacker in result.attackers.items()
    ]


def main_row(row: AttackerRow) -> list[str]:
    """Return a row of the paper's Table 3: accuracy, and the success rate by layer."""
    scale, digits = (100, 1) if row.result.metric == "accuracy" else (1, 4)
    quality = [f"{scale * value:.{digits}f}" for value in (row.result.test, row.result.gap)]
    asr = [format_percent(row.scores[name].accuracy) if name in row.scores else NOTHING for name in LAYERS]
    return [row.defence, row.attacker, *quality, *asr, best_epoch(row.scores.get("three"))]


def best_epoch(scores: AttackScores | None) -> str:
    """Format the accuracy in % at the epoch with the best accuracy on the test records themselves."""
    return NOTHING if scores is None or scores.best_on_test is None else f"{100 * scores.best_on_test:.1f}"


def figure_rows(row: AttackerRow) -> Iterator[list[str]]:
    """Yield one row per attack, with all scores."""
    for name, attack in row.attacks.items():
        labels = [row.defence, row.attacker, NETWORKS.get(name, name)]
        if isinstance(attack, Failure):
            yield [*labels, f"failed: {attack.failed}", *[""] * (len(FIGURES) - 1)]
        else:
            remarks = ["same answer for all records"] * attack.collapsed + ["scores reversed"] * attack.turned
            rates = [*map(format_percent, attack.tpr.values()), best_epoch(attack)]
            yield [
                *labels,
                format_percent(attack.accuracy),
                format_estimate(attack.auc, ".3f"),
                *rates,
                "; ".join([attack.form] * bool(attack.form) + remarks),
            ]


def auc_chart(rows: Sequence[AttackerRow]) -> Intervals:
    """Return a chart of the AUC of every attack."""
    marks = [
        mark(
            NETWORKS.get(name, name), attack.auc if isinstance(attack, AttackScores) else None, f"{defence}, {attacker}"
        )
        for defence, attacker, attacks, _, _ in rows
        for name, attack in attacks.items()
    ]
    return Intervals("AUC of every attack", "AUC", marks, {"guessing": GUESS})


def roc_sections(rows: Sequence[AttackerRow]) -> Iterator[Section]:
    """Yield a chart for each attack, with one ROC curve per defence and attacker."""
    has_several_attackers = len({row.attacker for row in rows}) > 1
    for name in dict.fromkeys(name for row in rows for name in row.scores):
        lines = {
            f"{row.defence} ({row.attacker})" if has_several_attackers else row.defence: [
                (x, y) for x, y in result.roc if y > 0
            ]
            for row in rows
            if (result := row.scores.get(name)) and result.roc
        }
        if lines:
            min_rate = min((x for line in lines.values() for x, _ in line), default=1e-3)
            lines["guessing"] = [(min_rate, min_rate), (1.0, 1.0)]
            axes = f"ROC: {NETWORKS.get(name, name)}", "false positive rate", "true positive rate"
            yield Curves(*axes, lines, log_y=True, log_x=True)


def judge_attackers(results: Mapping[str, Membership]) -> dict[str, Verdict]:
    """Return the verdict on each defence, based on the AUC of the strongest attack."""
    verdicts = {
        defence: MEASURE.compare(
            [
                (name, attack.auc)
                for name, attacker in result.attackers.items()
                for attack in successes(attacker.attacks).values()
            ],
            GUESS,
        )
        for defence, result in results.items()
    }
    return judge_defences(MEASURE, GUESS, verdicts)


MEMBERSHIP = MembershipStudy()
