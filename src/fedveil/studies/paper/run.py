"""`fedveil reproduce`: compute what is not there yet, keep it as data, and build the page from the data alone."""

import platform
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import torch
from pydantic import JsonValue, TypeAdapter

from fedveil.errors import BadArgument
from fedveil.files import write_whole
from fedveil.locks import locked
from fedveil.plain_json import parse_json, to_json
from fedveil.report import Facts, Page, Section, Table, Text, write
from fedveil.runs.config import Config
from fedveil.studies.basis import AGAIN, Basis, explain_change
from fedveil.studies.digests import Digests
from fedveil.studies.jobs import Show
from fedveil.studies.paper.fig3 import Fig3
from fedveil.studies.paper.fig4 import Fig4
from fedveil.studies.paper.fig5 import Fig5
from fedveil.studies.paper.plan import Plan, read_plan
from fedveil.studies.paper.table1 import Table1
from fedveil.studies.paper.table2 import Table2
from fedveil.studies.paper.table3 import Table3
from fedveil.studies.paper.table4 import Table4
from fedveil.studies.study import Shown


class Producer(Protocol):
    """An exhibit, whatever the type of its results."""

    def loaded(self, plan: Plan, results: JsonValue) -> Shown:
        """See `Exhibit.loaded`."""

    def configs(self, plan: Plan) -> list[Config]:
        """See `Exhibit.configs`."""

    def computed(
        self, plan: Plan, folder: Path, workers: int | None, show: Show, digests: Digests | None = None
    ) -> JsonValue:
        """See `Exhibit.computed`."""


EXHIBITS: dict[str, Producer] = {
    "table1": Table1("table1"),
    "table2": Table2("table2"),
    "fig3": Fig3("fig3"),
    "table3": Table3("table3"),
    "table4": Table4("table4"),
    "fig4": Fig4("fig4"),
    "fig5": Fig5("fig5"),
}
LEAD = (
    "Every table and figure of the evaluation of Yang et al., An Accuracy-Lossless Perturbation Method for Defending "
    "Privacy Attacks in Federated Learning, computed anew, the paper's values beside ours."
)
SUMMARY = (
    "The paper's figures beside ours at this scale. An adaptive attacker knows the defence; of several, the summary "
    "has the one with the highest success. Settings and differences from the paper stand with each table."
)
RENAMED = {
    '"control"': '"baseline"',
    '"calibrated"': '"own labels"',
    '"stacked"': '"sketches stacked"',
    ": calibrated, by": ": own labels, by",
    ": stacked, by": ": sketches stacked, by",
}
"""Names in results of earlier versions, and what they are called now."""


@dataclass(frozen=True)
class Made:
    """An exhibit's file, with its plan and what a reader gets."""

    plan: Plan
    file: Mapping[str, JsonValue]
    shown: Shown

    def sections(self) -> list[Section]:
        """The table, what it shows besides, why it differs, how it was made."""
        plan, shown = self.plan, self.shown
        main: Section = Text(plan.title, [shown.note, plan.settings.about])
        if shown.rows:
            main = Table(plan.title, shown.header, shown.rows, f"{shown.note} Scale: {plan.settings.about}")
        label = plan.title.split(":")[0]
        facts = {
            "scale": plan.scale,
            "repeat": str(self.file["command"]),
            "minutes of the last call": str(self.file["minutes"]),
            "with": str(self.file["with"]),
            **settings_facts(plan.asked),
        }
        why = Text(f"{label}: differences from the paper, and why", plan.why)
        return [main, *shown.sections, why, Facts(f"{label}: how it was made", facts)]


def settings_facts(asked: Mapping[str, JsonValue]) -> dict[str, str]:
    """What decides the results, as lines of text."""
    facts = {}
    for name, value in asked.items():
        groups = value if name == "runs" and isinstance(value, list) else [value]
        for number, group in enumerate(groups, start=1):
            several = f" {number}" if len(groups) > 1 else ""
            said = ", ".join(f"{k} = {v}" for k, v in group.items()) if isinstance(group, dict) else str(group)
            facts[f"{name}{several}"] = said
    return facts


def names_of(asked: Sequence[str]) -> list[str]:
    """The exhibits of "all" or of names, in the paper's order."""
    for name in asked:
        if name not in (*EXHIBITS, "all"):
            raise BadArgument("fedveil reproduce", f"there is no {name!r}", f"all, or some of {', '.join(EXHIBITS)}")
    return [name for name in EXHIBITS if name in asked or "all" in asked]


def broken(results: JsonValue) -> bool:
    """Whether any part of the results failed."""
    if isinstance(results, dict):
        return bool(results.get("failed")) or any(map(broken, results.values()))
    return isinstance(results, list) and any(map(broken, results))


def asked_of(plan: Plan) -> dict[str, JsonValue]:
    """What decides whether results on disk are the plan's."""
    return {"scale": plan.scale, "settings": plan.asked, "device": plan.device}


def read(plan: Plan, folder: Path) -> dict[str, JsonValue] | None:
    """The exhibit's file, if it was made with the plan's settings; results of earlier versions get today's names."""
    try:
        text = (folder / f"{plan.name}.json").read_text()
        for old, new in RENAMED.items():
            text = text.replace(old, new)
        found: JsonValue = parse_json(f"{plan.name}.json", text)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.items() >= asked_of(plan).items() else None


def repeat(name: str, plan: Plan, folder: Path) -> str:
    """The command that computes it again."""
    device = "" if plan.device == "cpu" else f" --device {plan.device}"
    return f"fedveil reproduce {name} --scale {plan.scale}{device} --out {shlex.quote(str(folder))}"


def explain_stale(plan: Plan, file: Mapping[str, JsonValue], digests: Digests) -> str | None:
    """Return why an exhibit on disk is no longer valid, as a clause; None if it is.

    A file without a basis was published with its version in it, and stays valid, as one whose data are not here does.
    """
    if "basis" not in file:
        return None
    try:
        now = digests.basis_of_configs(EXHIBITS[plan.name].configs(plan))
        return explain_change(TypeAdapter(Basis).validate_python(file["basis"]), now)
    except BadArgument:
        return None


def compute(plan: Plan, folder: Path, workers: int | None, show: Show, digests: Digests) -> dict[str, JsonValue]:
    """Compute an exhibit and write its file."""
    begin, exhibit = time.monotonic(), EXHIBITS[plan.name]
    results = exhibit.computed(plan, folder / "work", workers, show, digests)
    made: dict[str, JsonValue] = {
        **asked_of(plan),
        "basis": digests.basis_of_configs(exhibit.configs(plan)).plain(),
        "command": repeat(plan.name, plan, folder),
        "minutes": round((time.monotonic() - begin) / 60, 1),
        "with": f"fedveil {version('fedveil')}, torch {torch.__version__}, Python {platform.python_version()}",
        "results": results,
    }
    write_whole(folder / f"{plan.name}.json", to_json(made, indent=1, exact=True) + "\n")
    return made


def reproduce(
    names: Sequence[str],
    scale: str,
    folder: Path,
    *,
    workers: int | None = None,
    device: str = "cpu",
    show: Show = lambda name, share, what: None,
    on_done: Callable[[Plan, Shown], None] = lambda plan, shown: None,
) -> Path:
    """Compute the exhibits that are not in the folder yet, and write the page of all that are; returns its place.

    Args:
        names: of exhibits, or "all".
        scale: "quick", "cpu" or "paper".
        folder: NAME.json for each exhibit, report.html, and work/ with all that a stopped run goes on from.
        workers: processes side by side; one per core by default.
        device: to compute on.
        show: gets (part, share that is done, what is being done).
        on_done: gets each exhibit when it is there.
    """
    plans = {name: read_plan(name, scale, device) for name in EXHIBITS}
    asked, made, digests = names_of(names), dict[str, Made](), Digests()
    with locked(folder):
        for name, plan in plans.items():
            if file := read(plan, folder):
                if why := explain_stale(plan, file, digests):
                    show(name, 0.0, f"{AGAIN if name in asked else 'left out'}: {why}")
                    continue
                made[name] = Made(plan, file, EXHIBITS[name].loaded(plan, file["results"]))
                if name in asked and not broken(file["results"]):
                    show(name, 1.0, "kept")
                    on_done(plan, made[name].shown)
                    asked.remove(name)
        for name in asked:
            plan, file = plans[name], compute(plans[name], folder, workers, show, digests)
            made[name] = Made(plan, file, EXHIBITS[name].loaded(plan, file["results"]))
            write_page(made, folder)
            on_done(plan, made[name].shown)
        return write_page(made, folder)


def write_page(made: Mapping[str, Made], folder: Path) -> Path:
    """Write one page of all exhibits that are there, with a summary first."""
    every = [made[name] for name in EXHIBITS if name in made]
    plan, rows = every[0].plan, [row for one in every for row in one.shown.headline]
    sections: list[Section] = [Table("Summary", ["", "the paper", "ours"], rows, SUMMARY)] if rows else []
    for one in every:
        sections += one.sections()
    title = f"The paper, reproduced ({plan.scale})"
    page = Page(title, verdict(made), sections, repeat("all", plan, folder), LEAD)
    return write(page, folder / "report.html")


def verdict(made: Mapping[str, Made]) -> str:
    """What the veil costs and how far attackers get under it, in one sentence: of tables that are there."""
    parts = []
    for names in (("table2", "table1", "fig3"), ("table3", "table4", "fig5")):
        said = [made[name].shown.verdict for name in names if name in made]
        parts += [one for one in said if one][:1]
    if not parts:
        return "There is no verdict: what is here has no figures that could be judged."
    after = "".join(f"; {part.replace('the veil', 'it')}" for part in parts[1:])
    return f"{parts[0][0].upper()}{parts[0][1:]}{after}."
