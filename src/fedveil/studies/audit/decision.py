"""The answers of an audit for people who decide: in plain words, from the same verdicts as the tables."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from fedveil.report import Answers
from fedveil.studies.audit import results as page
from fedveil.studies.audit.results import AuditResult, Audits
from fedveil.studies.study import capitalise, display_name, read_texts
from fedveil.studies.verdicts import CLEAR, RECOGNISED, AttackerFigure, Finding, Verdict

WORDS = read_texts()["decision"].notes
SAFE, WORST, CHANGE, SURE = "safe", "worst", "change", "sure"  # keys of the questions
FEW = "few"


@dataclass(frozen=True)
class Decision:
    """The answers to the questions of a person who decides.

    Attributes:
        headline: the answer in one sentence.
        answers: paragraphs by question.
    """

    headline: str
    answers: dict[str, list[str]]

    def section(self) -> Answers:
        """Return the section of the page."""
        return Answers(WORDS["title"], self.answers)


def decide(results: Audits, plain: AuditResult, verdicts: Mapping[str, Mapping[str, Verdict]]) -> Decision:
    """Answer the questions from the results of all defences, the undefended result, and the verdicts by measure."""
    own = page.judge(page.MEMBERSHIP, page.list_measures(plain)[page.MEMBERSHIP], plain, plain)
    grade = grade_sharing(own)
    shared = [WORDS[f"safe_{grade}"].format(**membership_words(own))] + ([rate] if (rate := rate_words(plain)) else [])
    answers = {
        WORDS[f"ask_{SAFE}"]: shared,
        WORDS[f"ask_{WORST}"]: [*insider_words(verdicts, results), *server_words(plain)],
        WORDS[f"ask_{CHANGE}"]: list(change_words(grade, verdicts, plain)),
        WORDS[f"ask_{SURE}"]: list(certainty_words(own, results, plain)),
    }
    return Decision(WORDS[f"headline_{grade}"], answers)


def warn_of_stand_ins(section: Answers) -> Answers:
    """Return the answers with a warning that they are for made-up records."""
    question = WORDS[f"ask_{SAFE}"]
    return replace(section, answers={**section.answers, question: [WORDS["stand_ins"], *section.answers[question]]})


def grade_sharing(own: Verdict | None) -> str:
    """Return how clearly the undefended model reveals its members: clear, slight, nothing or unknown."""
    if own is None or own.strongest.finding is Finding.TOO_FEW:
        return "unknown"
    if own.strongest.finding is Finding.NOTHING:
        return "nothing"
    return "clear" if own.strongest.value - own.guess >= CLEAR * (1 - own.guess) else "slight"


def of_hundred(fraction: float) -> str:
    """Return a fraction as a count out of 100; above 99.5 or below 0.5, with one decimal unless it is exact."""
    count = 100 * fraction
    near = 0 < count < 0.5 or 99.5 < count < 100
    return f"{count:.1f}" if near else f"{count:.0f}"


def membership_words(own: Verdict | None) -> dict[str, str]:
    """Return the numbers in sentences about membership, as counts out of 100."""
    if own is None:
        return {"hits": "", "low": "", "high": ""}
    one = own.strongest
    low, high = (1 - one.figure.high, 1 - one.figure.low) if one.below else (one.figure.low, one.figure.high)
    return {"hits": of_hundred(one.value), "low": of_hundred(low), "high": of_hundred(high)}


def rate_words(plain: AuditResult) -> str:
    """Return the sentence on the people about whom an attacker is most certain; "" if it was not measured."""
    rates = [figures[page.TPR] for name in plain.names if page.TPR in (figures := plain.figures(name))]
    known = [rate.value for rate in rates if rate]
    return WORDS["rate"].format(hits=of_hundred(max(known))) if known else ""


def insider_words(verdicts: Mapping[str, Mapping[str, Verdict]], results: Audits) -> Iterator[str]:
    """Yield one paragraph per defence: whether an insider copies the model, names participants, rebuilds records."""
    yield WORDS["insider"]
    said = {name: list(defence_words(name, verdicts)) for name in results}
    for name, words in said.items():
        if words and name != "plain" and words == said.get("plain"):
            yield WORDS["same"].format(defence=display_name(name))
        elif words:
            under = WORDS["under_plain"] if name == "plain" else WORDS["under"].format(defence=display_name(name))
            yield " ".join([under, words[0], *map(capitalise, words[1:])])


def defence_words(name: str, verdicts: Mapping[str, Mapping[str, Verdict]]) -> Iterator[str]:
    """Yield what an insider achieves under one defence, and what was not measured."""
    measured = {column: own[name] for column, own in verdicts.items() if name in own}
    yield from (clause(column, one) for column, one in measured.items())
    tried = {KINDS[column] for column in measured}
    yield from (WORDS[f"untried_{kind}"] for kind in dict.fromkeys(KINDS.values()) if kind not in tried)


KINDS = {page.AGREEMENT: "copy", page.RANKING: "copy", page.MEMBERSHIP: "members", page.RECORD: "record"}


def clause(column: str, verdict: Verdict) -> str:
    """Return the sentence on one measure of one defence."""
    one, kind = verdict.strongest, KINDS[column]
    state = {Finding.FOUND: "found", Finding.NOTHING: "nothing", Finding.TOO_FEW: FEW}[one.finding]
    if column == page.RECORD and state == "found":
        state = "near" if _lift(one, verdict) >= RECOGNISED else "partly"
    if column == page.RANKING:
        kind = "ranking"
    values = {"hits": of_hundred(one.value), "guess": of_hundred(verdict.guess), "lift": f"{_lift(one, verdict):.0f}"}
    return WORDS[f"{kind}_{state}"].format(**values)


def _lift(one: AttackerFigure, verdict: Verdict) -> float:
    return one.figure.value - verdict.guess


def server_words(plain: AuditResult) -> Iterator[str]:
    """Yield a sentence on the operator of the server."""
    if plain.server is None or not plain.server.complete:
        yield WORDS["server_untried"]
        return
    from fedveil.studies.gradients.server import SINGLE, count_rounds

    hits, rounds = count_rounds(plain.server, SINGLE), len(plain.server.complete)
    yield WORDS["server_found" if hits else "server_nothing"].format(hits=hits, rounds=rounds)


def change_words(grade: str, verdicts: Mapping[str, Mapping[str, Verdict]], plain: AuditResult) -> Iterator[str]:
    """Yield what should change, most important first."""
    if grade in ("clear", "slight"):
        yield WORDS[f"change_{grade}"].format(train=f"{plain.train:.3f}", test=f"{plain.test:.3f}", metric=plain.metric)
    records = verdicts.get(page.RECORD, {}).values()
    if any(one.strongest.finding is Finding.FOUND for one in records):
        yield WORDS["change_records"]
    if plain.server and plain.server.complete:
        from fedveil.studies.gradients.server import SINGLE, count_rounds

        if count_rounds(plain.server, SINGLE):
            yield WORDS["change_server"]
    if any(one.strongest.finding is Finding.TOO_FEW for own in verdicts.values() for one in own.values()):
        yield WORDS["change_few"]
    yield WORDS["change_always"]


def certainty_words(own: Verdict | None, results: Audits, plain: AuditResult) -> Iterator[str]:
    """Yield what was tried, and how certain the numbers are."""
    names = {name for one in (*results.values(), plain) for name in one.names}
    attacks = {
        attack
        for one in (*results.values(), plain)
        for figures in one.attackers.values()
        if figures.membership
        for attack in figures.membership.attacks
    }
    yield WORDS["tried"].format(attackers=len(names), attacks=len(attacks), trials=plain.trials)
    if own and own.strongest.finding is not Finding.TOO_FEW:
        yield WORDS["interval"].format(**membership_words(own))
    yield WORDS["limits"]
