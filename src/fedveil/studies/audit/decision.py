"""Answer decision makers' questions in plain words, based on the verdicts in the tables."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from fedveil.report import Answers
from fedveil.studies.audit import results as page
from fedveil.studies.audit.results import AuditResult, Audits
from fedveil.studies.study import capitalise, display_name, read_texts
from fedveil.studies.verdicts import CLEAR_LEAK, RECOGNITION_DB, Finding, Verdict

TEXTS = read_texts()["decision"].notes


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
        return Answers(TEXTS["title"], self.answers)


def decide(results: Audits, undefended: AuditResult, verdicts: Mapping[str, Mapping[str, Verdict]]) -> Decision:
    """Answer the questions, given the results of all defences, the undefended result, and the verdicts by measure."""
    membership = page.judge(page.MEMBERSHIP, page.list_measures(undefended)[page.MEMBERSHIP], undefended, undefended)
    grade = grade_sharing(membership)
    sharing_answer = [TEXTS[f"safe_{grade}"].format(**membership_numbers(membership))] + (
        [rate] if (rate := rate_sentence(undefended)) else []
    )
    answers = {
        TEXTS["ask_safe"]: sharing_answer,
        TEXTS["ask_worst"]: [*insider_sentences(verdicts, results), *server_sentences(undefended)],
        TEXTS["ask_change"]: list(recommendations(grade, verdicts, undefended)),
        TEXTS["ask_sure"]: list(certainty_sentences(membership, results, undefended)),
    }
    return Decision(TEXTS[f"headline_{grade}"], answers)


def warn_of_stand_ins(section: Answers) -> Answers:
    """Return the answers with a warning that they are for made-up records."""
    question = TEXTS["ask_safe"]
    return replace(section, answers={**section.answers, question: [TEXTS["stand_ins"], *section.answers[question]]})


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


def membership_numbers(verdict: Verdict | None) -> dict[str, str]:
    """Return the numbers for sentences about membership, as counts out of 100."""
    if verdict is None:
        return {"hits": "", "low": "", "high": ""}
    strongest = verdict.strongest
    low, high = (
        (1 - strongest.estimate.high, 1 - strongest.estimate.low)
        if strongest.is_below_guess
        else (strongest.estimate.low, strongest.estimate.high)
    )
    return {"hits": per_hundred(strongest.value), "low": per_hundred(low), "high": per_hundred(high)}


def rate_sentence(undefended: AuditResult) -> str:
    """Return the sentence on the highest true-positive rate of an attacker, or "" if no rate was measured."""
    rates = [figures[page.TPR] for name in undefended.names if page.TPR in (figures := undefended.figures(name))]
    values = [rate.value for rate in rates if rate]
    return TEXTS["rate"].format(hits=per_hundred(max(values))) if values else ""


def insider_sentences(verdicts: Mapping[str, Mapping[str, Verdict]], results: Audits) -> Iterator[str]:
    """Yield an introduction, and one paragraph per defence about what an insider achieves."""
    yield TEXTS["insider"]
    paragraphs = {name: list(defence_sentences(name, verdicts)) for name in results}
    for name, sentences in paragraphs.items():
        if sentences and name != "plain" and sentences == paragraphs.get("plain"):
            yield TEXTS["same"].format(defence=display_name(name))
        elif sentences:
            condition = TEXTS["under_plain"] if name == "plain" else TEXTS["under"].format(defence=display_name(name))
            yield " ".join([condition, sentences[0], *map(capitalise, sentences[1:])])


def defence_sentences(name: str, verdicts: Mapping[str, Mapping[str, Verdict]]) -> Iterator[str]:
    """Yield sentences about what an insider achieves under one defence, and about what was not measured."""
    measured_verdicts = {column: verdict[name] for column, verdict in verdicts.items() if name in verdict}
    yield from (measure_sentence(column, verdict) for column, verdict in measured_verdicts.items())
    measured_kinds = {KINDS[column] for column in measured_verdicts}
    yield from (TEXTS[f"untried_{kind}"] for kind in dict.fromkeys(KINDS.values()) if kind not in measured_kinds)


KINDS = {page.AGREEMENT: "copy", page.RANKING: "copy", page.MEMBERSHIP: "members", page.RECORD: "record"}


def measure_sentence(column: str, verdict: Verdict) -> str:
    """Return the sentence about one measure of one defence."""
    strongest, kind = verdict.strongest, "ranking" if column == page.RANKING else KINDS[column]
    grade = {Finding.FOUND: "found", Finding.NOTHING: "nothing", Finding.TOO_FEW: "few"}[strongest.finding]
    if column == page.RECORD and grade == "found":
        grade = "near" if strongest.estimate.value - verdict.guess >= RECOGNITION_DB else "partly"
    return TEXTS[f"{kind}_{grade}"].format(hits=per_hundred(strongest.value), guess=per_hundred(verdict.guess))


def server_sentences(undefended: AuditResult) -> Iterator[str]:
    """Yield a sentence about the operator of the server."""
    if undefended.server is None or not undefended.server.complete_rounds:
        reason = undefended.server.failed.removesuffix(".") if undefended.server else ""
        yield TEXTS["server_untried"].format(reason=f" ({reason})" if reason else "")
        return
    from fedveil.studies.gradients.server import SINGLE_UPDATE, count_rounds

    hits, rounds = count_rounds(undefended.server, SINGLE_UPDATE), len(undefended.server.complete_rounds)
    yield TEXTS["server_found" if hits else "server_nothing"].format(hits=hits, rounds=rounds)


def recommendations(
    grade: str, verdicts: Mapping[str, Mapping[str, Verdict]], undefended: AuditResult
) -> Iterator[str]:
    """Yield recommendations, the most important one first."""
    if grade in ("clear", "slight"):
        yield TEXTS[f"change_{grade}"].format(
            train=f"{undefended.train:.3f}", test=f"{undefended.test:.3f}", metric=undefended.metric
        )
    records = verdicts.get(page.RECORD, {}).values()
    if any(verdict.strongest.finding is Finding.FOUND for verdict in records):
        yield TEXTS["change_records"]
    if undefended.server and undefended.server.complete_rounds:
        from fedveil.studies.gradients.server import SINGLE_UPDATE, count_rounds

        if count_rounds(undefended.server, SINGLE_UPDATE):
            yield TEXTS["change_server"]
    if any(
        verdict.strongest.finding is Finding.TOO_FEW
        for by_subject in verdicts.values()
        for verdict in by_subject.values()
    ):
        yield TEXTS["change_few"]
    yield TEXTS["change_always"]


def certainty_sentences(verdict: Verdict | None, results: Audits, undefended: AuditResult) -> Iterator[str]:
    """Yield sentences about the attacks that were tried, and about the certainty of the numbers."""
    names = {name for result in (*results.values(), undefended) for name in result.names}
    attacks = {
        attack
        for result in (*results.values(), undefended)
        for figures in result.attackers.values()
        if figures.membership
        for attack in figures.membership.attacks
    }
    yield TEXTS["tried"].format(attackers=len(names), attacks=len(attacks), trials=undefended.trials)
    if verdict and verdict.strongest.finding is not Finding.TOO_FEW:
        yield TEXTS["interval"].format(**membership_numbers(verdict))
    yield TEXTS["limits"]
