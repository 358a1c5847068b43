"""Verdicts for all studies: thresholds, and labels with the estimates that they are based on.

A verdict is about the strongest of several attackers. Whether attackers find a leak is decided by Holm's procedure
(1979), so that with probability 0.95 no attacker is said to find a leak that is not there. Intervals hold for all
attackers at once (Bonferroni).
"""

import enum
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fedveil.attacks.observation import PUBLISHED
from fedveil.attacks.scores import Estimate
from fedveil.report import Section, Text
from fedveil.studies.study import capitalise, display_name, text

ALPHA = 0.05  # maximum probability of a false finding in a verdict on several attackers
CLEAR = 0.1  # a leak is clear above this fraction of the distance between guessing and full knowledge
SLIGHT = 0.2  # a leak is slight below this fraction of the distance between guessing and the undefended result
FULL = 0.8  # a leak is full at or above this fraction of the distance between guessing and the undefended result
LAG = 0.2  # published attacks are mentioned if they fall short by more than this fraction of the strongest advantage
RECOGNISED = 10.0  # a record counts as known if its PSNR is at least this many dB above guessing
MAX_MEMBERSHIP = 0.52  # limit for hardening: the attacker's balanced accuracy may not exceed this value
MAX_COST = 0.005  # limit for hardening: the model may not lose more accuracy than this


class Label(enum.StrEnum):
    """The label of a verdict, which compares the strongest attackers with and without the defence."""

    LEAK = "LEAK"
    PARTIAL = "PARTIAL LEAK"
    SLIGHT = "SLIGHT LEAK"
    PROTECTED = "PROTECTED"
    NOTHING = "NOTHING FOUND"
    TOO_FEW = "TOO FEW TRIALS"
    UNTESTED = "UNTESTED"


class Finding(enum.IntEnum):
    """The conclusion drawn from an attacker's interval, in increasing order of evidence for a leak."""

    NOTHING = 0
    TOO_FEW = 1
    FOUND = 2


@dataclass(frozen=True)
class AttackerFigure:
    """The estimate for one attacker, and the conclusion drawn from its interval.

    Attributes:
        attacker: name of the attacker.
        figure: the estimate.
        finding: the conclusion.
        below: whether the estimate is below guessing; an attacker that reverses its answers then reaches 1 - figure.
        enough: if there were too few trials, the number that would be enough; None if it is unknown.
    """

    attacker: str
    figure: Estimate
    finding: Finding
    below: bool = False
    enough: int | None = None

    @property
    def value(self) -> float:
        """The value of the estimate, or 1 minus the value if it is below guessing."""
        return 1 - self.figure.value if self.below else self.figure.value


@dataclass(frozen=True)
class Measure:
    """A kind of estimate: its format, and the values that count as a leak.

    Attributes:
        subject: information that may leak.
        figure: name of the estimate.
        form, scale, unit: format, factor and unit for printing.
        headroom: distance from guessing to full knowledge; None if full knowledge is 1.
        trials: what the estimate is based on, in the plural.
        two_sided: whether values below guessing reveal as much as values above it.
        needs_adaptive: whether a defence counts as untested unless an adaptive attacker was run.
    """

    subject: str
    figure: str
    form: str = ".2f"
    scale: float = 1.0
    unit: str = ""
    headroom: float | None = None
    trials: str = "trials"
    two_sided: bool = False
    needs_adaptive: bool = False

    def full(self, guess: float) -> float:
        """Return the value that an attacker with full knowledge would reach."""
        return 1.0 if self.headroom is None else guess + self.headroom

    def clear(self, guess: float) -> float:
        """Return the distance from guessing at which a leak is clear."""
        return CLEAR * (self.full(guess) - guess)

    def compare(self, figures: Sequence[tuple[str, Estimate]], guess: float, trials: int = 2) -> list[AttackerFigure]:
        """Draw a conclusion about each of several attackers, given 95 % intervals of their estimates.

        In order of p-value, an attacker finds a leak if its interval of level 1 - ALPHA / (number of attackers left)
        does not include guessing; the first that does not ends the search (Holm 1979).
        """
        level, still, result = 1 - ALPHA / max(len(figures), 1), True, dict[int, bool]()
        p = [figure.p_value(guess) for _, figure in figures]
        for rank, index in enumerate(sorted(range(len(p)), key=p.__getitem__)):
            still = still and p[index] <= ALPHA / (len(p) - rank)
            result[index] = still
        return [
            self.conclude(name, figure.at_level(level) if len(figures) > 1 else figure, guess, result[index], trials)
            for index, (name, figure) in enumerate(figures)
        ]

    def conclude(self, attacker: str, figure: Estimate, guess: float, differs: bool, trials: int) -> AttackerFigure:
        """Draw a conclusion about one attacker; `differs` states whether its estimate differs from guessing.

        - Found: the estimate differs from guessing, and is above it or, if the measure is two-sided, below it.
        - Nothing found: the interval does not include a clear leak.
        - Too few trials: the interval includes a clear leak, or there was only one trial.
        """
        below = figure.value < guess
        if trials < 2 or figure.repeats == 1:
            return AttackerFigure(attacker, figure, Finding.TOO_FEW)
        if differs and (self.two_sided or not below):
            return AttackerFigure(attacker, figure, Finding.FOUND, below)
        distance = self.clear(guess)
        if figure.high > guess + distance or (self.two_sided and figure.low < guess - distance):
            return AttackerFigure(attacker, figure, Finding.TOO_FEW, enough=self.enough_trials(figure, guess))
        return AttackerFigure(attacker, figure, Finding.NOTHING)

    def enough_trials(self, figure: Estimate, guess: float) -> int | None:
        """Return a number of trials that would be enough for a conclusion, whatever the true value.

        An interval that is shorter than the distance to a clear leak does not include both. The length is proportional
        to 1 / sqrt(trials), if their spread stays the same.
        """
        ratio = (figure.high - figure.low) / self.clear(guess)
        return math.ceil(figure.sample_size * ratio**2) if figure.sample_size else None

    def number(self, value: float) -> str:
        """Format a value with its unit."""
        return f"{self.scale * value:{self.form}}{self.unit}"


AGREEMENT = Measure("the model", "agreement", ".0f", 100, " %", trials="records")
RANKING = Measure("the model", "ranking AUC", trials="records")
MEMBERSHIP = Measure("membership", "AUC", trials="records", two_sided=True)
RECORD = Measure("single records", "PSNR", ".1f", unit=" dB", headroom=RECOGNISED, needs_adaptive=True)
GRADIENTS = Measure("images from gradients", "PSNR", ".1f", unit=" dB", headroom=RECOGNISED)
INVERSION = Measure("private classes", "attack success", ".0f", 100, " %")


@dataclass(frozen=True)
class Verdict:
    """The label for one measure and one defence, with the estimates that it is based on.

    Attributes:
        label: the label.
        measure: the measure.
        guess: value of the best constant answer.
        strongest: the strongest attacker.
        undefended: the strongest attacker without a defence; None if it was not measured.
        published: the strongest published attacker; None if none was run.
        enough: if there were too few trials, the number that would be enough for all attackers, if it is known.
    """

    label: Label
    measure: Measure
    guess: float
    strongest: AttackerFigure
    undefended: AttackerFigure | None = None
    published: AttackerFigure | None = None
    enough: int | None = None

    def __str__(self) -> str:
        """Return the label, the estimate with its interval, and reference values."""
        strongest, measure = self.strongest, self.measure
        figure = f"{text(strongest.figure, measure.form, measure.scale)}{measure.unit}"
        sentence = f"{self.label}: {measure.figure} {figure} ({strongest.attacker})"
        if strongest.below:
            sentence += f", below chance: {measure.number(strongest.value)} for an attacker that reverses the scores"
        references = [f"guessing {measure.number(self.guess)}"]
        if self.undefended and self.undefended is not strongest:
            references.append(f"undefended {measure.number(self.undefended.figure.value)}")
        result = strongest.finding is Finding.FOUND
        if result and self.published and strongest.value - self.published.value > LAG * (strongest.value - self.guess):
            references.append(f"{PUBLISHED} {measure.number(self.published.figure.value)}")
        if self.label is Label.TOO_FEW and self.enough:
            references.append(f"about {self.enough:,} {measure.trials} would be enough")
        return f"{sentence}; {', '.join(references)}"


def find_strongest(figures: Iterable[AttackerFigure]) -> AttackerFigure | None:
    """Return the attacker with the strongest finding; ties are broken by value."""
    return max(figures, key=lambda figure: (figure.finding, figure.value), default=None)


def judge(
    measure: Measure,
    guess: float,
    figures: Sequence[AttackerFigure],
    undefended: Sequence[AttackerFigure],
    published: Collection[str] = (PUBLISHED,),
) -> Verdict | None:
    """Return the verdict on one defence, or None if there are no attackers.

    `published` contains the names of the attackers that do not know the defence.
    """
    strongest, reference = find_strongest(figures), find_strongest(undefended)
    if strongest is None:
        return None
    known = find_strongest(other for other in figures if other.attacker in published)
    label = choose_label(measure, guess, strongest, reference)
    if label is Label.SLIGHT and any(other.finding is Finding.TOO_FEW for other in figures):
        label = Label.TOO_FEW
    if measure.needs_adaptive and strongest is known and label not in (Label.LEAK, Label.NOTHING, Label.TOO_FEW):
        label = Label.UNTESTED
    enough = max((other.enough for other in figures if other.enough), default=None)
    return Verdict(label, measure, guess, strongest, reference, known, enough)


def choose_label(measure: Measure, guess: float, strongest: AttackerFigure, undefended: AttackerFigure | None) -> Label:
    """Return the label, given the strongest attackers with the defence (`strongest`) and without it (`undefended`)."""
    leaks = undefended is not None and undefended.finding is Finding.FOUND
    if strongest.finding is Finding.TOO_FEW:
        return Label.TOO_FEW
    if strongest.finding is Finding.NOTHING:
        return Label.PROTECTED if leaks else Label.NOTHING
    if undefended is None or not leaks:
        return Label.LEAK
    span = min(undefended.value, measure.full(guess)) - guess
    fraction = (strongest.value - guess) / span if span > 0 else 0.0
    return Label.SLIGHT if fraction < SLIGHT else Label.PARTIAL if fraction < FULL else Label.LEAK


def judge_defences(
    measure: Measure,
    guess: float,
    by_defence: Mapping[str, Sequence[AttackerFigure]],
    published: Collection[str] = (PUBLISHED,),
) -> dict[str, Verdict]:
    """Return the verdict on each defence that was attacked; "plain" is the undefended federation."""
    undefended = by_defence.get("plain", ())
    verdicts = {name: judge(measure, guess, figures, undefended, published) for name, figures in by_defence.items()}
    return {name: verdict for name, verdict in verdicts.items() if verdict}


def summarise(verdicts: Mapping[str, Verdict]) -> str:
    """Summarise the verdicts on one measure, for example "Membership: LEAK (veil 0.69), PROTECTED (spn 0.51)"."""
    by_label: dict[Label, list[str]] = {}
    for name, verdict in verdicts.items():
        by_label.setdefault(verdict.label, []).append(
            f"{display_name(name)} {verdict.measure.number(verdict.strongest.value)}"
        )
    first = next(iter(verdicts.values()))
    labels = ", ".join(f"{label} ({', '.join(names)})" for label, names in by_label.items())
    return f"{capitalise(first.measure.subject)}: {labels}; guessing {first.measure.number(first.guess)}"


def headline(verdicts: Mapping[str, Verdict]) -> str:
    """Return the verdict on an attack in one sentence."""
    if not verdicts:
        return "No verdict: the attack failed under every defence."
    missing = "" if "plain" in verdicts else "; no undefended federation was attacked"
    return f"{summarise(verdicts)}{missing}."


def verdict_section(verdicts: Mapping[str, Verdict]) -> list[Section]:
    """Return a section with the full verdicts, one paragraph each."""
    return [Text("Verdict", [f"{name}: {verdict}." for name, verdict in verdicts.items()])] if verdicts else []
