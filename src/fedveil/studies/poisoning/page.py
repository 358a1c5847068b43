"""What hostile clients did, as a table for the terminal and sections of a page."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from fedveil.attacks.poisoning import ATTACKS
from fedveil.report import NOTHING, Intervals, Section, Table, Text
from fedveil.studies.estimates import Estimate, average, percent, text
from fedveil.studies.jobs import Failed
from fedveil.studies.poisoning.results import Ending, Poisoning
from fedveil.studies.tables import Presented, failed_row, mark

HONEST, UNLIMITED, BOUNDED = "honest", "no limits", "bounds"
REFUSED = "refused by bounds: hostile, honest"
FIGURES = ("accuracy, %", "points from honest", "ended", "refused, hostile", "refused, honest")
NOTE = (
    "Accuracy on test records in %, mean over seeds; the row of honest clients shows what limits alone cost. The"
    " bounds are the mean's; rules have none from medians. An ended run has no accuracy."
)
EXPLAINED = (
    "The last clients are hostile and see all honest uploads of a round before they answer, but no secret. A rule is"
    " told how many there are. Bounds are those of fedveil.Limits, by default with its defaults.",
    "Points from honest: the accuracy of a run less that of the run with the same seed in which every client is honest"
    " and there are no limits. Intervals are Student's, 95 %, over seeds.",
    "How far an attack goes in these rounds is no bound on what a better one does: docs/hostile.md says what the limits"
    " promise.",
)


class Row(NamedTuple):
    """One defence, one attack, one kind of limits: all seeds."""

    defence: str
    attack: str
    limits: str
    endings: list[Ending]
    honest: list[Ending]

    @property
    def accuracy(self) -> Estimate | None:
        """Over the seeds that did not end."""
        found = [one.accuracy for one in self.endings if one.accuracy is not None]
        return average(found) if found else None

    @property
    def points(self) -> Estimate | None:
        """Difference from honest runs without limits, seed by seed."""
        pairs = zip(self.endings, self.honest, strict=False)
        found = [
            100 * (one.accuracy - other.accuracy)
            for one, other in pairs
            if one.accuracy is not None and other.accuracy is not None
        ]
        return average(found) if found else None

    @property
    def ended(self) -> int:
        """Seeds whose runs ended before their last round."""
        return sum(bool(one.ended) for one in self.endings)

    def cell(self) -> str:
        """Accuracy in %, and how many runs ended if some did."""
        if not self.endings:
            return NOTHING
        if self.accuracy is None:
            return "ended"
        value = f"{100 * self.accuracy.value:.1f}"
        return f"{value} ({self.ended} of {len(self.endings)} ended)" if self.ended else value


def rows_of(defence: str, result: Poisoning, attack: str, limits: Sequence[str]) -> list[Row]:
    """One attack with each of the limits."""
    honest = result.endings(HONEST, UNLIMITED)
    return [Row(defence, attack, name, result.endings(attack, name), honest) for name in limits]


def main_rows(
    results: Mapping[str, Poisoning | Failed], limits: Sequence[str], hostile: int, columns: int
) -> Iterator[list[str]]:
    """One row per defence and attack."""
    for defence, result in results.items():
        if isinstance(result, Failed):
            yield failed_row(defence, columns)
            continue
        for attack in result.attacks:
            if why := result.without_figures(attack):
                yield [defence, attack, why, *[""] * (columns - 3)]
                continue
            own = rows_of(defence, result, attack, limits)
            bounded = next(row.endings for row in own if row.limits == BOUNDED)
            sent = 0 if attack == HONEST else hostile * sum(one.rounds for one in bounded)
            refused = [sum(one.refused for one in bounded), sum(one.wronged for one in bounded)]
            yield [defence, attack, *(row.cell() for row in own), f"{refused[0]}/{sent}, {refused[1]}"]


def all_rows(rows: Sequence[Row]) -> Iterator[list[str]]:
    """All figures."""
    for row in rows:
        counts = [row.ended, sum(one.refused for one in row.endings), sum(one.wronged for one in row.endings)]
        figures = [percent(row.accuracy), text(row.points, "+.1f"), *map(str, counts)]
        yield [row.defence, row.attack, row.limits, *figures]


def reasons(rows: Sequence[Row]) -> list[str]:
    """Why runs ended, once for each row."""
    return [
        f"{row.defence}, {row.attack}, {row.limits}: {next(one.ended for one in row.endings if one.ended)[:200]}"
        for row in rows
        if row.ended
    ]


def verdict(results: Mapping[str, Poisoning | Failed], limits: Sequence[str]) -> str:
    """What the worst attack leaves with each of the limits, under the defence that suffers most, in one sentence."""
    done = {name: one for name, one in results.items() if isinstance(one, Poisoning)}
    honest = [row.accuracy for name, one in done.items() for row in rows_of(name, one, HONEST, [UNLIMITED])]
    reached = [one.value for one in honest if one]
    left: dict[str, float] = {}  # -1 where a run ended
    for name, one in done.items():
        attacks = [attack for attack in one.attacks if attack != HONEST and not one.without_figures(attack)]
        for row in (row for attack in attacks for row in rows_of(name, one, attack, limits) if row.endings):
            value = row.accuracy.value if row.accuracy and not row.ended else -1.0
            left[row.limits] = min(value, left.get(row.limits, 1.0))
    if not reached or not left:
        return "Nothing is known: no run with hostile clients could be compared with an honest one."
    rules = {name: value for name, value in left.items() if name not in (UNLIMITED, BOUNDED)}
    best = max(rules, key=rules.__getitem__, default="")
    said = [(f"with {UNLIMITED}", left.get(UNLIMITED)), (f"with {BOUNDED}", left.get(BOUNDED))]
    said += [(f"with the best rule ({best})", rules[best])] if rules else []
    words = ", ".join(f"{_left(value)} {how}" for how, value in said if value is not None)
    return f"With honest clients accuracy is {_left(min(reached))}; the worst attack leaves {words}."


def _left(accuracy: float) -> str:
    return f"{100 * accuracy:.1f} %" if accuracy >= 0 else "no model"


def presented(results: Mapping[str, Poisoning | Failed], limits: Sequence[str], hostile: int) -> Presented:
    """The table, and the sections: what attacks do, intervals, all figures, why runs ended."""
    header = ["defence", "attack", *limits, REFUSED]
    done = {name: one for name, one in results.items() if isinstance(one, Poisoning)}
    rows = [
        row
        for name, one in done.items()
        for attack in one.attacks
        if not one.without_figures(attack)
        for row in rows_of(name, one, attack, limits)
    ]
    named = {attack: None for one in done.values() for attack in one.attacks if attack != HONEST}
    sections: list[Section] = [
        Text("How to read it", EXPLAINED),
        Table("The attacks", ["attack", "a hostile client sends"], [[name, ATTACKS[name].summary] for name in named]),
    ]
    for name in done:
        marks = [mark(row.limits, row.accuracy, row.attack, 100) for row in rows if row.defence == name]
        sections.append(Intervals(f"Accuracy: {name}", "accuracy, %", marks, {}))
    sections.append(Table("All figures", ["defence", "attack", "limits", *FIGURES], list(all_rows(rows))))
    ended = reasons(rows)
    sections += [Text("Runs that ended", ended)] if ended else []
    return header, list(main_rows(results, limits, hostile, len(header))), NOTE, sections
