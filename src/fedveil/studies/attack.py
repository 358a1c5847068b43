"""`fedveil attack`: one attack against one or several defences, in one table and one page."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.data import one_tensor
from fedveil.report import Facts, Page, Section, Table, Text, write
from fedveil.runs.config import CHOICES, Config, load_data
from fedveil.runs.folder import read_config, write_text
from fedveil.studies.compare import check_defences
from fedveil.studies.jobs import Cell, Result, Tell, run_cells
from fedveil.studies.victim import trained

Show = Callable[[str, float, str], None]


@dataclass(frozen=True)
class Shown:
    """Results as a reader gets them: a table for the terminal and the page, and further sections of the page."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str
    sections: Sequence[Section]


@dataclass(frozen=True)
class Experiment:
    """An attack as the command line offers it.

    Attributes:
        name: `fedveil attack NAME`.
        summary: a line for the help.
        defaults: values of the configuration that differ from `Config`'s: the scale that two cores manage.
        settings: a frozen dataclass of plain values, the attack's own flags.
        trains: whether the federation is trained first.
        shared: (config, settings, defences, folder) -> cells that the attacks on several defences share.
        attack: the cell `attack(tell, config, settings, folder, run)` for config.defence; `folder` holds what is shared
            (the cells' results in folder/shared), `run` the trained federation.
        present: (config, settings, results by defence, folder) -> what a reader gets.
        title: of the page.
    """

    name: str
    summary: str
    defaults: Mapping[str, Any]
    settings: type
    trains: bool
    shared: Callable[[Config, Any, Sequence[str], Path], list[Cell]]
    attack: Callable[..., Result]
    present: Callable[[Config, Any, Mapping[str, Result], Path], Shown]
    title: str = ""


def train_victim(tell: Tell, config: Config, run: Path) -> Result:
    """The federation to attack, as a cell of its own."""
    trained(config, run, tell)
    return {"run": str(run)}


def defences_of(text: str) -> list[str]:
    """The defences of "all", or of names with commas between them."""
    known = CHOICES["defence"]
    names = known if text == "all" else [name for name in text.split(",") if name]
    return check_defences(names, known, "--defence")


def run_attack(
    experiment: Experiment,
    config: Config,
    settings: Any,
    defences: Sequence[str],
    folder: Path,
    *,
    run: Path | None = None,
    workers: int | None = None,
    show: Show = lambda name, share, what: None,
    command: str = "",
) -> Shown:
    """Train what is not trained, attack, and write results.json and report.html; a stopped attack goes on.

    With `run`, the federation in that folder is attacked, and `config` and `defences` are its own.
    """
    if run:
        config = read_config(run)
        defences = [config.defence]
    if ":" in config.data:
        one_tensor("attack", load_data(config).train.inputs)  # refused before anything is trained
    runs = {name: run or folder / name / "run" for name in defences}
    own = {name: dataclasses.replace(config, defence=name) for name in defences}
    first = experiment.shared(config, settings, defences, folder)
    if experiment.trains and not run:
        victims = [Cell(f"train-{n}", train_victim, {"config": own[n], "run": runs[n]}) for n in defences]
        first = victims + first
    before = run_cells(first, folder / "shared", workers=workers, show=show)
    broken = {name: found["failed"] for name, found in before.items() if "failed" in found}
    common = {"settings": settings, "folder": folder}
    cells = [
        Cell(name, experiment.attack, {"config": own[name], "run": runs[name], **common})
        for name in defences
        if f"train-{name}" not in broken
    ]
    results = run_cells(cells, folder / "results", workers=workers, show=show)
    for name in defences:
        if f"train-{name}" in broken:
            results[name] = {"failed": broken[f"train-{name}"]}
    results = {name: results[name] for name in defences}
    shown = experiment.present(config, settings, results, folder)
    write_text(folder / "results.json", json.dumps({"command": command, "results": results}, indent=1) + "\n")
    write_page(folder / "report.html", experiment, config, settings, shown, {**before, **results}, command)
    return shown


def write_page(
    path: Path,
    experiment: Experiment,
    config: Config,
    settings: Any,
    shown: Shown,
    cells: Mapping[str, Result],
    command: str,
) -> None:
    """The table, what the attack has to show, what failed, the configuration."""
    failures = [f"{name}: {found['failed']}" for name, found in cells.items() if "failed" in found]
    asked = dataclasses.asdict(config) | dataclasses.asdict(settings)
    asked.pop("defence")
    sections: list[Section] = [
        Table("Result", shown.header, shown.rows, shown.note),
        *([Text("Failed", failures)] if failures else []),
        *shown.sections,
        Facts("Configuration", {key: str(value) for key, value in asked.items()}),
    ]
    where = f"{config.data}, {config.model}, {config.clients} clients"
    lead = f"{experiment.summary[0].upper()}{experiment.summary[1:]}: {where}."
    write(Page(experiment.title or f"Attack: {experiment.name}", lead, sections, command), path)
