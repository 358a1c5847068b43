"""Verdicts for all studies: one table of thresholds, and a label with its value and interval."""

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fedveil.attacks.observation import PUBLISHED
from fedveil.attacks.scores import Estimate
from fedveil.report import Section, Text
from fedveil.studies.presentation import capitalise, display_name, text

CLEAR = 0.1  # a leak is clear at this fraction of the way from guessing to full knowledge, or above
SLIGHT, FULL = 0.2, 0.8  # fractions of the way from guessing to no defence: a slight leak below, a full one above
LAG = 0.2  # published attacks are mentioned if they fall short of the strongest attacker by this fraction of the way
RECOGNISED = 10.0  # dB above guessing, a tenth of the squared error: the record is known, and more adds nothing
MAX_MEMBERSHIP, MAX_COST = 0.52, 0.005  # limits for hardening: the attacker's balanced accuracy, and the accuracy lost


class Label(enum.StrEnum):
    """The outcome, given the strongest attackers with the defence and without one."""

    LEAK = "LEAK"
    PARTIAL = "PARTIAL LEAK"
    SLIGHT = "SLIGHT LEAK"
    PROTECTED = "PROTECTED"
    NOTHING = "NOTHING FOUND"
    TOO_FEW = "TOO FEW TRIALS"
    UNTESTED = "UNTESTED"


class Finding(enum.IntEnum):
    """The conclusion from the interval of one attacker's estimate, ordered by how much it says about a leak."""

    NOTHING = 0
    TOO_FEW = 1
    FOUND = 2


@dataclass(frozen=True)
class AttackerFigure:
    """The estimate for one attacker, and the conclusion from its interval.

    Attributes:
        below: whether the finding is below guessing; an attacker that reverses its answers then reaches 1 - figure.
    """

    attacker: str
    figure: Estimate
    finding: Finding
    below: bool = False

    @property
    def value(self) -> float:
        """The estimate, in the direction of the finding."""
        return 1 - self.figure.value if self.below else self.figure.value


@dataclass(frozen=True)
class Measure:
    """One kind of estimate: how it is printed, and at which value it is a leak.

    Attributes:
        subject: what may leak.
        figure: the name of the estimate.
        form, scale, unit: how it is printed.
        headroom: distance from guessing to full knowledge; None if full knowledge is 1.
        two_sided: whether values below guessing reveal as much as those above it.
        needs_adaptive: whether finding nothing is evidence only with an adaptive attacker.
    """

    subject: str
    figure: str
    form: str = ".2f"
    scale: float = 1.0
    unit: str = ""
    headroom: float | None = None
    two_sided: bool = False
    needs_adaptive: bool = False

    def full(self, guess: float) -> float:
        """Return the value for an attacker that knows everything."""
        return 1.0 if self.headroom is None else guess + self.headroom

    def assess(self, attacker: str, figure: Estimate, guess: float, trials: int = 2) -> AttackerFigure:
        """Draw the conclusion from the interval of an attacker's estimate.

        Found: the interval is above guessing or, if both sides count, below it. Nothing found: it includes guessing or
        is below it, and includes no clear leak. Too few trials: it includes both, or there is a single trial.
        """
        clear, below = CLEAR * (self.full(guess) - guess), self.two_sided and figure.high < guess
        if trials < 2:
            return AttackerFigure(attacker, figure, Finding.TOO_FEW)
        if figure.low > guess or below:
            return AttackerFigure(attacker, figure, Finding.FOUND, below)
        wide = figure.high > guess + clear or (self.two_sided and figure.low < guess - clear)
        return AttackerFigure(attacker, figure, Finding.TOO_FEW if wide else Finding.NOTHING)

    def number(self, value: float) -> str:
        """Format a value with its unit."""
        return f"{self.scale * value:{self.form}}{self.unit}"


AGREEMENT = Measure("the model", "agreement", ".0f", 100, " %")
RANKING = Measure("the model", "ranking AUC")
MEMBERSHIP = Measure("membership", "AUC", two_sided=True)
RECORD = Measure("single records", "PSNR", ".1f", unit=" dB", headroom=RECOGNISED, needs_adaptive=True)
GRADIENTS = Measure("images from gradients", "PSNR", ".1f", unit=" dB", headroom=RECOGNISED)
INVERSION = Measure("private classes", "attack success", ".0f", 100, " %")


@dataclass(frozen=True)
class Verdict:
    """The label of one measure under one defence, with the estimates behind it.

    Attributes:
        guess: the value for the best constant answer.
        strongest: the strongest attacker.
        undefended: the strongest attacker without a defence; None if that was not measured.
        published: the strongest published attacker; None if none was run.
    """

    label: Label
    measure: Measure
    guess: float
    strongest: AttackerFigure
    undefended: AttackerFigure | None = None
    published: AttackerFigure | None = None

    def __str__(self) -> str:
        """Return the label, the estimate with its interval, and the values to compare it with."""
        one, measure = self.strongest, self.measure
        figure = f"{text(one.figure, measure.form, measure.scale)}{measure.unit}"
        sentence = f"{self.label}: {measure.figure} {figure} ({one.attacker})"
        if one.below:
            sentence += f", below chance: {measure.number(one.value)} for an attacker that reverses the scores"
        beside = [f"guessing {measure.number(self.guess)}"]
        if self.undefended and self.undefended is not one:
            beside.append(f"undefended {measure.number(self.undefended.figure.value)}")
        found = one.finding is Finding.FOUND
        if found and self.published and one.value - self.published.value > LAG * (one.value - self.guess):
            beside.append(f"{PUBLISHED} {measure.number(self.published.figure.value)}")
        return f"{sentence}; {', '.join(beside)}"


def find_strongest(every: Iterable[AttackerFigure]) -> AttackerFigure | None:
    """Return the strongest attacker: among those that find something, else those with too few trials, else all."""
    return max(every, key=lambda one: (one.finding, one.value), default=None)


def judge(
    measure: Measure,
    guess: float,
    found: Sequence[AttackerFigure],
    undefended: Sequence[AttackerFigure],
    published: Collection[str] = (PUBLISHED,),
) -> Verdict | None:
    """Return the verdict on one defence; None if there are no attackers.

    `published` are the names of the attackers that do not know the defence.
    """
    one, top = find_strongest(found), find_strongest(undefended)
    if one is None:
        return None
    known = find_strongest(other for other in found if other.attacker in published)
    label = choose_label(measure, guess, one, top)
    if label is Label.SLIGHT and any(other.finding is Finding.TOO_FEW for other in found):
        label = Label.TOO_FEW
    if measure.needs_adaptive and one is known and label not in (Label.LEAK, Label.NOTHING, Label.TOO_FEW):
        label = Label.UNTESTED
    return Verdict(label, measure, guess, one, top, known)


def choose_label(measure: Measure, guess: float, one: AttackerFigure, top: AttackerFigure | None) -> Label:
    """Return the label, given the strongest attackers with the defence and without one."""
    leaks = top is not None and top.finding is Finding.FOUND
    if one.finding is Finding.TOO_FEW:
        return Label.TOO_FEW
    if one.finding is Finding.NOTHING:
        return Label.PROTECTED if leaks else Label.NOTHING
    if top is None or not leaks:
        return Label.LEAK
    way = min(top.value, measure.full(guess)) - guess
    fraction = (one.value - guess) / way if way > 0 else 0.0
    return Label.SLIGHT if fraction < SLIGHT else Label.PARTIAL if fraction < FULL else Label.LEAK


def judge_defences(
    measure: Measure,
    guess: float,
    found: Mapping[str, Sequence[AttackerFigure]],
    published: Collection[str] = (PUBLISHED,),
) -> dict[str, Verdict]:
    """Return the verdict on each defence that was attacked; "plain" is the undefended federation."""
    undefended = found.get("plain", ())
    every = {name: judge(measure, guess, own, undefended, published) for name, own in found.items()}
    return {name: one for name, one in every.items() if one}


def summarise(verdicts: Mapping[str, Verdict]) -> str:
    """Summarise the verdicts on one measure by label: Membership: LEAK (veil 0.69), PROTECTED (spn 0.51)."""
    by_label: dict[Label, list[str]] = {}
    for name, one in verdicts.items():
        by_label.setdefault(one.label, []).append(f"{display_name(name)} {one.measure.number(one.strongest.value)}")
    first = next(iter(verdicts.values()))
    labels = ", ".join(f"{label} ({', '.join(names)})" for label, names in by_label.items())
    return f"{capitalise(first.measure.subject)}: {labels}; guessing {first.measure.number(first.guess)}"


def headline(verdicts: Mapping[str, Verdict]) -> str:
    """Return the verdict of an attack in one sentence."""
    if not verdicts:
        return "No verdict: the attack failed under every defence."
    missing = "" if "plain" in verdicts else "; no undefended federation was attacked"
    return f"{summarise(verdicts)}{missing}."


def verdict_section(verdicts: Mapping[str, Verdict]) -> list[Section]:
    """Return the full verdicts, one paragraph each."""
    return [Text("Verdict", [f"{name}: {one}." for name, one in verdicts.items()])] if verdicts else []
