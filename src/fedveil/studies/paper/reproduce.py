"""`fedveil reproduce`: compute missing exhibits, store them as JSON, and build the page from the stored data alone."""

import platform
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from pydantic import JsonValue, TypeAdapter

from fedveil.errors import BadArgument
from fedveil.files import write_whole
from fedveil.locks import locked
from fedveil.plain_json import read_json, to_json
from fedveil.report import Facts, Page, Section, Table, Text, write
from fedveil.runs.build import load_data
from fedveil.studies.basis import AGAIN, Basis, explain_change
from fedveil.studies.digests import Digests, configs_in
from fedveil.studies.jobs import Show
from fedveil.studies.paper.fig3 import FIG3
from fedveil.studies.paper.fig4 import FIG4
from fedveil.studies.paper.fig5 import FIG5
from fedveil.studies.paper.plan import Plan, read_plan
from fedveil.studies.paper.table1 import TABLE1
from fedveil.studies.paper.table2 import TABLE2
from fedveil.studies.paper.table3 import TABLE3
from fedveil.studies.paper.table4 import TABLE4
from fedveil.studies.study import Shown, run_graph

EXHIBITS = {
    "table1": TABLE1,
    "table2": TABLE2,
    "fig3": FIG3,
    "table3": TABLE3,
    "table4": TABLE4,
    "fig4": FIG4,
    "fig5": FIG5,
}
LEAD = (
    "Every table and figure of the evaluation of Yang et al., An Accuracy-Lossless Perturbation Method for Defending "
    "Privacy Attacks in Federated Learning, recomputed, with the paper's values beside ours."
)
SUMMARY = (
    "The paper's figures beside ours at this scale. An adaptive attacker knows the defence; of several, the summary "
    "shows the most successful one. Settings and differences from the paper are given with each table."
)
File = Mapping[str, JsonValue]  # a stored exhibit


def select_names(asked: Sequence[str]) -> list[str]:
    """Return the exhibits of "all" or of names, in the paper's order."""
    for name in asked:
        if name not in (*EXHIBITS, "all"):
            fix = f"use all, or some of {', '.join(EXHIBITS)}"
            raise BadArgument("fedveil reproduce", f"unknown table or figure: {name!r}", fix)
    return [name for name in EXHIBITS if name in asked or "all" in asked]


def has_failure(results: JsonValue) -> bool:
    """Whether any part of the results failed."""
    if isinstance(results, dict):
        return bool(results.get("failed")) or any(map(has_failure, results.values()))
    return isinstance(results, list) and any(map(has_failure, results))


def _settings(plan: Plan) -> dict[str, JsonValue]:
    """Return the values that a stored exhibit must have to belong to a plan."""
    return {"scale": plan.scale, "settings": plan.written, "device": plan.device}


def read_exhibit(plan: Plan, folder: Path) -> File | None:
    """Read an exhibit's file if it was made with the plan's settings."""
    try:
        found = read_json(folder / f"{plan.name}.json")
    except ValueError:  # a BadArgument is one
        return None
    return found if isinstance(found, dict) and found.items() >= _settings(plan).items() else None


def _basis(plan: Plan, folder: Path, digests: Digests) -> Basis:
    jobs = EXHIBITS[plan.name].graph(plan, folder).jobs
    return digests.configs_basis(config for job in jobs for config in configs_in(job.work))


def explain_stale(plan: Plan, file: File, folder: Path, digests: Digests) -> str | None:
    """Explain why a stored exhibit is no longer valid, as a clause; None if it is valid.

    Published results have no basis and stay valid, as do results whose data are not available.
    """
    if "basis" not in file:
        return None
    try:
        return explain_change(TypeAdapter(Basis).validate_python(file["basis"]), _basis(plan, folder, digests))
    except BadArgument:
        return None


def _command(name: str, plan: Plan, folder: Path) -> str:
    device = "" if plan.device == "cpu" else f" --device {plan.device}"
    return f"fedveil reproduce {name} --scale {plan.scale}{device} --out {shlex.quote(str(folder))}"


def compute(plan: Plan, folder: Path, workers: int | None, show: Show, digests: Digests) -> File:
    """Compute an exhibit and write its file; missing data are reported before anything runs."""
    begin, work = time.monotonic(), folder / "work"
    graph = EXHIBITS[plan.name].graph(plan, work)
    every = {config.data.name: config for job in graph.jobs for config in configs_in(job.work)}
    for config in every.values():
        load_data(config)  # decodes images once, for all processes
    results = run_graph(graph, work, workers=workers, show=show, digests=digests)
    made: dict[str, JsonValue] = {
        **_settings(plan),
        "basis": _basis(plan, work, digests).to_plain(),
        "command": _command(plan.name, plan, folder),
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
    show: Show = lambda name, fraction, what: None,
    on_done: Callable[[Plan, Shown], None] = lambda plan, shown: None,
) -> Path:
    """Compute the exhibits that are not in the folder yet, write the page of all that are, and return its path.

    Args:
        names: names of exhibits, or "all".
        scale: "quick", "cpu" or "paper".
        folder: gets NAME.json for each exhibit, report.html, and work/ with everything needed to resume.
        workers: number of processes; one per core by default.
        device: device to compute on.
        show: called with (job, fraction done, current step).
        on_done: called with each exhibit as soon as it is available.
    """
    plans = {name: read_plan(name, scale, device) for name in EXHIBITS}
    asked, digests = select_names(names), Digests()
    files, shown = dict[str, File](), dict[str, Shown]()

    def add(name: str, file: File) -> None:
        files[name], shown[name] = file, EXHIBITS[name].present(plans[name], file["results"])

    with locked(folder):
        for name, plan in plans.items():
            if file := read_exhibit(plan, folder):
                if why := explain_stale(plan, file, folder / "work", digests):
                    show(name, 0.0, f"{AGAIN if name in asked else 'left out'}: {why}")
                    continue
                add(name, file)
                if name in asked and not has_failure(file["results"]):
                    show(name, 1.0, "kept")
                    on_done(plan, shown[name])
                    asked.remove(name)
        for name in asked:
            add(name, compute(plans[name], folder, workers, show, digests))
            _write_page(plans, files, shown, folder)
            on_done(plans[name], shown[name])
        return _write_page(plans, files, shown, folder)


def _write_page(plans: Mapping[str, Plan], files: Mapping[str, File], shown: Mapping[str, Shown], folder: Path) -> Path:
    """Write one page of all available exhibits, with a summary first."""
    there, plan = [name for name in EXHIBITS if name in files], next(iter(plans.values()))
    rows = [row for name in there for row in shown[name].headline]
    sections: list[Section] = [Table("Summary", ["", "the paper", "ours"], rows, SUMMARY)] if rows else []
    for name in there:
        sections += _sections(plans[name], files[name], shown[name])
    title = f"The paper, reproduced ({plan.scale})"
    page = Page(title, join_verdicts(shown), sections, _command("all", plan, folder), LEAD)
    return write(page, folder / "report.html")


def _sections(plan: Plan, file: File, shown: Shown) -> list[Section]:
    """Return the table, its other sections, the differences from the paper, and the settings."""
    main: Section = Text(plan.title, [shown.note, plan.settings.about])
    if shown.rows:
        main = Table(plan.title, shown.header, shown.rows, f"{shown.note} Scale: {plan.settings.about}")
    label = plan.title.split(":")[0]
    facts = {
        "scale": plan.scale,
        "repeat": str(file["command"]),
        "minutes of the last call": str(file["minutes"]),
        "with": str(file["with"]),
    }
    for name, value in plan.written.items():
        groups = value if name == "runs" and isinstance(value, list) else [value]
        for number, group in enumerate(groups, start=1):
            said = ", ".join(f"{k} = {v}" for k, v in group.items()) if isinstance(group, dict) else str(group)
            facts[f"{name} {number}" if len(groups) > 1 else name] = said
    why = Text(f"{label}: differences from the paper, and why", plan.why)
    return [main, *shown.sections, why, Facts(f"{label}: settings", facts)]


def join_verdicts(shown: Mapping[str, Shown]) -> str:
    """Join the first verdict on accuracy and the first one on attacks into a sentence."""
    groups = (("table2", "table1", "fig3"), ("table3", "table4", "fig5"))
    said = [[shown[name].verdict for name in names if name in shown and shown[name].verdict] for names in groups]
    parts = [verdicts[0] for verdicts in said if verdicts]
    if not parts:
        return "No verdict: nothing on this page has figures to judge."
    after = "".join(f"; {part.replace('the veil', 'it')}" for part in parts[1:])
    return f"{parts[0][0].upper()}{parts[0][1:]}{after}."
