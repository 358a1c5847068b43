"""The page of a poisoning attack: accuracy by attack and limit."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from fedveil.attacks.poisoning import ATTACKS
from fedveil.report import NOTHING, Intervals, Section, Table, Text
from fedveil.studies.estimates import Estimate, average, percent, text
from fedveil.studies.jobs import Failed
from fedveil.studies.poisoning.results import Ending, Poisoning
from fedveil.studies.study import Shown
from fedveil.studies.tables import failed_row, mark

HONEST, UNLIMITED, BOUNDED = "honest", "no limits", "bounds"
REFUSED = "refused by bounds: hostile, honest"
FIGURES = ("accuracy, %", "points from honest", "ended", "refused, hostile", "refused, honest")
NOTE = (
    "Accuracy on test records in %, mean over seeds. The row of honest clients shows the cost of the limits alone. The"
    " column of bounds takes the mean of the accepted updates. A run that ended early has no accuracy."
)
READING = (
    "The last clients are hostile. They see all honest updates of a round before they reply, but no secret. A rule is"
    " given their number. Bounds are those of fedveil.Limits, by default with its defaults.",
    "Points from honest: difference to the run with the same seed, honest clients only and no limits. Intervals:"
    " Student's, 95 %, over seeds. A better attack may do more damage: docs/hostile.md states what the limits promise.",
)


class Setting(NamedTuple):
    """One defence, one attack and one limit: the runs of all seeds."""

    defence: str
    attack: str
    limits: str
    endings: list[Ending]
    honest: list[Ending]

    @property
    def accuracy(self) -> Estimate | None:
        """Mean over the seeds whose run did not end early."""
        found = [one.accuracy for one in self.endings if one.accuracy is not None]
        return average(found) if found else None

    @property
    def points(self) -> Estimate | None:
        """Difference from honest runs without limits, seed by seed."""
        found = [
            100 * (one.accuracy - other.accuracy)
            for one, other in zip(self.endings, self.honest, strict=False)
            if one.accuracy is not None and other.accuracy is not None
        ]
        return average(found) if found else None

    @property
    def ended(self) -> int:
        """Number of seeds whose run ended early."""
        return sum(bool(one.ended) for one in self.endings)

    @property
    def refusals(self) -> tuple[int, int]:
        """Numbers of refused updates: of hostile clients, of honest ones."""
        return sum(one.refused for one in self.endings), sum(one.wronged for one in self.endings)

    def cell(self) -> str:
        """Return the accuracy in %, and how many runs ended early if any did."""
        if not self.endings:
            return NOTHING
        if self.accuracy is None:
            return "ended"
        value = f"{100 * self.accuracy.value:.1f}"
        return f"{value} ({self.ended} of {len(self.endings)} ended)" if self.ended else value


def settings(defence: str, result: Poisoning, attack: str, limits: Sequence[str]) -> list[Setting]:
    """Return one attack under each limit; nothing for an attack without figures."""
    if result.missing(attack):
        return []
    honest = result.endings(HONEST, UNLIMITED)
    return [Setting(defence, attack, name, result.endings(attack, name), honest) for name in limits]


def main_rows(
    results: Mapping[str, Poisoning | Failed], limits: Sequence[str], hostile: int, columns: int
) -> Iterator[list[str]]:
    """Yield one row per defence and attack."""
    for defence, result in results.items():
        if isinstance(result, Failed):
            yield failed_row(defence, columns)
            continue
        for attack in result.attacks:
            if why := result.missing(attack):
                yield [defence, attack, why, *[""] * (columns - 3)]
                continue
            own = settings(defence, result, attack, limits)
            bounded = next(one for one in own if one.limits == BOUNDED)
            sent = 0 if attack == HONEST else hostile * sum(one.rounds for one in bounded.endings)
            theirs, ours = bounded.refusals
            yield [defence, attack, *(one.cell() for one in own), f"{theirs}/{sent}, {ours}"]


def verdict(every: Sequence[Setting]) -> str:
    """Return the accuracy that the worst attack leaves under each limit, for the defence that suffers most."""
    honest = [one.accuracy.value for one in every if (one.attack, one.limits) == (HONEST, UNLIMITED) and one.accuracy]
    left: dict[str, float] = {}  # -1 where a run ended early
    for one in every:
        if one.attack != HONEST and one.endings:
            value = one.accuracy.value if one.accuracy and not one.ended else -1.0
            left[one.limits] = min(value, left.get(one.limits, 1.0))
    if not honest or not left:
        return "No verdict: no run with hostile clients can be compared with an honest one."
    rules = {name: value for name, value in left.items() if name not in (UNLIMITED, BOUNDED)}
    best = max(rules, key=rules.__getitem__, default="")
    found = {name: left[name] for name in (UNLIMITED, BOUNDED, best) if name in left}
    said = [f"{f'{100 * value:.1f} %' if value >= 0 else 'no model'} ({name})" for name, value in found.items()]
    return f"Accuracy under the worst attack: {', '.join(said)}; {100 * min(honest):.1f} % with honest clients."


def show(results: Mapping[str, Poisoning | Failed], limits: Sequence[str], hostile: int) -> Shown:
    """Return the table and the sections: the attacks, intervals, all figures, why runs ended early."""
    header = ["defence", "attack", *limits, REFUSED]
    done = {name: one for name, one in results.items() if isinstance(one, Poisoning)}
    every = [one for name, own in done.items() for attack in own.attacks for one in settings(name, own, attack, limits)]
    attacks = dict.fromkeys(attack for one in done.values() for attack in one.attacks if attack != HONEST)
    figures = [
        [*one[:3], percent(one.accuracy), text(one.points, "+.1f"), str(one.ended), *map(str, one.refusals)]
        for one in every
    ]
    sections: list[Section] = [
        Text("How to read it", READING),
        Table("The attacks", ["attack", "hostile clients send"], [[name, ATTACKS[name].summary] for name in attacks]),
    ]
    for name in done:
        marks = [mark(one.limits, one.accuracy, one.attack, 100) for one in every if one.defence == name]
        sections.append(Intervals(f"Accuracy: {name}", "accuracy, %", marks, {}))
    sections.append(Table("All figures", ["defence", "attack", "limits", *FIGURES], figures))
    ended = [
        f"{', '.join(one[:3])}: {next(run.ended for run in one.endings if run.ended)[:200]}"
        for one in every
        if one.ended
    ]
    sections += [Text("Runs that ended early", ended)] if ended else []
    rows = list(main_rows(results, limits, hostile, len(header)))
    return Shown("", verdict(every), header, rows, NOTE, sections)
