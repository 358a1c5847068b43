"""Results of an audit, averaged over broadcasts, and its page: verdicts, a table of attackers, and charts."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pydantic import JsonValue
from pydantic_core import to_jsonable_python

from fedveil.attacks.scores import Estimate, average
from fedveil.report import Answers, Interval, Intervals, Section, Table, Text
from fedveil.studies import verdicts
from fedveil.studies.federations import Quality
from fedveil.studies.gradients import server
from fedveil.studies.gradients.server import ServerResults
from fedveil.studies.jobs import Result
from fedveil.studies.membership.attacks import AttackScores
from fedveil.studies.study import Presentation, format_estimate, format_figures, format_percent, read_texts
from fedveil.studies.verdicts import AttackerEstimate, Measure, Verdict, summarise

FLOOR = "floor"
AGREEMENT, ACCURACY, RANKING = "agreement, %", "accuracy, %", "ranking AUC"
MEMBERSHIP, BALANCED, TPR, RECORD = "membership AUC", "membership, %", "TPR at 1 % FPR, %", "PSNR, dB"


@dataclass(frozen=True)
class MembershipResults:
    """The results of the membership attacks on other clients' records.

    Attributes:
        attacks: performance of each attack, by name.
        left_out: reasons why attacks were not run, by name.
    """

    attacks: dict[str, AttackScores]
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def attack(self) -> str:
        """The attack with the largest lower bound of the AUC on known records; test records do not affect this choice.

        The lower bound is used because few known records are left to evaluate a network, so its AUC would often be the
        largest by chance.
        """
        return max(self.attacks, key=lambda name: self.attacks[name].known.low)

    @property
    def best(self) -> AttackScores:
        """The performance of the chosen attack."""
        return self.attacks[self.attack]


@dataclass(frozen=True)
class ModelFigures:
    """The performance of one attacker's model on held-out records.

    Attributes:
        agreement: fraction of records for which this model and the server's model give the same answer.
        accuracy: accuracy; None if records have no classes.
        ranking: AUC of a model with one output, in the better direction; None for other models.
        membership: results of the membership attacks; None if there is only one client.
    """

    agreement: Estimate
    accuracy: Estimate | None = None
    ranking: Estimate | None = None
    membership: MembershipResults | None = None


@dataclass(frozen=True)
class Guessing:
    """The performance of the best constant answer on held-out records.

    Attributes:
        agreement: frequency of the most frequent answer of the server's model.
        accuracy: frequency of the most frequent class; None if records have no classes.
    """

    agreement: float
    accuracy: float | None = None


@dataclass(frozen=True)
class AuditResult(Quality, Result):
    """All results of the audit of one federation.

    Attributes:
        defence: name of the defence.
        broadcasts: number of broadcasts that were attacked.
        trials: number of records that attackers tried to rebuild.
        attackers: results of each attacker on the model.
        rebuilt: PSNR in dB of the records that each attacker rebuilt; the floor is the mean of the attacker's records.
        guessing: results of the best constant answer.
        inapplicable: reasons why attackers on the model did not run, by attacker.
        not_rebuilt: reasons why attackers did not rebuild records, by attacker.
        server: results of a curious server, if requested; only for the undefended federation.
    """

    defence: str
    broadcasts: int
    trials: int
    attackers: dict[str, ModelFigures]
    rebuilt: dict[str, Estimate]
    guessing: Guessing
    inapplicable: dict[str, str] = field(default_factory=dict)
    not_rebuilt: dict[str, str] = field(default_factory=dict)
    server: ServerResults | None = None

    @property
    def ranks(self) -> bool:
        """Whether the model has one output and is judged by its ranking, which additive noise does not hide."""
        return next(iter(self.attackers.values())).ranking is not None

    def figures(self, attacker: str) -> dict[str, Estimate | None]:
        """Return the results of one attacker by column."""
        model, result = self.attackers.get(attacker), dict[str, Estimate | None]()
        if model:
            result |= {AGREEMENT: model.agreement, ACCURACY: model.accuracy, RANKING: model.ranking}
        if model and model.membership:
            best = model.membership.best
            result |= {MEMBERSHIP: best.auc, BALANCED: best.accuracy, TPR: best.tpr["0.01"]}
        return result | {RECORD: self.rebuilt.get(attacker)}

    @property
    def guesses(self) -> dict[str, float | None]:
        """The results of the best constant answer by column."""
        fixed_guesses = {MEMBERSHIP: 0.5, BALANCED: 0.5, TPR: 0.01, RANKING: 0.5 if self.ranks else None}
        floor = self.rebuilt[FLOOR].value if FLOOR in self.rebuilt else None
        return {AGREEMENT: self.guessing.agreement, ACCURACY: self.guessing.accuracy, RECORD: floor, **fixed_guesses}

    @property
    def names(self) -> list[str]:
        """The names of all attackers."""
        return list(dict.fromkeys([*self.attackers, *(name for name in self.rebuilt if name != FLOOR)]))


Audits = Mapping[str, AuditResult]  # results by defence


def combine_broadcasts(broadcasts: Sequence[Estimate]) -> Estimate:
    """Average the estimates of a fraction over several broadcasts.

    The half-width of the interval combines two half-widths as the root of the sum of their squares: Student's
    half-width over broadcasts, and the mean half-width of the individual intervals.
    """
    if len(broadcasts) == 1:
        return broadcasts[0]
    mean = average([broadcast.value for broadcast in broadcasts])
    mean_half_width = sum(broadcast.high - broadcast.low for broadcast in broadcasts) / (2 * len(broadcasts))
    half_width = math.hypot(mean.high - mean.value, mean_half_width)
    return replace(
        mean,
        low=max(0.0, mean.value - half_width),
        high=min(1.0, mean.value + half_width),
        sample_size=broadcasts[0].sample_size,
    )


def combine_if_complete(broadcasts: Sequence[Estimate | None]) -> Estimate | None:
    """Average an estimate over broadcasts; return None if it is missing for one of them."""
    result = [broadcast for broadcast in broadcasts if broadcast]
    return combine_broadcasts(result) if len(result) == len(broadcasts) else None


def average_members(broadcasts: Sequence[MembershipResults]) -> MembershipResults:
    """Average the performance of each attack over the broadcasts on which it was run."""
    result = {}
    for name in dict.fromkeys(name for broadcast in broadcasts for name in broadcast.attacks):
        scores = [broadcast.attacks[name] for broadcast in broadcasts if name in broadcast.attacks]
        accuracy, auc = (
            combine_broadcasts([getattr(attack, figure) for attack in scores]) for figure in ("accuracy", "auc")
        )
        rates = {rate: combine_if_complete([attack.tpr[rate] for attack in scores]) for rate in scores[0].tpr}
        known_auc, form = combine_broadcasts([attack.known for attack in scores]), scores[0].form
        result[name] = AttackScores(accuracy, auc, rates, known=known_auc, broadcasts=len(scores), form=form)
    return MembershipResults(result, broadcasts[0].left_out)


def average_figures(broadcasts: Sequence[ModelFigures]) -> ModelFigures:
    """Average the results of one attacker over broadcasts."""
    agreement = combine_broadcasts([broadcast.agreement for broadcast in broadcasts])
    accuracy = combine_if_complete([broadcast.accuracy for broadcast in broadcasts])
    ranking = combine_if_complete([broadcast.ranking for broadcast in broadcasts])
    members = [broadcast.membership for broadcast in broadcasts if broadcast.membership]
    return ModelFigures(agreement, accuracy, ranking, average_members(members) if members else None)


TEXTS = read_texts()["audit"]
UNDEFENDED = "undefended"
NO_VERDICT = "No verdict: the audit failed for the undefended federation, or for all others."
NETWORK_BROADCASTS = 2  # number of broadcasts for which the attack network is trained
FORMATS = {
    AGREEMENT: (".1f", 100),
    MEMBERSHIP: (".3f", 1),
    RECORD: (".1f", 1),
    BALANCED: (".1f", 100),
    TPR: (".1f", 100),
    ACCURACY: (".1f", 100),
    RANKING: (".3f", 1),
}
HEADER = ("defence", "attacker", *FORMATS, "membership attack")
ROW_KEYS = ("defence", "attacker")
ATTACK_HEADER = (
    *("attack", "AUC on known records", "AUC", "accuracy, %"),
    *("TPR at 1 % FPR, %", "TPR at 0.1 % FPR, %", "broadcasts"),
)


def list_measures(undefended: AuditResult) -> dict[str, Measure]:
    """Return the measures that an audit judges, by column; a model with one output is judged by its ranking."""
    model = {RANKING: verdicts.RANKING} if undefended.ranks else {AGREEMENT: verdicts.AGREEMENT}
    return {**model, MEMBERSHIP: verdicts.MEMBERSHIP, RECORD: verdicts.RECORD}


def judge(column: str, measure: Measure, result: AuditResult, reference: AuditResult) -> Verdict | None:
    """Return the verdict on one defence, or None if the measure is missing with the defence or without it."""
    guess = reference.guesses[column] or 0.0

    def assess(audit: AuditResult) -> list[AttackerEstimate]:
        trials = audit.trials if column == RECORD else 2
        figures = {attacker: audit.figures(attacker).get(column) for attacker in sorted(audit.names)}
        return measure.compare([(attacker, value) for attacker, value in figures.items() if value], guess, trials)

    undefended = assess(reference)
    return verdicts.judge(measure, guess, assess(result), undefended) if undefended else None


def attacker_rows(name: str, result: AuditResult) -> Iterator[list[str]]:
    """Yield one table row per attacker."""
    for attacker in result.names:
        observation = result.attackers.get(attacker)
        attack = observation.membership.attack if observation and observation.membership else ""
        yield [name, attacker, *format_figures(result.figures(attacker), FORMATS), attack]


def judge_all(results: Audits, undefended: AuditResult) -> dict[str, dict[str, Verdict]]:
    """Return the verdicts on each measure, by column and defence."""
    return {
        column: {
            name: verdict for name, result in results.items() if (verdict := judge(column, measure, result, undefended))
        }
        for column, measure in list_measures(undefended).items()
    }


def headline(verdicts_by_column: Mapping[str, Mapping[str, Verdict]]) -> str:
    """Return one sentence per measure with its verdicts; "plain" is omitted unless it is the only defence."""
    defended_columns = [
        {name: verdict for name, verdict in column.items() if name != "plain"} or column
        for column in verdicts_by_column.values()
    ]
    return f"By the strongest attacker: {'. '.join(summarise(column) for column in defended_columns if column)}."


def verdict_sections(
    results: Audits, undefended: AuditResult, verdicts_by_column: Mapping[str, Mapping[str, Verdict]]
) -> list[Section]:
    """Return a table of the labels, and the full verdicts."""
    rows, lines = list[list[str]](), list[str]()
    for defence in results:
        verdicts = [by_defence.get(defence) for by_defence in verdicts_by_column.values()]
        rows.append([defence, *(verdict.label if verdict else "not measured" for verdict in verdicts)])
        lines += [f"{defence}, {verdict.measure.subject}: {verdict}" for verdict in verdicts if verdict]
    if undefended.server and undefended.server.complete_rounds:
        lines.append(f"curious server: {server.verdict(undefended.server)} {TEXTS.notes['server']}")
    header = ["defence", *(measure.subject for measure in list_measures(undefended).values())]
    labels = Table("Verdict", header, rows, "Each label is for the strongest attacker that was run.")
    return [labels, Text("Verdict in figures", lines)]


def charts(results: Audits, undefended: AuditResult) -> Iterator[Section]:
    """Yield one chart per measure, with all defences and attackers, guessing and the undefended result."""
    for column, measure in list_measures(undefended).items():
        rows: list[Interval] = []
        for defence, result in results.items():
            for attacker in result.names:
                if figure := result.figures(attacker).get(column):
                    low, high = (min(max(bound, -10.0), 200.0) for bound in (figure.low, figure.high))
                    rows.append(Interval(attacker, figure.value, low, high, defence))
        if rows and (verdict := judge(column, measure, undefended, undefended)):
            lines = {"guessing": round(verdict.guess, 3), UNDEFENDED: round(verdict.strongest.estimate.value, 3)}
            yield Intervals(measure.subject.capitalize(), measure.quantity, rows, lines)


def member_rows(name: str, attacker: str, members: MembershipResults) -> Iterator[list[str]]:
    """Yield one row per membership attack, including the attacks that were not run."""
    for attack, attack_scores in members.attacks.items():
        figures = [
            format_estimate(attack_scores.known, ".3f"),
            format_estimate(attack_scores.auc, ".3f"),
            format_percent(attack_scores.accuracy),
            *map(format_percent, attack_scores.tpr.values()),
        ]
        yield [
            name,
            attacker,
            f"{attack} *" if attack == members.attack else attack,
            *figures,
            str(attack_scores.broadcasts),
        ]
    for attack, reason in members.left_out.items():
        yield [name, attacker, attack, reason, *[""] * (len(ATTACK_HEADER) - 2)]


def list_absent_attackers(name: str, result: AuditResult) -> Iterator[str]:
    """Yield a sentence for each attacker that did not run, with the reason."""
    for attacker, reason in result.inapplicable.items():
        yield f"{name}, {attacker}: {reason if reason.startswith('failed: ') else f'does not apply: {reason}'}"
    for attacker, reason in result.not_rebuilt.items():
        yield f"{name}, {attacker}: cannot rebuild records: {reason}"
    if result.server and result.server.failed:
        yield f"{name}, curious server: {result.server.failed}"


def attack_sections(audits: Audits) -> list[Section]:
    """Return sections with the individual membership attacks, and with the attackers that did not run."""
    members = [
        row
        for name, audit in audits.items()
        for attacker, figures in audit.attackers.items()
        if figures.membership
        for row in member_rows(name, attacker, figures.membership)
    ]
    absent_attackers = [line for name, audit in audits.items() for line in list_absent_attackers(name, audit)]
    note = TEXTS.notes["attacks"].format(broadcasts=NETWORK_BROADCASTS)
    sections: list[Section] = [Table("Membership, attack by attack", [*ROW_KEYS, *ATTACK_HEADER], members, note)]
    return (sections if members else []) + (
        [Text("Attackers that did not run", absent_attackers)] if absent_attackers else []
    )


def list_verdicts(audits: Audits) -> dict[str, dict[str, Verdict]]:
    """Return the verdicts by defence and subject; empty without an undefended result."""
    undefended = audits.get("plain", audits.get(UNDEFENDED))
    if undefended is None:
        return {}
    results = {name: audit for name, audit in audits.items() if name != UNDEFENDED}
    columns = judge_all(results, undefended).values()
    return {
        name: {column[name].measure.subject: column[name] for column in columns if name in column} for name in results
    }


def find_answers(presentation: Presentation) -> Mapping[str, Sequence[str]]:
    """Return the answers on a page, by question; empty if there are none."""
    return next((section.answers for section in presentation.top_sections if isinstance(section, Answers)), {})


def json_summary(presentation: Presentation, audits: Audits) -> dict[str, JsonValue]:
    """Return the conclusion, the answers and the labels as values for results.json."""
    labels = {
        name: {subject: {"label": verdict.label, "text": str(verdict)} for subject, verdict in verdicts.items()}
        for name, verdicts in list_verdicts(audits).items()
    }
    result: dict[str, JsonValue] = to_jsonable_python(
        {"conclusion": presentation.plain_verdict, "answers": find_answers(presentation), "verdicts": labels}
    )
    return result


def show(audits: Audits) -> Presentation:
    """Return the verdicts, the table and the other sections."""
    results = {name: audit for name, audit in audits.items() if name != UNDEFENDED}
    rows = [row for name, audit in audits.items() for row in attacker_rows(name, audit)]
    verdict, top_sections, sections, plain_verdict = NO_VERDICT, list[Section](), list[Section](), ""
    if undefended := audits.get("plain", audits.get(UNDEFENDED)):
        columns = judge_all(results, undefended)
        verdict = headline(columns) if any(columns.values()) else verdict
        guesses = {column: average([value]) for column, value in undefended.guesses.items() if value is not None}
        rows.append(["guessing", "", *format_figures(guesses, FORMATS), ""])
        from fedveil.studies.audit.decision import decide  # imported here because it uses this module

        decision = decide(results, undefended, columns)
        plain_verdict = decision.headline
        top_sections = [
            decision.section(),
            *charts(results, undefended),
            *verdict_sections(results, undefended, columns),
        ]
        if undefended.server and undefended.server.complete_rounds:
            sections.append(
                Table("Curious server", server.HEADER[1:], list(server.view_rows(undefended.server)), server.NOTE)
            )
            sections += server.gallery("Server's view", undefended.server)
    gaps = [
        f"{name}: {result.metric} {result.train:.3f} on members, {result.test:.3f} on others, gap {result.gap:.3f}"
        for name, result in results.items()
    ]
    sections += attack_sections(audits)
    sections += [Text("Gap between members and others", gaps), Text("How to read it", TEXTS.reading)]
    glossary = read_texts()["glossary"].notes
    return Presentation(
        "", verdict, HEADER, rows, TEXTS.note, sections, top_sections, plain_verdict=plain_verdict, glossary=glossary
    )
