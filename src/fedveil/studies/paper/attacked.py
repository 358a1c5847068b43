"""Attacks of a plan: `fedveil attack` on each data set, and its results without what only its own page needs."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedveil.attacks.adaptive import PUBLISHED, STRONGEST
from fedveil.report import NOTHING, Interval
from fedveil.runs.config import configure, load_data
from fedveil.studies.attack import Experiment, Show, run_attack
from fedveil.studies.jobs import Result
from fedveil.studies.membership.page import per_cent
from fedveil.studies.paper.plan import Plan

LONG = ("roc", "network", "right")  # keys of what a table has no use for
WHO = ("ours, as published", "ours, knows the defence")
Results = Mapping[str, Mapping[str, Result]]  # by data set and defence


def folder_of(experiment: Experiment, data: str, work: Path) -> Path:
    """Where an attack on a data set keeps everything; figures find there what tables computed."""
    return work / experiment.name / data


def gather_attack(
    experiment: Experiment, plan: Plan, work: Path, workers: int | None, show: Show
) -> dict[str, dict[str, Result]]:
    """Results by data set and defence."""
    settings = experiment.settings(**plan.settings["attack"])
    where = f"{plan.name}.toml, {plan.scale}"
    configs = [configure(group | {"device": plan.device}, where) for group in plan.settings["runs"]]
    for config in configs:
        load_data(config)  # what is missing is said before anything runs, and images are decoded once
    found = {}
    for config in configs:
        folder = folder_of(experiment, config.data, work)

        def named(name: str, share: float, what: str, data: str = config.data) -> None:
            show(f"{data}, {name}", share, what)

        run_attack(experiment, config, settings, plan.settings["defences"], folder, workers=workers, show=named)
        found[config.data] = short(json.loads((folder / "results.json").read_text())["results"])
    return found


def short(found: Any) -> Any:
    """Results without the long lists."""
    if isinstance(found, Mapping):
        return {key: short(value) for key, value in found.items() if key not in LONG}
    return [short(value) for value in found] if isinstance(found, list) else found


def measure_rows(
    plan: Plan, results: Results, measures: Mapping[str, str], figures: Callable[[str, Result, str], list[str]]
) -> list[list[str]]:
    """A row for data, measure and defence: the paper's value, then three of ours; a failed defence says why."""
    rows = []
    for printed_as, data in plan.settings["data"].items():
        for measure, title in measures.items():
            for defence, result in results[data].items():
                start = [data, title, defence, f"{plan.paper[printed_as][measure][defence]:.2f}"]
                if "failed" in result:
                    rows.append([*start, f"failed: {result['failed']}", "", ""])
                elif measure == "accuracy":
                    rows.append([*start, NOTHING, f"{100 * result['test']:.1f}", NOTHING])
                else:
                    rows.append([*start, *figures(defence, result, measure)])
    return rows


def success_marks(
    plan: Plan, results: Results, measure: str, pick: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> list[Interval]:
    """Success in per cent: the paper's, by the published attacker, by the one that knows the defence."""
    marks = []
    for printed_as, data in plan.settings["data"].items():
        for defence, result in results[data].items():
            group = f"{data}, {defence}"
            marks.append(Interval("paper", plan.paper[printed_as][measure][defence], group=group))
            if "failed" in result:
                marks.append(Interval(WHO[0], None, group=group, missing="failed"))
                continue
            for label, name in zip(WHO, (PUBLISHED, STRONGEST.get(defence)), strict=True):
                if name in result["attackers"]:
                    found = pick(result["attackers"][name])
                    value, low, high = (100 * found[key] for key in ("value", "low", "high"))
                    marks.append(Interval(label, value, low, high, group))
    return marks


def comparison(results: Results, pick: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> list[str]:
    """A line a data set: undefended, veil as published, veil for an attacker that knows it."""
    said = []
    for data, ours in results.items():
        plain, veil = ours.get("plain", {}), ours.get("veil", {})
        if "attackers" in plain and "attackers" in veil:
            bare, sent = (per_cent(pick(result["attackers"][PUBLISHED])) for result in (plain, veil))
            known = per_cent(pick(veil["attackers"][STRONGEST["veil"]]))
            said.append(
                f"{data}, test accuracy {100 * plain['test']:.1f} % (training {100 * plain['train']:.1f}): undefended "
                f"{bare}, veil {sent} by the published attacker, {known} by one that fits the noise of the head on its "
                "own records."
            )
    return said or ["No attack is complete."]
