"""`fedveil reproduce`: compute what is not there yet, keep it as data, and build the page from the data alone."""

import json
import platform
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fedveil.errors import BadArgument
from fedveil.report import Facts, Page, Section, Table, Text, write
from fedveil.runs.folder import write_text
from fedveil.studies.attack import Show, Shown
from fedveil.studies.paper.fig3 import FIG3
from fedveil.studies.paper.fig4 import FIG4
from fedveil.studies.paper.fig5 import FIG5
from fedveil.studies.paper.plan import Exhibit, Plan, read_plan
from fedveil.studies.paper.table1 import TABLE1
from fedveil.studies.paper.table2 import TABLE2
from fedveil.studies.paper.table3 import TABLE3
from fedveil.studies.paper.table4 import TABLE4

EXHIBITS: dict[str, Exhibit] = {exhibit.name: exhibit for exhibit in (TABLE1, TABLE2, FIG3, TABLE3, TABLE4, FIG4, FIG5)}
LEAD = (
    "Every table and figure of the evaluation of Yang et al., An Accuracy-Lossless Perturbation Method for Defending "
    "Privacy Attacks in Federated Learning, computed anew, the paper's values beside ours."
)


def names_of(asked: Sequence[str]) -> list[str]:
    """The exhibits of "all" or of names, in the paper's order."""
    for name in asked:
        if name not in (*EXHIBITS, "all"):
            raise BadArgument("fedveil reproduce", f"there is no {name!r}", f"all, or some of {', '.join(EXHIBITS)}")
    return [name for name in EXHIBITS if name in asked or "all" in asked]


def settled(plan: Plan) -> dict[str, Any]:
    """What decides an exhibit's results."""
    return {"scale": plan.scale, "settings": plan.settings, "device": plan.device}


def broken(results: Any) -> bool:
    """Whether any part of the results failed."""
    if isinstance(results, Mapping):
        return "failed" in results or any(map(broken, results.values()))
    return isinstance(results, list) and any(map(broken, results))


def read(plan: Plan, folder: Path) -> dict[str, Any] | None:
    """The exhibit's file, if it was made with the plan's settings."""
    try:
        found = json.loads((folder / f"{plan.name}.json").read_text())
    except (OSError, json.JSONDecodeError):
        return None
    usable = isinstance(found, dict) and all(found.get(key) == value for key, value in settled(plan).items())
    return found if usable else None


def repeat(name: str, plan: Plan, folder: Path) -> str:
    """The command that computes it again."""
    device = "" if plan.device == "cpu" else f" --device {plan.device}"
    return f"fedveil reproduce {name} --scale {plan.scale}{device} --out {shlex.quote(str(folder))}"


def compute(exhibit: Exhibit, plan: Plan, folder: Path, workers: int | None, show: Show) -> None:
    """Compute an exhibit and keep it; one that is there whole is left alone."""
    found = read(plan, folder)
    if found and not broken(found["results"]):
        show(plan.name, 1.0, "kept")
        return
    begin = time.monotonic()
    results = exhibit.gather(plan, folder / "work", workers, show)
    made = {
        **settled(plan),
        "command": repeat(plan.name, plan, folder),
        "minutes": round((time.monotonic() - begin) / 60, 1),
        "with": f"fedveil {version('fedveil')}, torch {torch.__version__}, Python {platform.python_version()}",
        "results": results,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / f"{plan.name}.json", json.dumps(made, indent=1) + "\n")


def reproduce(
    names: Sequence[str],
    scale: str,
    folder: Path,
    *,
    workers: int | None = None,
    device: str = "cpu",
    show: Show = lambda name, share, what: None,
    on_done: Callable[[str, Shown], None] = lambda name, shown: None,
) -> Path:
    """Compute the exhibits that are not in the folder yet, and write the page of all that are; returns its place.

    Args:
        names: of exhibits, or "all".
        scale: "quick", "cpu" or "paper".
        folder: NAME.json for each exhibit, report.html, and work/ with all that a stopped run goes on from.
        workers: processes side by side; one a core by default.
        device: to compute on.
        show: gets (part, share that is done, what is being done).
        on_done: gets each exhibit when it is there.
    """
    plans = {name: read_plan(name, scale, device) for name in EXHIBITS}
    for name in names_of(names):
        compute(EXHIBITS[name], plans[name], folder, workers, show)
        write_page(folder, plans)
        found = read(plans[name], folder)
        assert found is not None
        on_done(name, EXHIBITS[name].present(plans[name], found["results"]))
    return folder / "report.html"


def write_page(folder: Path, plans: Mapping[str, Plan]) -> None:
    """One page of all exhibits that the folder holds at this scale."""
    sections: list[Section] = []
    for name, plan in plans.items():
        found = read(plan, folder)
        if found:
            sections += exhibit_sections(plan, EXHIBITS[name].present(plan, found["results"]), found)
    one = next(iter(plans.values()))
    title = f"The paper, reproduced ({one.scale})"
    write(Page(title, LEAD, sections, repeat("all", one, folder)), folder / "report.html")


def exhibit_sections(plan: Plan, shown: Shown, found: Mapping[str, Any]) -> list[Section]:
    """An exhibit: its table, what it shows besides, why it differs, how it was made."""
    main: Section = Text(plan.title, [shown.note, plan.about])
    if shown.rows:
        main = Table(plan.title, shown.header, shown.rows, f"{shown.note} Scale: {plan.about}")
    facts = {
        "scale": plan.scale,
        "repeat": found["command"],
        "minutes of the last call": str(found["minutes"]),
        "with": found["with"],
    }
    for name, value in plan.settings.items():
        groups = value if name == "runs" else [value]
        for number, group in enumerate(groups, start=1):
            several = f" {number}" if len(groups) > 1 else ""
            said = ", ".join(f"{k} = {v}" for k, v in group.items()) if isinstance(group, Mapping) else str(group)
            facts[f"{name}{several}"] = said
    label = plan.title.split(":")[0]
    return [
        main,
        *shown.sections,
        Text(f"{label}: where paper and ours part, and why", plan.why),
        Facts(f"{label}: how it was made", facts),
    ]
