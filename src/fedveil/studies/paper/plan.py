"""What a table or figure of the paper is here: a plan in TOML, and a study that computes and shows it."""

import tomllib
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter

from fedveil.checks import one_of
from fedveil.runs.config import Config, Value
from fedveil.studies.digests import Digests
from fedveil.studies.jobs import Show
from fedveil.studies.study import Shown, Study, gather

SCALES = ("quick", "cpu", "paper")
LOSS: Mapping[str, Value] = {"loss": "squared_error"}
"""The paper's loss, of every plan that names no other."""
T = TypeVar("T")
R = TypeVar("R")
Axis = Value | list[Value] | dict[str, Value]
"""One value, values to combine with all others, or one that follows another."""


class Scale(BaseModel):
    """What decides the results at one scale.

    Attributes:
        about: what of the paper's setting this scale keeps and what not.
        defences: to attack.
        data: our name of each data set of the paper.
        attack: options of the attack.
        seeds: with which each attack is repeated; training runs have theirs in `common` or `runs`.
        common: what all groups of runs have in common.
        runs: groups of configurations.
        run: one configuration.
        variances: of PPDL's noise.
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
        name: on the command line.
        title: on the page.
        scale: one of SCALES.
        settings: what decides the results, checked; `asked` is the same as it is written.
        columns: of the paper's table.
        paper: the paper's values.
        why: differences from the paper and from a reader's expectation, with reasons.
        device: to compute on.
    """

    name: str
    title: str
    scale: str
    settings: Scale
    asked: dict[str, JsonValue]
    columns: list[str]
    paper: JsonValue
    why: list[str]
    device: str = "cpu"

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.name}.toml, {self.scale}"

    def printed(self, kind: type[T]) -> T:
        """The paper's values, as what they are in this table."""
        return TypeAdapter(kind).validate_python(self.paper)


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads(files(__package__).joinpath(f"{name}.toml").read_text(encoding="utf-8"))


def read_plan(name: str, scale: str, device: str = "cpu") -> Plan:
    """The plan in NAME.toml; one with as = OTHER has the settings of the other."""
    one_of("--scale", "scale", scale, SCALES)
    found = _read(name)
    asked = (_read(found["as"]) if "as" in found else found)["scales"][scale]
    settings = Scale.model_validate(asked)
    paper = found.get("paper", {})
    columns = [str(column) for column in paper.pop("columns", [])]
    written = {key: value for key, value in asked.items() if key != "about"}
    return Plan(name, found["title"], scale, settings, written, columns, paper, found["why"], device)


class Exhibit(Study[Plan, R]):
    """A table or figure of the paper.

    Attributes:
        kind: the type of its results, for reading them from disk.
        left_out: names of fields that only the study's own page needs, and that are not written.
    """

    kind: TypeAdapter[R]
    left_out: frozenset[str] = frozenset()

    def __init__(self, name: str) -> None:
        self.name = self.summary = name

    def loaded(self, plan: Plan, results: JsonValue) -> Shown:
        """What a reader gets, from results as they are on disk."""
        return self.present(plan, self.kind.validate_python(results))

    @abstractmethod
    def configs(self, plan: Plan) -> list[Config]:
        """Return the configurations that name all of its data."""

    def computed(
        self, plan: Plan, folder: Path, workers: int | None, show: Show, digests: Digests | None = None
    ) -> JsonValue:
        """Results for the disk."""
        results = gather(self, plan, folder, workers=workers, show=show, digests=digests)
        return without(self.kind.dump_python(results, mode="json"), self.left_out)


def without(value: JsonValue, names: frozenset[str]) -> JsonValue:
    """Plain values without some keys, at any depth."""
    if isinstance(value, dict):
        return {key: without(inner, names) for key, inner in value.items() if key not in names}
    return [without(inner, names) for inner in value] if isinstance(value, list) else value
