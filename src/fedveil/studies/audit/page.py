"""An audit in words, in one picture and in tables."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.attacks.adaptive import ADAPTIVE, PUBLISHED
from fedveil.report import Interval, Intervals, Section, Table, Text
from fedveil.runs.config import Config
from fedveil.studies.attack import Shown
from fedveil.studies.jobs import Result

Figures = Mapping[str, Any]
PROTECTS, HINDERS = 0.2, 0.8  # shares of the way from chance to no defence at all
NOTHING = 0.02  # what the undefended figure must be above a guess for there to be anything to find
RECOGNISED = 10.0  # dB above a guess, a tenth of its squared error: such a record is known, and more says nothing
HEADER = (
    "defence",
    "attacker",
    "agreement",
    "accuracy",
    "ranking AUC",
    "membership",
    "membership AUC",
    "TPR at 1 % FPR",
    "PSNR, dB",
)
NOTE = (
    "Agreement with the server's model and accuracy (model stealing) on held-out records; for one output the AUC of "
    "the ranking, either way round; membership of other clients' records by a loss threshold: balanced accuracy, AUC, "
    "true positives at 1 % false ones; PSNR of one victim's record rebuilt from two broadcasts of a new network. "
    "Intervals: 95 %. Every attacker is a client that follows the protocol."
)
LIMITS = (
    "An audit shows what these attackers reach. It is no proof that no better one exists: only differential privacy "
    "bounds every attacker (docs/defences/privacy.md). A figure near chance for attacks as published says nothing "
    "about a participant that thinks, which is why both stand in every table.",
    "Without a gap between training and test quality there is nothing for a membership attack to find, with or without "
    "a defence; the gap is printed for that reason.",
)


def interval(found: Figures | None, form: str = "{:.1%}") -> str:
    """A value with its interval."""
    if not found:
        return ""
    value, low, high = (form.format(found[key]) for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def reference(results: Mapping[str, Result], folder: Path) -> Result | None:
    """The undefended federation's figures."""
    if "plain" in results:
        return results["plain"] if "failed" not in results["plain"] else None
    try:
        found: Result = json.loads((folder / "shared" / "undefended.json").read_text())["result"]
    except (OSError, json.JSONDecodeError, KeyError):
        return None
    return None if "failed" in found else found


def rows_of(name: str, found: Result) -> Iterator[list[str]]:
    """A row an attacker."""
    if "failed" in found:
        yield [name, "", "failed", *[""] * (len(HEADER) - 3)]
        return
    built = found["rebuilt"]
    names = [*found["attackers"], *(n for n in built if n not in (*found["attackers"], "floor", "left out"))]
    for attacker in names:
        figures = found["attackers"].get(attacker, {})
        member = figures.get("membership", {})
        yield [
            name,
            attacker,
            interval(figures.get("agreement")),
            interval(figures.get("accuracy")),
            interval(figures.get("ranking"), "{:.3f}"),
            interval(member.get("accuracy")),
            interval(member.get("auc"), "{:.3f}"),
            interval((member.get("tpr") or {}).get("0.01")),
            interval(built.get(attacker), "{:.1f}"),
        ]


def reference_rows(plain: Result) -> Iterator[list[str]]:
    """Chance, and how well a guess without any attack does."""
    chance = f"{1 / max(2, plain['outputs']):.1%}"
    floor = interval(plain["rebuilt"].get("floor"), "{:.1f}")
    yield ["chance", "", chance, "", "0.500", "50.0%", "0.500", "1.0%", floor]


def leak(value: float, chance: float, undefended: float) -> float:
    """How far on the way from chance to no defence."""
    return (value - chance) / (undefended - chance) if undefended > chance else 0.0


RANKS = "ranks new records with an AUC of {}"
MEASURES: Mapping[str, tuple[str, str]] = {
    "agreement": ("the model", "agrees with the server's model on {}"),
    "membership": ("who took part", "tells members from others with an AUC of {}"),
    "rebuilt": ("a single record", "rebuilds it with a PSNR of {}"),
}


def measure(found: Result, attacker: str, name: str) -> float | None:
    """One figure of one attacker."""
    if name == "rebuilt":
        value = found["rebuilt"].get(attacker)
        return value["value"] if value else None
    figures = found["attackers"].get(attacker)
    if not figures:
        return None
    if name == "agreement":
        return float(figures.get("ranking", figures["agreement"])["value"])
    return float(figures["membership"]["auc"]["value"]) if "membership" in figures else None


def chance_of(plain: Result, name: str) -> float:
    """What a guess reaches."""
    if name == "rebuilt":
        return float(plain["rebuilt"]["floor"]["value"]) if "floor" in plain["rebuilt"] else 0.0
    if name == "membership" or "ranking" in plain["attackers"][PUBLISHED]:
        return 0.5
    return 1 / max(2, int(plain["outputs"]))


def worst(found: Result, name: str) -> tuple[str, float] | None:
    """The attacker that gets furthest."""
    every = {*found["attackers"], *found["rebuilt"]} - {"floor", "left out"}
    known = {a: value for a in sorted(every) if (value := measure(found, a, name)) is not None}
    return max(known.items(), key=lambda item: item[1]) if known else None


def word(share: float) -> str:
    """A verdict for a manager."""
    return "is protected" if share < PROTECTS else "is partly protected" if share < HINDERS else "is not protected"


def number(value: float, name: str, found: Result) -> str:
    """A figure as a reader wants it."""
    if name == "rebuilt":
        return f"{value:.0f} dB"
    plain_share = name == "agreement" and "ranking" not in found["attackers"][PUBLISHED]
    return f"{value:.0%} of new records" if plain_share else f"{value:.2f}"


@dataclass(frozen=True)
class Judgement:
    """One measure of one defence.

    Attributes:
        word: "is protected", ...; "" where there is nothing to find.
        text: a sentence with the figures.
    """

    word: str
    text: str


def judge(found: Result, plain: Result, name: str) -> Judgement | None:
    """How far the strongest attacker gets on one measure; None where it was not measured."""
    what, does = MEASURES[name]
    strongest, top = worst(found, name), worst(plain, name)
    if strongest is None or top is None:
        return None
    chance = chance_of(plain, name)
    if top[1] - chance < NOTHING:
        return Judgement("nothing to find", f"{what}: nothing to find, even without a defence")
    full = min(top[1], chance + RECOGNISED) if name == "rebuilt" else top[1]
    share, published = leak(strongest[1], chance, full), measure(found, PUBLISHED, name)
    said = word(share)
    if said != "is not protected" and strongest[0] == PUBLISHED and name == "rebuilt":
        said = "is not shown to leak, but only the published attack was run"
    ranks = name == "agreement" and "ranking" in found["attackers"][PUBLISHED]
    reached = (RANKS if ranks else does).format(number(strongest[1], name, found))
    text = f"{what} {said}: the strongest attacker ({strongest[0]}) {reached}"
    if published is not None and leak(published, chance, full) < share - PROTECTS:
        text += f", attacks as published reach {number(published, name, found)}"
    return Judgement(said, f"{text} (guessing {number(chance, name, found)}, undefended {number(top[1], name, found)})")


def verdict(defence: str, found: Result, plain: Result) -> str:
    """A few sentences on one defence."""
    if "failed" in found:
        return f"{defence}: failed, so nothing is known."
    said = [judged.text for name in MEASURES if (judged := judge(found, plain, name))]
    return f"{defence}: " + "; ".join(said) + "."


def glance(results: Mapping[str, Result], plain: Result) -> Table:
    """The verdicts in one table."""
    rows = []
    for defence, found in results.items():
        judged = [None if "failed" in found else judge(found, plain, name) for name in MEASURES]
        rows.append([defence, *(j.word.removeprefix("is ") if j else "not measured" for j in judged)])
    note = "By the strongest attacker that was run. Sentences with the figures stand below."
    return Table("At a glance", ["defence", *(what for what, _ in MEASURES.values())], rows, note)


def picture(title: str, name: str, label: str, results: Mapping[str, Result], plain: Result) -> Section | None:
    """One measure of all defences and attackers, beside chance and no defence."""
    rows = []
    for defence, found in results.items():
        if "failed" in found:
            rows.append(Interval(PUBLISHED, None, group=defence, missing="failed"))
            continue
        every = [PUBLISHED, *ADAPTIVE.get(defence, {}), *found["rebuilt"]]
        for attacker in dict.fromkeys(every):
            figures = interval_of(found, attacker, name)
            if figures:
                low, high = (min(max(figures[end], -10.0), 200.0) for end in ("low", "high"))
                rows.append(Interval(attacker, figures["value"], low, high, group=defence))
    top = worst(plain, name)
    if not rows or top is None:
        return None
    lines = {"chance": round(chance_of(plain, name), 3), "undefended": round(top[1], 3)}
    return Intervals(title, label, rows, lines)


def interval_of(found: Result, attacker: str, name: str) -> Figures | None:
    """One figure of one attacker with its interval."""
    if attacker in ("floor", "left out"):
        return None
    if name == "rebuilt":
        return found["rebuilt"].get(attacker)  # type: ignore[no-any-return]
    figures = found["attackers"].get(attacker)
    if not figures:
        return None
    if name == "membership":
        return figures["membership"]["auc"] if "membership" in figures else None
    return figures.get("ranking", figures["agreement"])  # type: ignore[no-any-return]


def gap_line(name: str, found: Result) -> str:
    """How much better the model is on members."""
    return (
        f"{name}: {found['metric']} {found['train']:.3f} on members, {found['test']:.3f} on others, "
        f"gap {found['gap']:.3f}"
    )


def present(config: Config, settings: Any, results: Mapping[str, Result], folder: Path) -> Shown:
    """The table, the verdict, and the picture that shows it at a glance."""
    plain = reference(results, folder)
    rows = [row for name, found in results.items() for row in rows_of(name, found)]
    sections: list[Section] = []
    if plain:
        if "plain" not in results:
            rows += [["undefended", *row[1:]] for row in rows_of("plain", plain)]
        rows += reference_rows(plain)
        ranking = "ranking" in plain["attackers"][PUBLISHED]
        same = (
            ("AUC of the participant's ranking", "AUC") if ranking else ("Agreement with the true model", "agreement")
        )
        sections.append(glance(results, plain))
        sections.append(Text("Verdict", [verdict(name, found, plain) for name, found in results.items()]))
        wanted = {
            "agreement": same,
            "membership": ("Membership of others' records", "AUC"),
            "rebuilt": ("A victim's record, rebuilt", "PSNR, dB"),
        }
        for name, (title, label) in wanted.items():
            drawn = picture(title, name, label, results, plain)
            if drawn:
                sections.append(drawn)
    gaps = [gap_line(name, found) for name, found in results.items() if "failed" not in found]
    sections += [Text("Gap between members and others", gaps), Text("How to read it", LIMITS)]
    return Shown(HEADER, rows, NOTE, sections)
