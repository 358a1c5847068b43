"""Plans for the paper's tables and figures, read from TOML files, and the functions that compute and present them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter

from fedveil.checks import check_choice
from fedveil.runs.settings import Value
from fedveil.studies.study import JobGraph, Presentation, read_toml

SCALES = ("quick", "cpu", "paper")
LOSS: Mapping[str, Value] = {"loss": "squared_error"}
"""The paper's loss, which a plan uses unless it sets another."""
T = TypeVar("T")
R = TypeVar("R")
RunValue = Value | list[Value] | dict[str, Value]
"""A value, a list of values to combine with those of other keys, or a value that depends on another key."""


class ScaleSettings(BaseModel):
    """The settings of one scale, which determine the results.

    Attributes:
        about: description of the scale and its differences from the paper.
        defences: names of the defences to attack.
        data: our names of the data sets, by the paper's names.
        attack: options of the attack.
        seeds: number of seeds for each attack; for training runs, `common` or `runs` sets it.
        common: configuration values that all groups of runs share.
        runs: groups of configurations.
        run: a single configuration.
        variances: variances of PPDL's noise.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    about: str
    defences: list[str] = []
    data: dict[str, str] = {}
    attack: dict[str, Value] = {}
    seeds: int = Field(1, ge=1)
    common: dict[str, RunValue] = {}
    runs: list[dict[str, RunValue]] = []
    run: dict[str, Value] = {}
    variances: list[float] = []


class PlanFile(BaseModel):
    """The content of a file NAME.toml.

    Attributes:
        title: title of the table or figure.
        note: note below the table.
        comparison: note below the table that compares the veil with plain training.
        differences: explanations of the differences from the paper.
        same_as: name of another plan whose scales this plan uses.
        columns: columns of the paper's table.
        scales: settings by scale.
        paper: the paper's values.
        table: presentation of an attack (`AttackTable`).
    """

    title: str
    note: str
    comparison: str = ""
    differences: list[str]
    same_as: str | None = None
    columns: list[str] = []
    scales: dict[str, dict[str, JsonValue]] = {}
    paper: JsonValue = None
    table: JsonValue = None


@dataclass(frozen=True)
class ExhibitPlan:
    """The plan for a table or figure at one scale.

    Attributes:
        name: name on the command line.
        file: content of the plan's file.
        scale: one of SCALES.
        settings: validated settings of the scale.
        raw_settings: the settings as written in the file, without `about`.
        device: device to compute on.
    """

    name: str
    file: PlanFile
    scale: str
    settings: ScaleSettings
    raw_settings: dict[str, JsonValue]
    device: str = "cpu"

    @property
    def title(self) -> str:
        """The title on the page."""
        return self.file.title

    @property
    def error_prefix(self) -> str:
        """The prefix of error messages."""
        return f"{self.name}.toml, {self.scale}"

    def paper_values(self, kind: type[T]) -> T:
        """Return the paper's values, validated as the given type."""
        return TypeAdapter(kind).validate_python(self.file.paper)


def _load_file(name: str) -> PlanFile:
    return PlanFile.model_validate(read_toml(f"paper/{name}.toml"))


def read_plan(name: str, scale: str, device: str = "cpu") -> ExhibitPlan:
    """Read the plan NAME.toml at one scale."""
    check_choice("--scale", "scale", scale, SCALES)
    file = _load_file(name)
    raw_settings = (_load_file(file.same_as) if file.same_as else file).scales[scale]
    settings = ScaleSettings.model_validate(raw_settings)
    del raw_settings["about"]
    return ExhibitPlan(name, file, scale, settings, raw_settings, device)


@dataclass(frozen=True)
class Exhibit:
    """A table or figure of the paper.

    Attributes:
        graph: function that returns the jobs of a plan; their combined result consists of JSON values.
        present: function that presents these values.
    """

    graph: Callable[[ExhibitPlan, Path], JobGraph[JsonValue]]
    present: Callable[[ExhibitPlan, JsonValue], Presentation]


def make_exhibit(
    kind: TypeAdapter[R],
    graph: Callable[[ExhibitPlan, Path], JobGraph[R]],
    present: Callable[[ExhibitPlan, R], Presentation],
    omitted: frozenset[str] = frozenset(),
) -> Exhibit:
    """Create an exhibit from functions that use typed results; the fields in `omitted` are not written to disk."""

    def json_graph(plan: ExhibitPlan, folder: Path) -> JobGraph[JsonValue]:
        result = graph(plan, folder)
        collect = lambda results: _drop_keys(kind.dump_python(result.collect(results), mode="json"), omitted)  # noqa: E731
        return JobGraph(result.jobs, collect)

    return Exhibit(json_graph, lambda plan, results: present(plan, kind.validate_python(results)))


def _drop_keys(value: JsonValue, names: frozenset[str]) -> JsonValue:
    """Return JSON values without the given keys, at any depth."""
    if isinstance(value, dict):
        return {key: _drop_keys(item, names) for key, item in value.items() if key not in names}
    return [_drop_keys(item, names) for item in value] if isinstance(value, list) else value
