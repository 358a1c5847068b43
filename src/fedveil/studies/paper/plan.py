"""Tables and figures of the paper: a plan in TOML, and the functions that compute and present it."""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter

from fedveil.checks import one_of
from fedveil.runs.config import Value
from fedveil.studies.study import JobGraph, Shown

SCALES = ("quick", "cpu", "paper")
LOSS: Mapping[str, Value] = {"loss": "squared_error"}
"""The paper's loss, of every plan that names no other."""
T = TypeVar("T")
R = TypeVar("R")
Axis = Value | list[Value] | dict[str, Value]
"""One value, a list of values to combine with all others, or a value that depends on another."""


class Scale(BaseModel):
    """Settings that decide the results at one scale.

    Attributes:
        about: how this scale differs from the paper's setting.
        defences: defences to attack.
        data: our name of each data set of the paper.
        attack: options of the attack.
        seeds: number of repetitions of each attack; training runs have their seeds in `common` or `runs`.
        common: values that all groups of runs share.
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
    common: dict[str, Axis] = {}
    runs: list[dict[str, Axis]] = []
    run: dict[str, Value] = {}
    variances: list[float] = []


@dataclass(frozen=True)
class Plan:
    """A table or figure at one scale.

    Attributes:
        name: name on the command line.
        title: title on the page.
        scale: one of SCALES.
        settings: validated settings of the scale; `written` has them as they are in the file.
        columns: columns of the paper's table.
        paper: the paper's values.
        why: differences from the paper, with reasons.
        device: device to compute on.
    """

    name: str
    title: str
    scale: str
    settings: Scale
    written: dict[str, JsonValue]
    columns: list[str]
    paper: JsonValue
    why: list[str]
    device: str = "cpu"

    @property
    def where(self) -> str:
        """Return the prefix of error messages."""
        return f"{self.name}.toml, {self.scale}"

    def paper_values(self, kind: type[T]) -> T:
        """Return the paper's values, validated as a type."""
        return TypeAdapter(kind).validate_python(self.paper)


def _load_toml(name: str) -> dict[str, Any]:
    return tomllib.loads(files(__package__).joinpath(f"{name}.toml").read_text(encoding="utf-8"))


def read_plan(name: str, scale: str, device: str = "cpu") -> Plan:
    """Read NAME.toml; a file with `as = OTHER` takes its settings from the other file."""
    one_of("--scale", "scale", scale, SCALES)
    found = _load_toml(name)
    written = (_load_toml(found["as"]) if "as" in found else found)["scales"][scale]
    settings, paper = Scale.model_validate(written), found.get("paper", {})
    del written["about"]
    columns = [str(column) for column in paper.pop("columns", [])]
    return Plan(name, found["title"], scale, settings, written, columns, paper, found["why"], device)


@dataclass(frozen=True)
class Exhibit:
    """A table or figure of the paper.

    Attributes:
        graph: function that returns the jobs of a plan, which compute plain values for the disk.
        present: function that presents plain values from the disk.
    """

    graph: Callable[[Plan, Path], JobGraph[JsonValue]]
    present: Callable[[Plan, JsonValue], Shown]


def make_exhibit(
    kind: TypeAdapter[R],
    graph: Callable[[Plan, Path], JobGraph[R]],
    present: Callable[[Plan, R], Shown],
    omitted: frozenset[str] = frozenset(),
) -> Exhibit:
    """Make an exhibit of functions on typed results; the omitted fields are not written to disk."""

    def to_plain(plan: Plan, folder: Path) -> JobGraph[JsonValue]:
        found = graph(plan, folder)
        collect = lambda done: _drop_keys(kind.dump_python(found.collect(done), mode="json"), omitted)  # noqa: E731
        return JobGraph(found.jobs, collect)

    return Exhibit(to_plain, lambda plan, results: present(plan, kind.validate_python(results)))


def _drop_keys(value: JsonValue, names: frozenset[str]) -> JsonValue:
    """Remove keys from plain values, at any depth."""
    if isinstance(value, dict):
        return {key: _drop_keys(inner, names) for key, inner in value.items() if key not in names}
    return [_drop_keys(inner, names) for inner in value] if isinstance(value, list) else value
