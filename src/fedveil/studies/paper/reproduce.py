"""`fedveil reproduce`: compute missing exhibits, store them as JSON, and build a page from the stored data."""

import platform
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from pydantic import JsonValue, TypeAdapter

from fedveil.checks import check_choice
from fedveil.errors import BadArgument
from fedveil.files import lock_folder, write_atomically
from fedveil.plain_json import read_json, to_json
from fedveil.report import Facts, Page, Section, Table, Text, write
from fedveil.runs.build import load_data
from fedveil.studies.basis import COMPUTED_AGAIN, Basis, Digests, explain_change, find_configs
from fedveil.studies.jobs import JobProgress, show_nothing
from fedveil.studies.paper.attack_tables import FIG4, FIG5, TABLE3, TABLE4
from fedveil.studies.paper.plan import ExhibitPlan, read_plan
from fedveil.studies.paper.training import FIG3, TABLE1, TABLE2
from fedveil.studies.study import Presentation, read_texts, run_graph

EXHIBITS = {
    **{"table1": TABLE1, "table2": TABLE2, "fig3": FIG3},
    **{"table3": TABLE3, "table4": TABLE4, "fig4": FIG4, "fig5": FIG5},
}
TEXTS = read_texts()["paper"]
StoredExhibit = Mapping[str, JsonValue]
AvailableExhibit = tuple[ExhibitPlan, StoredExhibit, Presentation]


def select_names(names: Sequence[str]) -> list[str]:
    """Return the names of the selected exhibits in the paper's order; "all" selects every exhibit."""
    for name in names:
        check_choice("fedveil reproduce", "table or figure", name, (*EXHIBITS, "all"))
    return [name for name in EXHIBITS if name in names or "all" in names]


def has_failure(results: JsonValue) -> bool:
    """Return whether any part of the results failed."""
    if isinstance(results, dict):
        return bool(results.get("failed")) or any(map(has_failure, results.values()))
    return isinstance(results, list) and any(map(has_failure, results))


def _settings(plan: ExhibitPlan) -> dict[str, JsonValue]:
    """Return the values that a stored exhibit must contain to match a plan."""
    return {"scale": plan.scale, "settings": plan.raw_settings, "device": plan.device}


def read_exhibit(plan: ExhibitPlan, folder: Path) -> StoredExhibit | None:
    """Read the stored exhibit of a plan; return None if it is missing or was computed with other settings."""
    try:
        result = read_json(folder / f"{plan.name}.json")
    except ValueError:  # a BadArgument is a ValueError
        return None
    return result if isinstance(result, dict) and result.items() >= _settings(plan).items() else None


def refuse_other_scale(plan: ExhibitPlan, folder: Path) -> None:
    """Refuse a folder that contains this exhibit at another scale, which would be overwritten."""
    path = folder / f"{plan.name}.json"
    stored_exhibit = read_json(path) if path.is_file() else None
    scale = stored_exhibit.get("scale") if isinstance(stored_exhibit, dict) else None
    if scale not in (None, plan.scale):
        message = f"{path} was computed at the scale {scale!r}, and would be overwritten at the scale {plan.scale!r}"
        raise BadArgument("fedveil reproduce", message, f"add --scale {scale}, or pass another folder with --out")


def explain_stale(plan: ExhibitPlan, stored_exhibit: StoredExhibit, folder: Path, digests: Digests) -> str | None:
    """Return a clause that explains why a stored exhibit is no longer valid, or None if it is valid.

    Published results have no basis and remain valid. Results also remain valid if their data are not available.
    """
    if "basis" not in stored_exhibit:
        return None
    try:
        configs = find_configs([job.task for job in EXHIBITS[plan.name].graph(plan, folder).jobs])
        return explain_change(
            TypeAdapter(Basis).validate_python(stored_exhibit["basis"]), digests.configs_basis(configs)
        )
    except BadArgument:
        return None


def _command(name: str, plan: ExhibitPlan, folder: Path) -> str:
    device = "" if plan.device == "cpu" else f" --device {plan.device}"
    return f"fedveil reproduce {name} --scale {plan.scale}{device} --out {shlex.quote(str(folder))}"


def compute(plan: ExhibitPlan, folder: Path, workers: int | None, show: JobProgress, digests: Digests) -> StoredExhibit:
    """Compute an exhibit and write its file; missing data are reported before any job runs."""
    start_time, work_folder = time.monotonic(), folder / "work"
    graph = EXHIBITS[plan.name].graph(plan, work_folder)
    configs = list(find_configs([job.task for job in graph.jobs]))
    for config in {config.data.name: config for config in configs}.values():
        load_data(config)  # decode images once for all processes
    results = run_graph(graph, work_folder, workers=workers, show=show, digests=digests)
    contents: dict[str, JsonValue] = {
        **_settings(plan),
        "basis": digests.configs_basis(configs).to_plain(),
        "command": _command(plan.name, plan, folder),
        "minutes": round((time.monotonic() - start_time) / 60, 1),
        "with": f"fedveil {version('fedveil')}, torch {torch.__version__}, Python {platform.python_version()}",
        "results": results,
    }
    write_atomically(folder / f"{plan.name}.json", to_json(contents, indent=1, exact=True) + "\n")
    return contents


def reproduce(
    names: Sequence[str],
    scale: str,
    folder: Path,
    *,
    workers: int | None = None,
    device: str = "cpu",
    show: JobProgress = show_nothing,
    on_done: Callable[[ExhibitPlan, Presentation], None] = lambda plan, presentation: None,
) -> Path:
    """Compute the exhibits that are missing from the folder, write a page with all available ones, and return its path.

    Args:
        names: names of exhibits, or "all".
        scale: "quick", "cpu" or "paper".
        folder: output folder for report.html, NAME.json for each exhibit and, in work/, the data needed to resume.
        workers: number of processes; by default, one per core.
        device: device to compute on.
        show: called with a job's name, the fraction done and the current step.
        on_done: called with the plan and presentation of each exhibit as soon as it is available.
    """
    plans = {name: read_plan(name, scale, device) for name in EXHIBITS}
    selected, digests, result = select_names(names), Digests(), dict[str, AvailableExhibit]()

    def add(name: str, stored_exhibit: StoredExhibit) -> None:
        result[name] = plans[name], stored_exhibit, EXHIBITS[name].present(plans[name], stored_exhibit["results"])

    with lock_folder(folder):
        for plan in plans.values():
            refuse_other_scale(plan, folder)
        for name, plan in plans.items():
            if stored_exhibit := read_exhibit(plan, folder):
                if reason := explain_stale(plan, stored_exhibit, folder / "work", digests):
                    show(name, 0.0, f"{COMPUTED_AGAIN if name in selected else 'left out'}: {reason}")
                    continue
                add(name, stored_exhibit)
                if name in selected and not has_failure(stored_exhibit["results"]):
                    show(name, 1.0, "reused")
                    on_done(plan, result[name][2])
                    selected.remove(name)
        for name in selected:
            add(name, compute(plans[name], folder, workers, show, digests))
            _write_page(result, plans[name], folder)
            on_done(plans[name], result[name][2])
        return _write_page(result, plans["table1"], folder)


def _write_page(exhibits: Mapping[str, AvailableExhibit], plan: ExhibitPlan, folder: Path) -> Path:
    """Write a page with a summary and all available exhibits; `plan` may be any plan of the same scale."""
    available_exhibits = [exhibits[name] for name in EXHIBITS if name in exhibits]
    rows = [row for _, _, presentation in available_exhibits for row in presentation.summary_rows]
    sections: list[Section] = [Table("Summary", ["", "the paper", "ours"], rows, TEXTS.note)] if rows else []
    for exhibit in available_exhibits:
        sections += _sections(*exhibit)
    verdict = join_summaries({name: presentation for name, (_, _, presentation) in exhibits.items()})
    title, command = f"The paper, reproduced ({plan.scale})", _command("all", plan, folder)
    return write(Page(title, verdict, sections, command, TEXTS.notes["lead"]), folder / "report.html")


def _sections(plan: ExhibitPlan, stored_exhibit: StoredExhibit, presentation: Presentation) -> list[Section]:
    """Return the sections of an exhibit, including the differences from the paper and the settings."""
    main_section: Section = Text(plan.title, [presentation.note, plan.settings.about])
    if presentation.rows:
        note = f"{presentation.note} Scale: {plan.settings.about}"
        main_section = Table(plan.title, presentation.header, presentation.rows, note)
    label = plan.title.split(":")[0]
    facts = {
        "scale": plan.scale,
        "command": str(stored_exhibit["command"]),
        "duration of the last run, minutes": str(stored_exhibit["minutes"]),
        "computed with": str(stored_exhibit["with"]),
    }
    for name, value in plan.raw_settings.items():
        groups = value if name == "runs" and isinstance(value, list) else [value]
        for index, group in enumerate(groups, start=1):
            description = ", ".join(f"{k} = {v}" for k, v in group.items()) if isinstance(group, dict) else str(group)
            facts[f"{name} {index}" if len(groups) > 1 else name] = description
    differences = Text(f"{label}: differences from the paper, and why", plan.file.differences)
    return [main_section, *presentation.sections, differences, Facts(f"{label}: settings", facts)]


def join_summaries(presentations: Mapping[str, Presentation]) -> str:
    """Return our results from the first available exhibit on accuracy, and from the first on attacks."""
    groups = (("table2", "table1", "fig3"), ("table3", "table4", "fig5"))
    result = [[presentations[name].summary_rows for name in names if name in presentations] for names in groups]
    rows = [row for candidates in result for row in next(filter(None, candidates), ())]
    return " ".join(f"{question}: {answer}." for question, _, answer in rows) or "No verdict: no exhibit has results."
