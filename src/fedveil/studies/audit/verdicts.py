"""Verdicts of an audit: how far the strongest attacker gets by each measure, as far as its interval tells."""

from collections.abc import Mapping
from typing import NamedTuple

from fedveil.attacks.observation import PUBLISHED
from fedveil.studies.audit.results import Audited
from fedveil.studies.estimates import CHANCE, Estimate, Outcome, Reached, Rule, furthest, reach
from fedveil.studies.gradients.server_page import RECOGNISED

PROTECTS, HINDERS = 0.2, 0.8  # shares of the way from guessing to no defence at all
CLEAR = 0.1  # of the way from guessing to knowing everything: from there on a leak is clear
NOTHING, TOO_FEW = "nothing found", "too few trials to tell"
PROTECTED, NEARLY, PARTLY, LEAKS = "is protected", "is nearly protected", "is partly protected", "is not protected"
UNTESTED = "is not shown to leak, but only the published attack was run"
DIRECTION = "below chance: an attacker who knows the direction, and takes low scores for members, has 1 - {} = {}"
Measure = tuple[str, str, str, str]  # what, how far an attacker gets, title and label of the chart
MEASURES: Mapping[str, Measure] = {
    "agreement": ("the model", "agrees with the server's model on {}", "Agreement with the true model", "agreement"),
    "membership": (
        "who took part",
        "tells members from others with an AUC of {}",
        "Membership of others' records",
        "AUC",
    ),
    "rebuilt": ("a single record", "rebuilds it with a PSNR of {}", "A victim's record, rebuilt", "PSNR, dB"),
}
RANKING = ("the model", "ranks new records with an AUC of {}", "AUC of the participant's ranking", "AUC")


def measures_of(found: Audited) -> Mapping[str, Measure]:
    """What is measured; a model with one output is a ranking."""
    return {**MEASURES, "agreement": RANKING} if found.ranks else MEASURES


def guess_of(plain: Audited, name: str) -> float:
    """Return what the best answer reaches that does not look at its input, on the same records.

    For agreement it is the most frequent answer of the server's model, for a record the mean of the attacker's own.
    """
    if name == "rebuilt":
        return plain.rebuilt["floor"].value if "floor" in plain.rebuilt else 0.0
    return 0.5 if name == "membership" or plain.ranks else plain.guessing.agreement


def clear_leak(guess: float, name: str) -> float:
    """Return where a leak is clear: a tenth of the way from guessing to 100 %, to an AUC of 1, or to 10 dB more."""
    return guess + CLEAR * (RECOGNISED if name == "rebuilt" else 1 - guess)


def reaches(found: Audited, name: str, guess: float) -> list[Reached]:
    """Return how far each attacker gets by one measure."""
    rule = CHANCE if name == "membership" else Rule(guess, clear_leak(guess, name))
    trials = found.trials if name == "rebuilt" else 2
    figures = {attacker: found.figure(attacker, name) for attacker in sorted(found.names)}
    return [reach(attacker, figure, rule, trials) for attacker, figure in figures.items() if figure]


def strongest(found: Audited, name: str, guess: float) -> Reached | None:
    """Return the attacker that gets furthest by one measure; None where it was not measured."""
    return furthest(reaches(found, name, guess))


def leak(value: float, guess: float, undefended: float) -> float:
    """How far on the way from guessing to no defence."""
    return (value - guess) / (undefended - guess) if undefended > guess else 0.0


def word(share: float) -> str:
    """A verdict for a manager, on something that is found."""
    return NEARLY if share < PROTECTS else PARTLY if share < HINDERS else LEAKS


def number(value: float, name: str, found: Audited) -> str:
    """A figure as a reader wants it."""
    if name == "rebuilt":
        return f"{value:.0f} dB"
    return f"{value:.0%} of new records" if name == "agreement" and not found.ranks else f"{value:.2f}"


def span(figure: Estimate, name: str, found: Audited) -> str:
    """The interval of a figure as a reader wants it."""
    if name == "agreement" and not found.ranks:
        return f"[{figure.low:.0%}, {figure.high:.0%}]"
    form = ".0f" if name == "rebuilt" else ".2f"
    return f"[{figure.low:{form}}, {figure.high:{form}}]"


class Judgement(NamedTuple):
    """One measure of one defence: "is protected", "nothing found" ..., a sentence, and the strongest attacker."""

    word: str
    text: str
    strongest: Reached


def judge(found: Audited, plain: Audited, name: str) -> Judgement | None:
    """How far the strongest attacker gets on one measure; None where it was not measured."""
    guess = guess_of(plain, name)
    one, top = strongest(found, name, guess), strongest(plain, name, guess)
    if one is None or top is None:
        return None
    said = decide(found, one, top, name, guess)
    return Judgement(said, explain(found, one, top, name, guess, said), one)


def decide(found: Audited, one: Reached, top: Reached, name: str, guess: float) -> str:
    """The word for what the strongest attackers reach, with the defence and without one."""
    if one.outcome is Outcome.TOO_FEW:
        return TOO_FEW
    if one.outcome is Outcome.NOTHING:
        said = PROTECTED if top.outcome is Outcome.FOUND else NOTHING
    else:
        said = word(leak(one.value, guess, full_leak(top, name, guess))) if top.outcome is Outcome.FOUND else LEAKS
    if said == NEARLY and any(other.outcome is Outcome.TOO_FEW for other in reaches(found, name, guess)):
        return TOO_FEW
    only_published = one.attacker == PUBLISHED and name == "rebuilt"
    return UNTESTED if only_published and said not in (LEAKS, NOTHING) else said


def full_leak(top: Reached, name: str, guess: float) -> float:
    """What is reached without a defence; of a record, 10 dB above guessing is all there is to know."""
    return min(top.value, guess + RECOGNISED) if name == "rebuilt" else top.value


def explain(found: Audited, one: Reached, top: Reached, name: str, guess: float, said: str) -> str:
    """A sentence with the figures."""
    what, does, *_ = measures_of(found)[name]
    beside = f"guessing {number(guess, name, found)}, undefended {number(top.figure.value, name, found)}"
    if said == NOTHING:
        why = "even" if top.outcome is Outcome.NOTHING else "and there are too few trials to tell what there is"
        return f"{what}: {NOTHING}, {why} without a defence ({beside})"
    figure = number(one.figure.value, name, found)
    reached = f"the strongest attacker ({one.attacker}) {does.format(figure)}"
    if said == TOO_FEW:
        held = f"which leaves open whether it guesses or has {number(clear_leak(guess, name), name, found)} or more"
        trials = "in one trial" if name == "rebuilt" and found.trials < 2 else span(one.figure, name, found)
        return f"{what}: {TOO_FEW}, {reached} {trials}, {held} ({beside})"
    if one.below:
        reached += f", {DIRECTION.format(figure, number(one.value, name, found))}"
    elif one.outcome is Outcome.NOTHING:
        reached = f"{NOTHING}, {reached}"
    published = next((other for other in reaches(found, name, guess) if other.attacker == PUBLISHED), None)
    full = full_leak(top, name, guess)
    if published and leak(published.value, guess, full) < leak(one.value, guess, full) - PROTECTS:
        reached += f", published attacks reach {number(published.figure.value, name, found)}"
    return f"{what} {said}: {reached} ({beside})"
