"""Verdicts for all studies: thresholds, and labels with the estimates that they are based on.

A verdict describes the strongest of several attackers. Holm's procedure (1979) decides whether an attacker finds a
leak, so that the probability of reporting any leak that does not exist is at most 0.05. Intervals hold for all
attackers simultaneously (Bonferroni).
"""

import enum
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fedveil.attacks.observation import PUBLISHED
from fedveil.attacks.scores import Estimate
from fedveil.report import Section, Text
from fedveil.studies.study import capitalise, display_name, format_estimate

ALPHA = 0.05  # maximum probability of a false finding in a verdict on several attackers
CLEAR_LEAK = 0.1  # a leak is clear above this fraction of the distance between guessing and full knowledge
SLIGHT_LEAK = 0.2  # a leak is slight below this fraction of the distance between guessing and the undefended result
FULL_LEAK = 0.8  # a leak is full at or above this fraction of the distance between guessing and the undefended result
PUBLISHED_LAG = 0.2  # show the published attack if its gain is smaller than the largest by more than this fraction
RECOGNITION_DB = 10.0  # a record counts as recognised if its PSNR is at least this many dB above guessing
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
class AttackerEstimate:
    """The estimate for one attacker, and the conclusion drawn from its interval.

    Attributes:
        attacker: name of the attacker.
        estimate: the estimate.
        finding: the conclusion.
        is_below_guess: whether the estimate is below guessing; an attacker that reverses its answers then reaches
            1 - estimate.
        trials_needed: if there were too few trials, a sufficient number; None if it is unknown.
    """

    attacker: str
    estimate: Estimate
    finding: Finding
    is_below_guess: bool = False
    trials_needed: int | None = None

    @property
    def value(self) -> float:
        """The value of the estimate, or 1 minus the value if it is below guessing."""
        return 1 - self.estimate.value if self.is_below_guess else self.estimate.value


@dataclass(frozen=True)
class Measure:
    """A kind of estimate, with its format and the values that count as a leak.

    Attributes:
        subject: information that may leak.
        quantity: name of the estimated quantity.
        format_spec, scale, unit: format, factor and unit for printing.
        headroom: distance from guessing to full knowledge; None if full knowledge is 1.
        trials: plural noun for the units that the estimate is based on, such as "records".
        two_sided: whether values below guessing reveal as much as values above it.
        needs_adaptive: whether a defence counts as untested unless an adaptive attacker was run.
    """

    subject: str
    quantity: str
    format_spec: str = ".2f"
    scale: float = 1.0
    unit: str = ""
    headroom: float | None = None
    trials: str = "trials"
    two_sided: bool = False
    needs_adaptive: bool = False

    def full_knowledge(self, guess: float) -> float:
        """Return the value that an attacker with full knowledge would reach."""
        return 1.0 if self.headroom is None else guess + self.headroom

    def clear_distance(self, guess: float) -> float:
        """Return the distance from guessing at which a leak is clear."""
        return CLEAR_LEAK * (self.full_knowledge(guess) - guess)

    def compare(
        self, estimates: Sequence[tuple[str, Estimate]], guess: float, trials: int = 2
    ) -> list[AttackerEstimate]:
        """Draw a conclusion about each of several attackers, given 95 % intervals of their estimates.

        Attackers are tested in the order of their p-values. An attacker finds a leak if its interval at the level
        1 - ALPHA / (number of attackers left) excludes guessing. Testing stops at the first attacker that finds no leak
        (Holm 1979).
        """
        level, significant, result = 1 - ALPHA / max(len(estimates), 1), True, dict[int, bool]()
        p_values = [estimate.p_value(guess) for _, estimate in estimates]
        for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
            significant = significant and p_values[index] <= ALPHA / (len(p_values) - rank)
            result[index] = significant
        return [
            self.conclude(
                name, estimate.at_level(level) if len(estimates) > 1 else estimate, guess, result[index], trials
            )
            for index, (name, estimate) in enumerate(estimates)
        ]

    def conclude(
        self, attacker: str, estimate: Estimate, guess: float, is_significant: bool, trials: int
    ) -> AttackerEstimate:
        """Draw a conclusion about one attacker; `is_significant` states whether its difference from guessing is.

        - Found: the estimate is significantly above guessing or, if the measure is two-sided, significantly below it.
        - Nothing found: the interval does not include a clear leak.
        - Too few trials: the interval includes a clear leak, or there was only one trial.
        """
        is_below_guess = estimate.value < guess
        if trials < 2 or estimate.repeats == 1:
            return AttackerEstimate(attacker, estimate, Finding.TOO_FEW)
        if is_significant and (self.two_sided or not is_below_guess):
            return AttackerEstimate(attacker, estimate, Finding.FOUND, is_below_guess)
        distance = self.clear_distance(guess)
        if estimate.high > guess + distance or (self.two_sided and estimate.low < guess - distance):
            trials_needed = self.sufficient_trials(estimate, guess)
            return AttackerEstimate(attacker, estimate, Finding.TOO_FEW, trials_needed=trials_needed)
        return AttackerEstimate(attacker, estimate, Finding.NOTHING)

    def sufficient_trials(self, estimate: Estimate, guess: float) -> int | None:
        """Return a number of trials that is sufficient for a conclusion, whatever the true value is.

        An interval that is shorter than the distance from guessing to a clear leak cannot include both. Its length is
        proportional to 1 / sqrt(trials) if the spread of the trials stays the same.
        """
        ratio = (estimate.high - estimate.low) / self.clear_distance(guess)
        return math.ceil(estimate.sample_size * ratio**2) if estimate.sample_size else None

    def format_value(self, value: float) -> str:
        """Format a value with its unit."""
        return f"{self.scale * value:{self.format_spec}}{self.unit}"


AGREEMENT = Measure("the model", "agreement", ".0f", 100, " %", trials="records")
RANKING = Measure("the model", "ranking AUC", trials="records")
MEMBERSHIP = Measure("membership", "AUC", trials="records", two_sided=True)
RECORD = Measure("single records", "PSNR", ".1f", unit=" dB", headroom=RECOGNITION_DB, needs_adaptive=True)
GRADIENTS = Measure("images from gradients", "PSNR", ".1f", unit=" dB", headroom=RECOGNITION_DB)
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
        trials_needed: if there were too few trials, a number that is sufficient for all attackers; None if unknown.
    """

    label: Label
    measure: Measure
    guess: float
    strongest: AttackerEstimate
    undefended: AttackerEstimate | None = None
    published: AttackerEstimate | None = None
    trials_needed: int | None = None

    def __str__(self) -> str:
        """Return the label, the estimate with its interval, and reference values."""
        strongest, measure = self.strongest, self.measure
        estimate = f"{format_estimate(strongest.estimate, measure.format_spec, measure.scale)}{measure.unit}"
        sentence = f"{self.label}: {measure.quantity} {estimate} ({strongest.attacker})"
        if strongest.is_below_guess:
            sentence += (
                f", below chance: {measure.format_value(strongest.value)} for an attacker that reverses the scores"
            )
        references = [f"guessing {measure.format_value(self.guess)}"]
        if self.undefended and self.undefended is not strongest:
            references.append(f"undefended {measure.format_value(self.undefended.estimate.value)}")
        gain = strongest.value - self.guess
        is_leak = strongest.finding is Finding.FOUND
        if is_leak and self.published and strongest.value - self.published.value > PUBLISHED_LAG * gain:
            references.append(f"{PUBLISHED} {measure.format_value(self.published.estimate.value)}")
        if self.label is Label.TOO_FEW and self.trials_needed:
            references.append(f"about {self.trials_needed:,} {measure.trials} would be enough")
        return f"{sentence}; {', '.join(references)}"


def find_strongest(estimates: Iterable[AttackerEstimate]) -> AttackerEstimate | None:
    """Return the attacker with the strongest finding; ties are broken by value."""
    return max(estimates, key=lambda estimate: (estimate.finding, estimate.value), default=None)


def judge(
    measure: Measure,
    guess: float,
    estimates: Sequence[AttackerEstimate],
    undefended: Sequence[AttackerEstimate],
    published: Collection[str] = (PUBLISHED,),
) -> Verdict | None:
    """Return the verdict on one defence, or None if there are no attackers.

    `published` contains the names of the attackers that do not know the defence.
    """
    strongest, reference = find_strongest(estimates), find_strongest(undefended)
    if strongest is None:
        return None
    strongest_published = find_strongest(estimate for estimate in estimates if estimate.attacker in published)
    label = choose_label(measure, guess, strongest, reference)
    if label is Label.SLIGHT and any(estimate.finding is Finding.TOO_FEW for estimate in estimates):
        label = Label.TOO_FEW
    if (
        measure.needs_adaptive
        and strongest is strongest_published
        and label not in (Label.LEAK, Label.NOTHING, Label.TOO_FEW)
    ):
        label = Label.UNTESTED
    trials_needed = max((estimate.trials_needed for estimate in estimates if estimate.trials_needed), default=None)
    return Verdict(label, measure, guess, strongest, reference, strongest_published, trials_needed)


def choose_label(
    measure: Measure, guess: float, strongest: AttackerEstimate, undefended: AttackerEstimate | None
) -> Label:
    """Return the label, given the strongest attackers with the defence (`strongest`) and without it (`undefended`)."""
    undefended_leaks = undefended is not None and undefended.finding is Finding.FOUND
    if strongest.finding is Finding.TOO_FEW:
        return Label.TOO_FEW
    if strongest.finding is Finding.NOTHING:
        return Label.PROTECTED if undefended_leaks else Label.NOTHING
    if undefended is None or not undefended_leaks:
        return Label.LEAK
    max_gain = min(undefended.value, measure.full_knowledge(guess)) - guess
    fraction = (strongest.value - guess) / max_gain if max_gain > 0 else 0.0
    return Label.SLIGHT if fraction < SLIGHT_LEAK else Label.PARTIAL if fraction < FULL_LEAK else Label.LEAK


def judge_defences(
    measure: Measure,
    guess: float,
    by_defence: Mapping[str, Sequence[AttackerEstimate]],
    published: Collection[str] = (PUBLISHED,),
) -> dict[str, Verdict]:
    """Return the verdict on each defence that was attacked; "plain" is the undefended federation."""
    undefended = by_defence.get("plain", ())
    verdicts = {name: judge(measure, guess, estimates, undefended, published) for name, estimates in by_defence.items()}
    return {name: verdict for name, verdict in verdicts.items() if verdict}


def summarise(verdicts: Mapping[str, Verdict]) -> str:
    """Summarise the verdicts on one measure, for example "Membership: LEAK (veil 0.69), PROTECTED (spn 0.51)"."""
    by_label: dict[Label, list[str]] = {}
    for name, verdict in verdicts.items():
        by_label.setdefault(verdict.label, []).append(
            f"{display_name(name)} {verdict.measure.format_value(verdict.strongest.value)}"
        )
    first_verdict = next(iter(verdicts.values()))
    measure, guess = first_verdict.measure, first_verdict.guess
    labels = ", ".join(f"{label} ({', '.join(names)})" for label, names in by_label.items())
    return f"{capitalise(measure.subject)}: {labels}; guessing {measure.format_value(guess)}"


def headline(verdicts: Mapping[str, Verdict]) -> str:
    """Return the verdict on an attack in one sentence."""
    if not verdicts:
        return "No verdict: the attack failed under every defence."
    note = "" if "plain" in verdicts else "; no undefended federation was attacked"
    return f"{summarise(verdicts)}{note}."


def verdict_section(verdicts: Mapping[str, Verdict]) -> list[Section]:
    """Return a section with the full verdicts, one paragraph each."""
    return [Text("Verdict", [f"{name}: {verdict}." for name, verdict in verdicts.items()])] if verdicts else []
