"""The page of an audit: verdicts, one row per attacker, charts, and the attacks behind them."""

from collections.abc import Iterator, Mapping

from fedveil.attacks.observation import PUBLISHED
from fedveil.attacks.scores import Estimate
from fedveil.report import Interval, Intervals, Section, Table, Text
from fedveil.studies import verdicts
from fedveil.studies.audit import results as columns
from fedveil.studies.audit.results import AuditResult, Audits, Members
from fedveil.studies.gradients import server_results
from fedveil.studies.jobs import Failure
from fedveil.studies.presentation import (
    Presentation,
    capitalise,
    failed_row,
    format_figures,
    mark,
    percent,
    read_texts,
    text,
)
from fedveil.studies.verdicts import AttackerFigure, Measure, Verdict, summarise

TEXTS = read_texts()["audit"]
UNDEFENDED = "undefended"
NETWORK_BROADCASTS = 2  # broadcasts for which the attack network is trained
FORMATS = {
    columns.AGREEMENT: (".1f", 100),
    columns.MEMBERSHIP: (".3f", 1),
    columns.RECORD: (".1f", 1),
    columns.BALANCED: (".1f", 100),
    columns.TPR: (".1f", 100),
    columns.ACCURACY: (".1f", 100),
    columns.RANKING: (".3f", 1),
}
HEADER = ("defence", "attacker", *FORMATS, "membership by")
WHO = ("defence", "attacker")
ATTACKS = (
    *("attack", "AUC on known records", "AUC", "accuracy, %"),
    *("TPR at 1 % FPR, %", "TPR at 0.1 % FPR, %", "broadcasts"),
)


def list_measures(plain: AuditResult) -> dict[str, Measure]:
    """Return what an audit judges, by column; a model with one output is a ranking."""
    model = {columns.RANKING: verdicts.RANKING} if plain.ranks else {columns.AGREEMENT: verdicts.AGREEMENT}
    return {**model, columns.MEMBERSHIP: verdicts.MEMBERSHIP, columns.RECORD: verdicts.RECORD}


def judge(column: str, measure: Measure, found: AuditResult, plain: AuditResult) -> Verdict | None:
    """Return the verdict on one defence; None if it was not measured with it or without one."""
    guess = plain.guesses[column] or 0.0

    def assess(audit: AuditResult) -> list[AttackerFigure]:
        trials = audit.trials if column == columns.RECORD else 2
        figures = {attacker: audit.figures(attacker).get(column) for attacker in sorted(audit.names)}
        return [measure.assess(attacker, one, guess, trials) for attacker, one in figures.items() if one]

    undefended = assess(plain)
    return verdicts.judge(measure, guess, assess(found), undefended) if undefended else None


def attacker_rows(name: str, found: AuditResult | Failure) -> Iterator[list[str]]:
    """Yield one row per attacker."""
    if isinstance(found, Failure):
        yield [name, "", "failed", *[""] * (len(HEADER) - 3)]
        return
    for attacker in found.names:
        own = found.attackers.get(attacker)
        chosen = own.membership.attack if own and own.membership else ""
        yield [name, attacker, *format_figures(found.figures(attacker), FORMATS), chosen]


def guess_row(plain: AuditResult) -> list[str]:
    """Return the figures of the best constant answer."""
    guesses = {column: value for column, value in plain.guesses.items() if value is not None}
    figures = {column: Estimate(value, value, value) for column, value in guesses.items()}
    return ["guessing", "", *format_figures(figures, FORMATS), ""]


def judge_all(results: Audits, plain: AuditResult) -> dict[str, dict[str, Verdict]]:
    """Return the verdicts of each measure, by column and defence."""
    done = {name: one for name, one in results.items() if isinstance(one, AuditResult)}
    return {
        column: {name: verdict for name, one in done.items() if (verdict := judge(column, measure, one, plain))}
        for column, measure in list_measures(plain).items()
    }


def headline(found: Mapping[str, Mapping[str, Verdict]]) -> str:
    """Return the verdicts on all measures in one sentence each, on "plain" only if there is no other defence."""
    defended = [{name: one for name, one in own.items() if name != "plain"} or own for own in found.values()]
    return f"By the strongest attacker: {'. '.join(capitalise(summarise(own)) for own in defended if own)}."


def verdict_sections(results: Audits, plain: AuditResult, found: Mapping[str, Mapping[str, Verdict]]) -> list[Section]:
    """Return the labels in one table, and the verdicts in full."""
    rows, lines = list[list[str]](), list[str]()
    for defence, result in results.items():
        if isinstance(result, Failure):
            rows.append(failed_row(defence, 1 + len(found)))
            lines.append(f"{defence}: failed")
            continue
        own = [by_defence.get(defence) for by_defence in found.values()]
        rows.append([defence, *(one.label if one else "not measured" for one in own)])
        lines += [f"{defence}, {one.measure.subject}: {one}" for one in own if one]
    if plain.server and plain.server.complete:
        lines.append(f"curious server: {server_results.verdict(plain.server)} {TEXTS.notes['server']}")
    header = ["defence", *(measure.subject for measure in list_measures(plain).values())]
    labels = Table("Verdict", header, rows, "By the strongest attacker that was run.")
    return [labels, Text("Verdict in figures", lines)]


def charts(results: Audits, plain: AuditResult) -> Iterator[Section]:
    """Yield each measure of all defences and attackers, beside guessing and no defence."""
    for column, measure in list_measures(plain).items():
        rows: list[Interval] = []
        for defence, found in results.items():
            if isinstance(found, Failure):
                rows.append(mark(PUBLISHED, None, defence))
                continue
            for attacker in found.names:
                if figure := found.figures(attacker).get(column):
                    low, high = (min(max(end, -10.0), 200.0) for end in (figure.low, figure.high))
                    rows.append(Interval(attacker, figure.value, low, high, defence))
        if rows and (top := judge(column, measure, plain, plain)):
            lines = {"guessing": round(top.guess, 3), UNDEFENDED: round(top.strongest.figure.value, 3)}
            yield Intervals(capitalise(measure.subject), measure.figure, rows, lines)


def server_sections(plain: AuditResult) -> list[Section]:
    """Return the table and the pictures of a curious server."""
    if not plain.server or not plain.server.complete:
        return []
    rows = list(server_results.view_rows(plain.server))
    table = Table("Curious server", server_results.HEADER[1:], rows, server_results.NOTE)
    return [table, *server_results.gallery("Server's view", plain.server)]


def member_rows(name: str, attacker: str, found: Members) -> Iterator[list[str]]:
    """Yield one row per membership attack, and one per attack that does not apply."""
    for attack, one in found.attacks.items():
        figures = [f"{one.known:.3f}", text(one.auc, ".3f"), percent(one.accuracy), *map(percent, one.tpr.values())]
        yield [name, attacker, f"{attack} *" if attack == found.attack else attack, *figures, str(one.broadcasts)]
    for attack, why in found.left_out.items():
        yield [name, attacker, attack, why, *[""] * (len(ATTACKS) - 2)]


def list_absent_attackers(name: str, found: AuditResult) -> Iterator[str]:
    """Yield the attackers of a defence that did not run, and why."""
    for attacker, why in found.inapplicable.items():
        yield f"{name}, {attacker}: {why if why.startswith('failed: ') else f'does not apply: {why}'}"
    for attacker, why in found.not_rebuilt.items():
        yield f"{name}, {attacker}: rebuilds no records: {why}"
    if found.server and found.server.failed:
        yield f"{name}, curious server: {found.server.failed}"


def attack_sections(done: Mapping[str, AuditResult]) -> list[Section]:
    """Return the membership attacks one by one, and the attackers that did not run."""
    members = [
        row
        for name, found in done.items()
        for attacker, figures in found.attackers.items()
        if figures.membership
        for row in member_rows(name, attacker, figures.membership)
    ]
    skipped = [line for name, found in done.items() for line in list_absent_attackers(name, found)]
    note = TEXTS.notes["attacks"].format(broadcasts=NETWORK_BROADCASTS)
    sections: list[Section] = [Table("Membership, attack by attack", [*WHO, *ATTACKS], members, note)]
    return (sections if members else []) + ([Text("Attackers that did not run", skipped)] if skipped else [])


def show(every: Audits) -> Presentation:
    """Return the verdicts, the table and the sections after it."""
    results = {name: found for name, found in every.items() if name != UNDEFENDED}
    rows = [row for name, found in every.items() for row in attacker_rows(name, found)]
    plain = every.get("plain", every.get(UNDEFENDED))
    verdict = "No verdict: the audit of the undefended federation failed, or that of every other one."
    first: list[Section] = []
    sections: list[Section] = []
    if isinstance(plain, AuditResult):
        found = judge_all(results, plain)
        verdict = headline(found) if any(found.values()) else verdict
        rows.append(guess_row(plain))
        first = verdict_sections(results, plain, found)
        sections = [*charts(results, plain), *server_sections(plain)]
    gaps = [
        f"{name}: {one.metric} {one.train:.3f} on members, {one.test:.3f} on others, gap {one.gap:.3f}"
        for name, one in results.items()
        if isinstance(one, AuditResult)
    ]
    sections += attack_sections({name: one for name, one in every.items() if isinstance(one, AuditResult)})
    sections += [Text("Gap between members and others", gaps), Text("How to read it", TEXTS.reading)]
    return Presentation("", verdict, HEADER, rows, TEXTS.note, sections, first)
