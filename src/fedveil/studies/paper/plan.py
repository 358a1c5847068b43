"""What a table or figure of the paper is here: a plan in TOML, something to compute, a pure function that shows it."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedveil.errors import BadArgument
from fedveil.studies.attack import Show, Shown

SCALES = ("quick", "cpu", "paper")


@dataclass(frozen=True)
class Plan:
    """A table or figure at one scale.

    Attributes:
        name: as the command line has it.
        title: as the page has it.
        scale: one of SCALES.
        about: what of the paper's setting this scale keeps and what not.
        settings: what decides the results.
        paper: the paper's values.
        why: where the paper and a reader's expectation part, and why.
        device: to compute on.
    """

    name: str
    title: str
    scale: str
    about: str
    settings: Mapping[str, Any]
    paper: Mapping[str, Any]
    why: Sequence[str]
    device: str = "cpu"


def _read(name: str) -> dict[str, Any]:
    """NAME.toml beside this file."""
    return tomllib.loads(files(__package__).joinpath(f"{name}.toml").read_text(encoding="utf-8"))


def read_plan(name: str, scale: str, device: str = "cpu") -> Plan:
    """The plan in NAME.toml; one with as = OTHER has the settings of the other."""
    if scale not in SCALES:
        raise BadArgument("--scale", f"there is no scale {scale!r}", " or ".join(SCALES))
    found = _read(name)
    settings = dict(_read(found["as"])["scales"][scale] if "as" in found else found["scales"][scale])
    about = settings.pop("about")
    return Plan(name, found["title"], scale, about, settings, found.get("paper", {}), found["why"], device)


@dataclass(frozen=True)
class Exhibit:
    """How a plan becomes a table or figure.

    Attributes:
        name: of the plan.
        gather: (plan, folder for what is computed, processes, show) -> results as plain values; goes on where it was
            stopped. A part that failed is {"failed": why}.
        present: (plan, results) -> what a reader gets; computes nothing.
    """

    name: str
    gather: Callable[[Plan, Path, int | None, Show], Any]
    present: Callable[[Plan, Any], Shown]
