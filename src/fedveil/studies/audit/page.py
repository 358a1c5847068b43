"""The page of an audit: verdicts, one row per attacker, charts, and the attacks behind them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from fedveil.attacks.observation import PUBLISHED
from fedveil.report import Interval, Intervals, Section, Table, Text
from fedveil.studies.audit.members import MAX_LOOKS, NETWORK
from fedveil.studies.audit.results import FLOOR, AuditResult, Audits, Members
from fedveil.studies.estimates import Estimate, Reached, percent, reach, text
from fedveil.studies.gradients import server_page
from fedveil.studies.jobs import Failed
from fedveil.studies.study import Shown
from fedveil.studies.tables import failed_row, mark
from fedveil.studies.verdicts import AGREEMENT, MEMBERSHIP, RANKING, RECORD, Measure, Verdict, judge, summarise

UNDEFENDED = "undefended"
HEADER = (
    *("defence", "attacker", "agreement, %", "membership AUC", "PSNR, dB"),
    *("membership by", "membership, %", "TPR at 1 % FPR, %", "accuracy, %", "ranking AUC"),
)
NOTE = (
    "Agreement with the server's model and accuracy, on held-out records. Membership of other clients' records by the "
    "attack that did best on records that the attacker knows, never on the test: AUC, balanced accuracy, true "
    "positives at 1 % false positives if there are 1,000 non-members. PSNR of one victim's record, rebuilt from the "
    "broadcasts of a new network. For one output, the AUC of the ranking in the better direction. Intervals: 95 %. "
    "Every attacker here is a client that follows the protocol."
)
READING = (
    "An audit shows what these attackers reach. A better one may exist: only differential privacy bounds every "
    "attacker (docs/defences/privacy.md). Published attacks near chance say nothing about adaptive ones.",
    "Guessing is the best constant answer on the same records. LEAK, PARTIAL LEAK, SLIGHT LEAK: the 95 % interval lies "
    "above guessing, or, for an AUC of membership, below 0.5; the three grades follow the undefended figure. "
    "PROTECTED: nothing is found, but something without the defence. NOTHING FOUND: nothing without the defence "
    "either. TOO FEW TRIALS: the interval holds both guessing and a clear leak. UNTESTED: no adaptive attacker was "
    "run. docs/audit.md has the thresholds.",
    "Without a gap between members and others there is nothing to infer, with or without a defence.",
)
SERVER_NOTE = "A veil changes nothing here: the server removes it."
WHO = ("defence", "attacker")
ATTACKS = (
    *("attack", "AUC on known records", "AUC", "accuracy, %"),
    *("TPR at 1 % FPR, %", "TPR at 0.1 % FPR, %", "broadcasts"),
)
ATTACKS_NOTE = (
    f"The {NETWORK} sees outputs of the last three layers, label, loss and the gradient of the last Linear; it is "
    f"trained for at most {MAX_LOOKS} broadcasts. RMIA and LiRA compare with federations that the attacker trains. The "
    "attack marked with * did best on records whose membership the attacker knows, and is the one in the table of "
    "results. A rate is left out where fewer than ten false positives are expected."
)


@dataclass(frozen=True)
class Question:
    """One thing that an audit measures: how it is judged, and where its figures are.

    Attributes:
        measure: how figures are judged.
        figure: returns the figure of one attacker; None where it has none.
        guess: returns the figure of the best constant answer, from the undefended federation.
    """

    measure: Measure
    figure: Callable[[AuditResult, str], Estimate | None]
    guess: Callable[[AuditResult], float]

    def reaches(self, found: AuditResult, plain: AuditResult) -> list[Reached]:
        """Return how far each attacker gets."""
        rule = self.measure.rule(self.guess(plain))
        trials = found.trials if self.measure is RECORD else 2
        figures = {attacker: self.figure(found, attacker) for attacker in sorted(found.names)}
        return [reach(attacker, one, rule, trials) for attacker, one in figures.items() if one]

    def judge(self, found: AuditResult, plain: AuditResult) -> Verdict | None:
        """Return the verdict on one defence; None if it was not measured with it or without one."""
        undefended = self.reaches(plain, plain)
        return judge(self.measure, self.guess(plain), self.reaches(found, plain), undefended) if undefended else None


def _agreement(found: AuditResult, attacker: str) -> Estimate | None:
    own = found.attackers.get(attacker)
    return (own.ranking or own.agreement) if own else None


def _membership(found: AuditResult, attacker: str) -> Estimate | None:
    own = found.attackers.get(attacker)
    return own.membership.best.auc if own and own.membership else None


def _floor(plain: AuditResult) -> float:
    return plain.rebuilt[FLOOR].value if FLOOR in plain.rebuilt else 0.0


def questions(plain: AuditResult) -> list[Question]:
    """Return what an audit measures; a model with one output is a ranking."""
    return [
        Question(RANKING, _agreement, lambda _: 0.5)
        if plain.ranks
        else Question(AGREEMENT, _agreement, lambda own: own.guessing.agreement),
        Question(MEMBERSHIP, _membership, lambda _: 0.5),
        Question(RECORD, lambda found, attacker: found.rebuilt.get(attacker), _floor),
    ]


def attacker_rows(name: str, found: AuditResult | Failed) -> Iterator[list[str]]:
    """Yield one row per attacker."""
    if isinstance(found, Failed):
        yield [name, "", "failed", *[""] * (len(HEADER) - 3)]
        return
    for attacker in found.names:
        figures = found.attackers.get(attacker)
        member = figures.membership if figures else None
        cells = [
            percent(figures.agreement) if figures else "",
            text(member.best.auc, ".3f") if member else "",
            text(found.rebuilt[attacker]) if attacker in found.rebuilt else "",
            member.attack if member else "",
            percent(member.best.accuracy) if member else "",
            percent(member.best.tpr["0.01"]) if member else "",
            percent(figures.accuracy) if figures and figures.accuracy else "",
            text(figures.ranking, ".3f") if figures and figures.ranking else "",
        ]
        yield [name, attacker, *cells]


def guess_row(plain: AuditResult) -> list[str]:
    """Return the figures of the best constant answer."""
    floor = text(plain.rebuilt[FLOOR]) if FLOOR in plain.rebuilt else ""
    agreement, accuracy = (
        "" if share is None else f"{100 * share:.1f}" for share in (plain.guessing.agreement, plain.guessing.accuracy)
    )
    return ["guessing", "", agreement, "0.500", floor, "", "50.0", "1.0", accuracy, "0.500" if plain.ranks else ""]


def headline(every: Audits) -> str:
    """Return the verdicts on all measures in one sentence each."""
    plain = every.get("plain", every.get(UNDEFENDED))
    done = {name: one for name, one in every.items() if name != UNDEFENDED and isinstance(one, AuditResult)}
    if not isinstance(plain, AuditResult) or not done:
        return "No verdict: the audit of the undefended federation failed, or that of every other one."
    defended = {name: one for name, one in done.items() if name != "plain"} or done
    parts = []
    for question in questions(plain):
        verdicts = {name: said for name, one in defended.items() if (said := question.judge(one, plain))}
        parts += [summarise(verdicts)] if verdicts else []
    return f"By the strongest attacker: {'. '.join(part[0].upper() + part[1:] for part in parts)}."


def verdict_sections(results: Audits, plain: AuditResult) -> list[Section]:
    """Return the labels in one table, and the verdicts in full."""
    rows, said, asked = [], [], questions(plain)
    for defence, found in results.items():
        if isinstance(found, Failed):
            rows.append(failed_row(defence, 1 + len(asked)))
            said.append(f"{defence}: failed")
            continue
        verdicts = [question.judge(found, plain) for question in asked]
        rows.append([defence, *(one.label if one else "not measured" for one in verdicts)])
        said += [f"{defence}, {one.measure.subject}: {one}" for one in verdicts if one]
    if plain.server and plain.server.complete:
        said.append(f"curious server: {server_page.verdict(plain.server)} {SERVER_NOTE}")
    header = ["defence", *(question.measure.subject for question in asked)]
    return [Table("Verdict", header, rows, "By the strongest attacker that was run."), Text("Verdict in figures", said)]


def chart(question: Question, results: Audits, plain: AuditResult) -> list[Section]:
    """Return one measure of all defences and attackers, beside guessing and no defence."""
    rows: list[Interval] = []
    for defence, found in results.items():
        if isinstance(found, Failed):
            rows.append(mark(PUBLISHED, None, defence))
            continue
        for attacker in found.names:
            if figure := question.figure(found, attacker):
                low, high = (min(max(end, -10.0), 200.0) for end in (figure.low, figure.high))
                rows.append(Interval(attacker, figure.value, low, high, defence))
    top = question.judge(plain, plain)
    if not rows or top is None:
        return []
    measure, lines = question.measure, {"guessing": round(top.guess, 3)}
    lines[UNDEFENDED] = round(top.strongest.figure.value, 3)
    return [Intervals(f"{measure.subject[0].upper()}{measure.subject[1:]}", measure.figure, rows, lines)]


def server_sections(plain: AuditResult) -> list[Section]:
    """Return the table and the pictures of a curious server."""
    if not plain.server or not plain.server.complete:
        return []
    rows, pictures = list(server_page.view_rows(plain.server)), server_page.gallery("Server's view", plain.server)
    table = Table("Curious server", server_page.HEADER[1:], rows, server_page.NOTE)
    return [table, pictures] if pictures else [table]


def member_rows(name: str, attacker: str, found: Members) -> Iterator[list[str]]:
    """Yield one row per membership attack, and one per attack that does not apply."""
    for attack, one in found.attacks.items():
        figures = [f"{one.known:.3f}", text(one.auc, ".3f"), percent(one.accuracy), *map(percent, one.tpr.values())]
        yield [name, attacker, f"{attack} *" if attack == found.attack else attack, *figures, str(one.broadcasts)]
    for attack, why in found.left_out.items():
        yield [name, attacker, attack, why, *[""] * (len(ATTACKS) - 2)]


def activity_rows(name: str, found: AuditResult) -> Iterator[list[str]]:
    """Yield the attacks of each attacker of a defence, or why it has none."""
    for attacker in found.names:
        did = {"attacks the model": attacker in found.attackers, "rebuilds records": attacker in found.rebuilt}
        yield [name, attacker, ", ".join(what for what, done in did.items() if done)]
    for attacker, why in found.inapplicable.items():
        yield [name, attacker, why if why.startswith("failed: ") else f"does not apply: {why}"]
    for attacker, why in found.not_rebuilt.items():
        yield [name, attacker, f"rebuilds no records: {why}"]
    if found.server:
        why = found.server.failed
        yield [name, "curious server", f"not run: {why}" if why else "rebuilds records from updates and sums"]


def attack_tables(done: Mapping[str, AuditResult]) -> list[Section]:
    """Return the membership attacks one by one, and which attackers ran."""
    members = [
        row
        for name, found in done.items()
        for attacker, figures in found.attackers.items()
        if figures.membership
        for row in member_rows(name, attacker, figures.membership)
    ]
    activities = [row for name, found in done.items() for row in activity_rows(name, found)]
    tables = [
        Table("Membership, attack by attack", [*WHO, *ATTACKS], members, ATTACKS_NOTE),
        Table("Attackers", [*WHO, "attacks"], activities, "An attacker does not apply where it has nothing to use."),
    ]
    return [table for table in tables if table.rows]


def show(every: Audits) -> Shown:
    """Return the verdicts, the table and the sections after it."""
    results = {name: found for name, found in every.items() if name != UNDEFENDED}
    rows = [row for name, found in every.items() for row in attacker_rows(name, found)]
    plain = every.get("plain", every.get(UNDEFENDED))
    first: list[Section] = []
    sections: list[Section] = []
    if isinstance(plain, AuditResult):
        rows.append(guess_row(plain))
        first = verdict_sections(results, plain)
        sections = [section for question in questions(plain) for section in chart(question, results, plain)]
        sections += server_sections(plain)
    gaps = [
        f"{name}: {one.metric} {one.train:.3f} on members, {one.test:.3f} on others, gap {one.gap:.3f}"
        for name, one in results.items()
        if isinstance(one, AuditResult)
    ]
    sections += attack_tables({name: one for name, one in every.items() if isinstance(one, AuditResult)})
    sections += [Text("Gap between members and others", gaps), Text("How to read it", READING)]
    return Shown("", headline(every), HEADER, rows, NOTE, sections, first)
