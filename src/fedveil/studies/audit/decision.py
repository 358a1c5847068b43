"""Answer decision makers' questions in plain words, based on the verdicts in the tables."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from fedveil.report import Answers
from fedveil.studies.audit import results as page
from fedveil.studies.audit.results import AuditResult, Audits
from fedveil.studies.study import capitalise, display_name, read_texts
from fedveil.studies.verdicts import CLEAR_LEAK, RECOGNITION_DB, Finding, Verdict

WORDS = read_texts()["decision"].notes


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


def decide(results: Audits, undefended: AuditResult, verdicts: Mapping[str, Mapping[str, Verdict]]) -> Decision:
    """Answer the questions from the results of all defences, the undefended result, and the verdicts by measure."""
    membership = page.judge(page.MEMBERSHIP, page.list_measures(undefended)[page.MEMBERSHIP], undefended, undefended)
    grade = grade_sharing(membership)
    sharing_answer = [WORDS[f"safe_{grade}"].format(**membership_words(membership))] + (
        [rate] if (rate := rate_words(undefended)) else []
    )
    answers = {
        WORDS["ask_safe"]: sharing_answer,
        WORDS["ask_worst"]: [*insider_words(verdicts, results), *server_words(undefended)],
        WORDS["ask_change"]: list(change_words(grade, verdicts, undefended)),
        WORDS["ask_sure"]: list(certainty_words(membership, results, undefended)),
    }
    return Decision(WORDS[f"headline_{grade}"], answers)


def warn_of_stand_ins(section: Answers) -> Answers:
    """Return the answers with a warning that they are for made-up records."""
    question = WORDS["ask_safe"]
    return replace(section, answers={**section.answers, question: [WORDS["stand_ins"], *section.answers[question]]})


def grade_sharing(verdict: Verdict | None) -> str:
    """Return how clearly the undefended model reveals its members: clear, slight, nothing or unknown."""
    if verdict is None or verdict.strongest.finding is Finding.TOO_FEW:
        return "unknown"
    if verdict.strongest.finding is Finding.NOTHING:
        return "nothing"
    return "clear" if verdict.strongest.value - verdict.guess >= CLEAR_LEAK * (1 - verdict.guess) else "slight"


def per_hundred(fraction: float) -> str:
    """Format a fraction as a count out of 100; a count that would be rounded to 0 or 100 has one decimal."""
    count = 100 * fraction
    uses_decimal = 0 < count < 0.5 or 99.5 < count < 100
    return f"{count:.1f}" if uses_decimal else f"{count:.0f}"


def membership_words(verdict: Verdict | None) -> dict[str, str]:
    """Return the numbers in sentences about membership, as counts out of 100."""
    if verdict is None:
        return {"hits": "", "low": "", "high": ""}
    strongest = verdict.strongest
    low, high = (
        (1 - strongest.estimate.high, 1 - strongest.estimate.low)
        if strongest.is_below_guess
        else (strongest.estimate.low, strongest.estimate.high)
    )
    return {"hits": per_hundred(strongest.value), "low": per_hundred(low), "high": per_hundred(high)}


def rate_words(undefended: AuditResult) -> str:
    """Return the sentence on the highest true-positive rate of an attacker, or "" if no rate was measured."""
    rates = [figures[page.TPR] for name in undefended.names if page.TPR in (figures := undefended.figures(name))]
    measured = [rate.value for rate in rates if rate]
    return WORDS["rate"].format(hits=per_hundred(max(measured))) if measured else ""


def insider_words(verdicts: Mapping[str, Mapping[str, Verdict]], results: Audits) -> Iterator[str]:
    """Yield an introduction, and one paragraph per defence about what an insider achieves."""
    yield WORDS["insider"]
    paragraphs = {name: list(defence_words(name, verdicts)) for name in results}
    for name, words in paragraphs.items():
        if words and name != "plain" and words == paragraphs.get("plain"):
            yield WORDS["same"].format(defence=display_name(name))
        elif words:
            condition = WORDS["under_plain"] if name == "plain" else WORDS["under"].format(defence=display_name(name))
            yield " ".join([condition, words[0], *map(capitalise, words[1:])])


def defence_words(name: str, verdicts: Mapping[str, Mapping[str, Verdict]]) -> Iterator[str]:
    """Yield sentences about what an insider achieves under one defence, and about what was not measured."""
    measured = {column: verdict[name] for column, verdict in verdicts.items() if name in verdict}
    yield from (clause(column, verdict) for column, verdict in measured.items())
    kinds = {KINDS[column] for column in measured}
    yield from (WORDS[f"untried_{kind}"] for kind in dict.fromkeys(KINDS.values()) if kind not in kinds)


KINDS = {page.AGREEMENT: "copy", page.RANKING: "copy", page.MEMBERSHIP: "members", page.RECORD: "record"}


def clause(column: str, verdict: Verdict) -> str:
    """Return the sentence about one measure of one defence."""
    strongest, kind = verdict.strongest, "ranking" if column == page.RANKING else KINDS[column]
    grade = {Finding.FOUND: "found", Finding.NOTHING: "nothing", Finding.TOO_FEW: "few"}[strongest.finding]
    if column == page.RECORD and grade == "found":
        grade = "near" if strongest.estimate.value - verdict.guess >= RECOGNITION_DB else "partly"
    return WORDS[f"{kind}_{grade}"].format(hits=per_hundred(strongest.value), guess=per_hundred(verdict.guess))


def server_words(undefended: AuditResult) -> Iterator[str]:
    """Yield a sentence about the operator of the server."""
    if undefended.server is None or not undefended.server.complete_rounds:
        reason = undefended.server.failed.removesuffix(".") if undefended.server else ""
        yield WORDS["server_untried"].format(reason=f" ({reason})" if reason else "")
        return
    from fedveil.studies.gradients.server import SINGLE, count_rounds

    hits, rounds = count_rounds(undefended.server, SINGLE), len(undefended.server.complete_rounds)
    yield WORDS["server_found" if hits else "server_nothing"].format(hits=hits, rounds=rounds)


def change_words(grade: str, verdicts: Mapping[str, Mapping[str, Verdict]], undefended: AuditResult) -> Iterator[str]:
    """Yield recommendations, the most important one first."""
    if grade in ("clear", "slight"):
        yield WORDS[f"change_{grade}"].format(
            train=f"{undefended.train:.3f}", test=f"{undefended.test:.3f}", metric=undefended.metric
        )
    records = verdicts.get(page.RECORD, {}).values()
    if any(verdict.strongest.finding is Finding.FOUND for verdict in records):
        yield WORDS["change_records"]
    if undefended.server and undefended.server.complete_rounds:
        from fedveil.studies.gradients.server import SINGLE, count_rounds

        if count_rounds(undefended.server, SINGLE):
            yield WORDS["change_server"]
    if any(
        verdict.strongest.finding is Finding.TOO_FEW
        for by_subject in verdicts.values()
        for verdict in by_subject.values()
    ):
        yield WORDS["change_few"]
    yield WORDS["change_always"]


def certainty_words(verdict: Verdict | None, results: Audits, undefended: AuditResult) -> Iterator[str]:
    """Yield sentences about the attacks that were tried, and about the certainty of the numbers."""
    names = {name for result in (*results.values(), undefended) for name in result.names}
    attacks = {
        attack
        for result in (*results.values(), undefended)
        for figures in result.attackers.values()
        if figures.membership
        for attack in figures.membership.attacks
    }
    yield WORDS["tried"].format(attackers=len(names), attacks=len(attacks), trials=undefended.trials)
    if verdict and verdict.strongest.finding is not Finding.TOO_FEW:
        yield WORDS["interval"].format(**membership_words(verdict))
    yield WORDS["limits"]
