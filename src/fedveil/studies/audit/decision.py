"""The answers of an audit for decision makers: in plain words, from the same verdicts as the tables."""

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
    """The answers to a decision maker's questions.

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
    membership = page.judge(page.MEMBERSHIP, page.list_measures(plain)[page.MEMBERSHIP], plain, plain)
    grade = grade_sharing(membership)
    shared = [WORDS[f"safe_{grade}"].format(**membership_words(membership))] + (
        [rate] if (rate := rate_words(plain)) else []
    )
    answers = {
        WORDS[f"ask_{SAFE}"]: shared,
        WORDS[f"ask_{WORST}"]: [*insider_words(verdicts, results), *server_words(plain)],
        WORDS[f"ask_{CHANGE}"]: list(change_words(grade, verdicts, plain)),
        WORDS[f"ask_{SURE}"]: list(certainty_words(membership, results, plain)),
    }
    return Decision(WORDS[f"headline_{grade}"], answers)


def warn_of_stand_ins(section: Answers) -> Answers:
    """Return the answers with a warning that they are for made-up records."""
    question = WORDS[f"ask_{SAFE}"]
    return replace(section, answers={**section.answers, question: [WORDS["stand_ins"], *section.answers[question]]})


def grade_sharing(verdict: Verdict | None) -> str:
    """Return how clearly the undefended model reveals its members: clear, slight, nothing or unknown."""
    if verdict is None or verdict.strongest.finding is Finding.TOO_FEW:
        return "unknown"
    if verdict.strongest.finding is Finding.NOTHING:
        return "nothing"
    return "clear" if verdict.strongest.value - verdict.guess >= CLEAR * (1 - verdict.guess) else "slight"


def per_hundred(fraction: float) -> str:
    """Return a fraction as a count out of 100; above 99.5 or below 0.5, with one decimal unless it is exact."""
    count = 100 * fraction
    uses_decimal = 0 < count < 0.5 or 99.5 < count < 100
    return f"{count:.1f}" if uses_decimal else f"{count:.0f}"


def membership_words(verdict: Verdict | None) -> dict[str, str]:
    """Return the numbers in sentences about membership, as counts out of 100."""
    if verdict is None:
        return {"hits": "", "low": "", "high": ""}
    figure = verdict.strongest
    low, high = (
        (1 - figure.figure.high, 1 - figure.figure.low) if figure.below else (figure.figure.low, figure.figure.high)
    )
    return {"hits": per_hundred(figure.value), "low": per_hundred(low), "high": per_hundred(high)}


def rate_words(plain: AuditResult) -> str:
    """Return the sentence on the people about whom an attacker is most certain; "" if it was not measured."""
    rates = [figures[page.TPR] for name in plain.names if page.TPR in (figures := plain.figures(name))]
    known = [rate.value for rate in rates if rate]
    return WORDS["rate"].format(hits=per_hundred(max(known))) if known else ""


def insider_words(verdicts: Mapping[str, Mapping[str, Verdict]], results: Audits) -> Iterator[str]:
    """Yield one paragraph per defence: whether an insider copies the model, names participants, rebuilds records."""
    yield WORDS["insider"]
    paragraphs = {name: list(defence_words(name, verdicts)) for name in results}
    for name, words in paragraphs.items():
        if words and name != "plain" and words == paragraphs.get("plain"):
            yield WORDS["same"].format(defence=display_name(name))
        elif words:
            under = WORDS["under_plain"] if name == "plain" else WORDS["under"].format(defence=display_name(name))
            yield " ".join([under, words[0], *map(capitalise, words[1:])])


def defence_words(name: str, verdicts: Mapping[str, Mapping[str, Verdict]]) -> Iterator[str]:
    """Yield what an insider achieves under one defence, and what was not measured."""
    measured = {column: verdict[name] for column, verdict in verdicts.items() if name in verdict}
    yield from (clause(column, verdict) for column, verdict in measured.items())
    tried = {KINDS[column] for column in measured}
    yield from (WORDS[f"untried_{kind}"] for kind in dict.fromkeys(KINDS.values()) if kind not in tried)


KINDS = {page.AGREEMENT: "copy", page.RANKING: "copy", page.MEMBERSHIP: "members", page.RECORD: "record"}


def clause(column: str, verdict: Verdict) -> str:
    """Return the sentence on one measure of one defence."""
    figure, kind = verdict.strongest, KINDS[column]
    state = {Finding.FOUND: "found", Finding.NOTHING: "nothing", Finding.TOO_FEW: FEW}[figure.finding]
    if column == page.RECORD and state == "found":
        state = "near" if _gain_over_guess(figure, verdict) >= RECOGNISED else "partly"
    if column == page.RANKING:
        kind = "ranking"
    values = {
        "hits": per_hundred(figure.value),
        "guess": per_hundred(verdict.guess),
        "lift": f"{_gain_over_guess(figure, verdict):.0f}",
    }
    return WORDS[f"{kind}_{state}"].format(**values)


def _gain_over_guess(figure: AttackerFigure, verdict: Verdict) -> float:
    return figure.figure.value - verdict.guess


def server_words(plain: AuditResult) -> Iterator[str]:
    """Yield a sentence on the operator of the server."""
    if plain.server is None or not plain.server.complete:
        failed = plain.server.failed.removesuffix(".") if plain.server else ""
        yield WORDS["server_untried"].format(why=f" ({failed})" if failed else "")
        return
    from fedveil.studies.gradients.server import SINGLE, count_rounds

    hits, rounds = count_rounds(plain.server, SINGLE), len(plain.server.complete)
    yield WORDS["server_found" if hits else "server_nothing"].format(hits=hits, rounds=rounds)


def change_words(grade: str, verdicts: Mapping[str, Mapping[str, Verdict]], plain: AuditResult) -> Iterator[str]:
    """Yield recommendations, most important first."""
    if grade in ("clear", "slight"):
        yield WORDS[f"change_{grade}"].format(train=f"{plain.train:.3f}", test=f"{plain.test:.3f}", metric=plain.metric)
    records = verdicts.get(page.RECORD, {}).values()
    if any(verdict.strongest.finding is Finding.FOUND for verdict in records):
        yield WORDS["change_records"]
    if plain.server and plain.server.complete:
        from fedveil.studies.gradients.server import SINGLE, count_rounds

        if count_rounds(plain.server, SINGLE):
            yield WORDS["change_server"]
    if any(
        verdict.strongest.finding is Finding.TOO_FEW
        for by_subject in verdicts.values()
        for verdict in by_subject.values()
    ):
        yield WORDS["change_few"]
    yield WORDS["change_always"]


def certainty_words(verdict: Verdict | None, results: Audits, plain: AuditResult) -> Iterator[str]:
    """Yield sentences on the attacks that were tried, and on the certainty of the numbers."""
    names = {name for result in (*results.values(), plain) for name in result.names}
    attacks = {
        attack
        for result in (*results.values(), plain)
        for figures in result.attackers.values()
        if figures.membership
        for attack in figures.membership.attacks
    }
    yield WORDS["tried"].format(attackers=len(names), attacks=len(attacks), trials=plain.trials)
    if verdict and verdict.strongest.finding is not Finding.TOO_FEW:
        yield WORDS["interval"].format(**membership_words(verdict))
    yield WORDS["limits"]
