"""The result of a model's audit: a verdict, the attacks, the exposure of every member, and a page."""

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedveil.errors import BadArgument
from fedveil.files import write_atomically
from fedveil.report import NOTHING, Facts, Intervals, Section, Table, Text, count, write
from fedveil.studies.membership.attacks import GUESS, AttackScores
from fedveil.studies.model_audit.exposure import FALSE_DISCOVERIES, RecordExposure
from fedveil.studies.study import Presentation, format_estimate, format_percent, mark, read_texts
from fedveil.studies.verdicts import Label, Verdict

if TYPE_CHECKING:
    from pandas import DataFrame

TEXTS = read_texts()["model_audit"]
MAX_SHOWN = 50  # number of records in the page's table
ATTACK_HEADER = (
    *("attack", "AUC", "accuracy, %", "TPR at 1 % FPR, %", "TPR at 0.1 % FPR, %"),
    *("AUC on known records", "remark"),
)
RECORD_HEADER = ("rank", "record", "others with this score or higher, %", "score", "stands out")


@dataclass(frozen=True, repr=False)
class ModelAudit:
    """The results of an audit: how much a model reveals about the records that it was trained on.

    Attributes:
        verdict: the label, with the strongest attack; it accounts for the number of attacks.
        attack: the attack that did best on the records that the attacker knows.
        attacks: performance of each attack on the records that the attacker does not know, by name.
        exposures: the exposure of each member, the most exposed first.
        sizes: the number of members and of others.
        loss: name of the loss.
        on_members, on_others: metrics of the model.
        left_out: reasons why attacks were not run, by name.
    """

    verdict: Verdict
    attack: str
    attacks: Mapping[str, AttackScores]
    exposures: tuple[RecordExposure, ...]
    sizes: Mapping[str, int]
    loss: str
    on_members: Mapping[str, float]
    on_others: Mapping[str, float]
    left_out: Mapping[str, str]

    @property
    def label(self) -> Label:
        """The label, which is LEAK if an attack distinguishes members from others or if a member stands out.

        An attack may recognise a few members with certainty although its AUC is close to guessing. If there is no leak,
        the probability of each of these two findings is at most 5 %.
        """
        return Label.LEAK if self.standing_out else self.verdict.label

    @property
    def best(self) -> AttackScores:
        """The performance of the attack that did best on known records."""
        return self.attacks[self.attack]

    @property
    def standing_out(self) -> tuple[RecordExposure, ...]:
        """The members that stand out, the most exposed first."""
        return tuple(exposure for exposure in self.exposures if exposure.stands_out)

    @property
    def sentence(self) -> str:
        """The conclusion, in two sentences."""
        result = {
            Label.LEAK: "The model reveals which records it was trained on",
            Label.NOTHING: "These attacks cannot distinguish the model's training records from others",
        }.get(self.verdict.label, "There are too few records to tell whether the model reveals its training records")
        if self.standing_out and self.verdict.label is not Label.LEAK:
            result = "The model reveals some of the records that it was trained on"
        num_standing_out = len(self.standing_out)
        stands_out = "1 stands out" if num_standing_out == 1 else f"{num_standing_out:,} stand out"
        return f"{result}. Of {count(self.sizes['members'], 'member')}, {stands_out}."

    def __repr__(self) -> str:
        return f"{self.sentence}\n{self.verdict}"

    def to_frame(self) -> "DataFrame":
        """Return a pandas DataFrame with the exposure of each member, the most exposed first."""
        try:
            from pandas import DataFrame
        except ImportError as error:
            raise BadArgument("to_frame", "pandas is not installed", "run pip install pandas") from error
        return DataFrame(self.rows())

    def rows(self) -> list[dict[str, int | float | str]]:
        """Return the exposure of each member as plain values, the most exposed first."""
        return [
            {
                "record": exposure.record,
                "rank": exposure.rank,
                "false_positives": exposure.false_positives.value,
                "low": exposure.false_positives.low,
                "high": exposure.false_positives.high,
                "score": exposure.score,
                "p": exposure.p,
                "attack": exposure.attack,
                "stands_out": exposure.stands_out,
            }
            for exposure in self.exposures
        ]

    def write_records(self, path: str | Path) -> Path:
        """Write the exposure of each member to a CSV file, and return its path."""
        rows, buffer = self.rows(), io.StringIO(newline="")
        writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return write_atomically(Path(path), buffer.getvalue())

    def page(self, path: str | Path) -> Path:
        """Write an HTML page with the verdict, the attacks and the records that stand out, and return its path."""
        return write(self.present().page("fedveil.audit_model(model, members, others)"), Path(path))

    def present(self) -> Presentation:
        """Return the content of the page."""
        marks = [mark(name, scores.auc) for name, scores in self.attacks.items()]
        note = TEXTS.notes["records"].format(shown=MAX_SHOWN, rate=100 * FALSE_DISCOVERIES)
        facts = {name: f"{size:,}" for name, size in self.sizes.items()} | {"loss": self.loss}
        for group, values in (("members", self.on_members), ("others", self.on_others)):
            facts |= {f"{name} on {group}": f"{value:.4g}" for name, value in values.items()}
        rows = [
            [
                str(exposure.rank),
                str(exposure.record),
                format_percent(exposure.false_positives),
                f"{exposure.score:.2f}",
                _yes_or_no(exposure.stands_out),
            ]
            for exposure in self.exposures[:MAX_SHOWN]
        ]
        sections: list[Section] = [
            Table("Most exposed records", RECORD_HEADER, rows, note),
            Intervals("AUC of every attack", "AUC", marks, {"guessing": GUESS}),
            Facts("Records and model", facts),
        ]
        lines = [f"{name}: {reason}" for name, reason in self.left_out.items()]
        sections += [Text("Attacks that were not run", lines)] if lines else []
        sections.append(Text("How to read it", TEXTS.reading))
        title, top_sections = "Audit of a model", [Text("Verdict", [f"{self.verdict}."])]
        return Presentation(
            title, self.sentence, ATTACK_HEADER, list(self.attack_rows()), TEXTS.note, sections, top_sections
        )

    def attack_rows(self) -> Iterator[list[str]]:
        """Yield one table row per attack."""
        for name, scores in self.attacks.items():
            remarks = [*([scores.form] if scores.form else []), *(["scores reversed"] if scores.turned else [])]
            remarks += ["same answer for all records"] * scores.collapsed
            figures = [
                format_estimate(scores.auc, ".3f"),
                format_percent(scores.accuracy),
                *map(format_percent, scores.tpr.values()),
            ]
            title = f"{name} *" if name == self.attack else name
            yield [title, *figures, format_estimate(scores.known, ".3f"), "; ".join(remarks) or NOTHING]


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "no"
