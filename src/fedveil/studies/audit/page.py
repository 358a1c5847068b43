"""An audit in words, in pictures and in tables: the verdict first."""

from collections.abc import Iterator, Mapping

from fedveil.attacks.observed import PUBLISHED
from fedveil.report import Interval, Intervals, Section, Table, Text
from fedveil.studies.audit.attackers import attacker_table, member_table
from fedveil.studies.audit.results import Audited, Audits
from fedveil.studies.audit.verdicts import (
    LEAKS,
    MEASURES,
    NEARLY,
    NOTHING,
    PARTLY,
    PROTECTED,
    TOO_FEW,
    guess_of,
    judge,
    measures_of,
    strongest,
)
from fedveil.studies.estimates import percent, text
from fedveil.studies.gradients import server_page
from fedveil.studies.gradients.results import Curious
from fedveil.studies.jobs import Failed
from fedveil.studies.tables import Presented, display_name, join_words, mark

UNDEFENDED = "undefended"
DOES = {
    PROTECTED: "protects",
    NEARLY: "nearly protects",
    PARTLY: "partly protects",
    LEAKS: "does not protect",
    TOO_FEW: "has too few trials on",
}
HEADER = (
    *("defence", "attacker", "agreement, %", "membership AUC", "PSNR, dB"),
    *("membership by", "membership, %", "TPR at 1 % FPR, %", "accuracy, %", "ranking AUC"),
)
NOTE = (
    "Agreement with the server's model and accuracy (model stealing) on held-out records; membership of other clients' "
    "records by the attack that did best on records that the attacker knows, never on the test: AUC, balanced "
    "accuracy, true positives at 1 % false positives, where 1,000 non-members stand for it; PSNR of one victim's "
    "record rebuilt from the broadcasts of a new network; for one output the AUC of the ranking, in the better "
    "direction. Intervals: 95 %. Every attacker here is a client that follows the protocol."
)
LIMITS = (
    "An audit shows what these attackers reach. It is no proof that no better one exists: only differential privacy "
    "bounds every attacker (docs/defences/privacy.md). A figure near chance for published attacks says nothing about "
    "an adaptive attacker, which is why both stand in every table.",
    "Guessing is the best constant answer on the same records: the most frequent answer of the server's model, the "
    "most frequent class, the mean of the attacker's own records. Something is found if the 95 % interval lies above "
    "guessing, or, for an AUC of membership, below 0.5. Nothing is found if the interval reaches guessing and ends "
    "within a tenth of the way to 100 %, to an AUC of 1 (0.05 to either side) or to 10 dB above guessing. If it holds "
    "both guessing and more than that, there are too few trials to tell.",
    "An AUC below 0.5 says that members have the lower scores: whoever knows that reverses them, and has 1 - AUC. The "
    "records of the test show the direction here; an attacker needs records of its own to know it.",
    "Without a gap between training and test quality there is nothing for a membership attack to find, with or without "
    "a defence; the gap is printed for that reason.",
)
SERVER_SEES = "A veil changes nothing here: the server removes it."


def rows_of(name: str, found: Audited | Failed) -> Iterator[list[str]]:
    """One row per attacker."""
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


def guess_row(plain: Audited) -> list[str]:
    """What the best constant answer reaches, without any attack."""
    floor = text(plain.rebuilt["floor"]) if "floor" in plain.rebuilt else ""
    agreement, accuracy = (
        "" if share is None else f"{100 * share:.1f}" for share in (plain.guessing.agreement, plain.guessing.accuracy)
    )
    return ["guessing", "", agreement, "0.500", floor, "", "50.0", "1.0", accuracy, "0.500" if plain.ranks else ""]


def verdict(defence: str, found: Audited | Failed, plain: Audited) -> str:
    """A few sentences on one defence."""
    if isinstance(found, Failed):
        return f"{defence}: failed, so nothing is known."
    said = [judged.text for name in MEASURES if (judged := judge(found, plain, name))]
    return f"{defence}: " + "; ".join(said) + "."


def one_line(every: Audits) -> str:
    """The verdict in one sentence: how the one defence does by each measure, or which of several protect what."""
    plain = every.get("plain", every.get(UNDEFENDED))
    done = {name: one for name, one in every.items() if name != UNDEFENDED and isinstance(one, Audited)}
    if not isinstance(plain, Audited) or not done:
        return "There is no verdict: the audit of the undefended federation failed, or that of every other."
    defended = {name: one for name, one in done.items() if name != "plain"} or done
    parts = [of_one(*one, plain) for one in defended.items()] if len(defended) == 1 else of_several(defended, plain)
    return f"Against the strongest attacker, {'; '.join(parts)}."


def of_one(defence: str, found: Audited, plain: Audited) -> str:
    """What one defence does by each measure, with the strongest attacker's figures."""
    parts: dict[str, list[str]] = {}
    for name, (what, *_) in MEASURES.items():
        if judged := judge(found, plain, name):
            top, where = judged.strongest.figure.value, ", below chance" if judged.strongest.below else ""
            share = f"{100 * top:.0f} % agreement" if name == "agreement" and not found.ranks else f"AUC {top:.2f}"
            figure = f" ({f'{top:.0f} dB' if name == 'rebuilt' else share}{where})"
            told = judged.word in DOES and judged.word != TOO_FEW
            parts.setdefault(DOES.get(judged.word, "shows nothing about"), []).append(what + figure * told)
    said = [f"{does} {join_words(own, 'or' if ' not ' in does else 'and')}" for does, own in parts.items()]
    return f"{'plain training' if defence == 'plain' else display_name(defence)} {join_words(said, 'and')}"


def of_several(defended: Mapping[str, Audited], plain: Audited) -> list[str]:
    """Which defences protect what."""
    parts = []
    for name, (what, *_) in MEASURES.items():
        words = {defence: said.word for defence, one in defended.items() if (said := judge(one, plain, name))}
        held = [
            f"{display_name(defence)}{' (nearly)' if said == NEARLY else ''}"
            for defence, said in words.items()
            if said in (PROTECTED, NEARLY)
        ]
        if all(said == NOTHING for said in words.values()):
            parts += [f"of {what} nothing is found"] if words else []
        elif all(said in (NOTHING, TOO_FEW) for said in words.values()):
            parts.append(f"there are too few trials on {what}")
        else:
            parts.append(
                f"{what} is protected by {join_words(held, 'and') if held else f'none of {len(words)} defences'}"
            )
    return parts


def glance(results: Audits, plain: Audited) -> Table:
    """The verdicts in one table."""
    rows = []
    for defence, found in results.items():
        judged = [None if isinstance(found, Failed) else judge(found, plain, name) for name in MEASURES]
        rows.append([defence, *(one.word.removeprefix("is ") if one else "not measured" for one in judged)])
    note = "By the strongest attacker that was run. The sentences below have the figures."
    return Table("Verdict", ["defence", *(what for what, *_ in MEASURES.values())], rows, note)


def chart(name: str, results: Audits, plain: Audited) -> Section | None:
    """One measure of all defences and attackers, beside guessing and no defence."""
    rows: list[Interval] = []
    for defence, found in results.items():
        if isinstance(found, Failed):
            rows.append(mark(PUBLISHED, None, defence))
            continue
        for attacker in found.names:
            if figure := found.figure(attacker, name):
                low, high = (min(max(end, -10.0), 200.0) for end in (figure.low, figure.high))
                rows.append(Interval(attacker, figure.value, low, high, defence))
    guess = guess_of(plain, name)
    top = strongest(plain, name, guess)
    if not rows or top is None:
        return None
    _, _, title, label = measures_of(plain)[name]
    return Intervals(title, label, rows, {"guessing": round(guess, 3), UNDEFENDED: round(top.figure.value, 3)})


def server_sections(found: Curious) -> list[Section]:
    """What a curious server learns: a table, and pictures."""
    table = Table("Curious server", server_page.HEADER[1:], list(server_page.rows_of(found)), server_page.NOTE)
    pictures = server_page.gallery("What the server sees", found)
    return [table, pictures] if pictures else []


def presented(every: Audits) -> tuple[list[Section], Presented]:
    """The verdict; the table and the sections after it."""
    results = {name: found for name, found in every.items() if name != UNDEFENDED}
    rows = [row for name, found in every.items() for row in rows_of(name, found)]
    plain = every.get("plain", every.get(UNDEFENDED))
    first: list[Section] = []
    charts: list[Section | None] = []
    if isinstance(plain, Audited):
        rows.append(guess_row(plain))
        said = [verdict(name, found, plain) for name, found in results.items()]
        charts = [chart(name, results, plain) for name in MEASURES]
        if plain.server and plain.server.whole:
            said.append(f"server: {server_page.verdict(plain.server)} {SERVER_SEES}")
            charts += server_sections(plain.server)
        first = [glance(results, plain), Text("Verdict in words", said)]
    gaps = [
        f"{name}: {one.metric} {one.train:.3f} on members, {one.test:.3f} on others, gap {one.gap:.3f}"
        for name, one in results.items()
        if isinstance(one, Audited)
    ]
    own = [table for table in (member_table(every), attacker_table(every)) if table]
    texts = [Text("Gap between members and others", gaps), Text("How to read it", LIMITS)]
    return first, (HEADER, rows, NOTE, [*(section for section in charts if section), *own, *texts])
