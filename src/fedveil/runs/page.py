"""The report page of a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedveil.data import Data
from fedveil.defences import Private, Veil, innermost
from fedveil.federation.evaluate import METRICS, metrics, moved, predict, predicted
from fedveil.federation.server import History, Server
from fedveil.graph import Plan
from fedveil.graph.describe import known_in_words
from fedveil.report import Beside, Curves, Facts, Matrix, Page, Section, Table, Text, write
from fedveil.scheme import Loss, client_view
from fedveil.scheme.outputs import head_axis

MOST_CLASSES = 20

PROTECTION = (
    "The veil hinders attacks on the predictions of the model as it is sent, not those on its hidden layers. It is no "
    "guarantee against a participant that thinks: "
    "the centred model is what any client can form without data, by removing the public offset from the head.",
)


GUARANTEE = (
    "Epsilon bounds what all others together learn about one client's data from the models of all rounds, compared "
    "with models made without this client's gradients (epsilon_replace: with other data in its place). It does not "
    "bind the server. This page is the server's: what it says about test data, errors and clipping carries no noise."
)
SPENT = "The most that any client has spent, at the delta of the configuration."


def confusion(outputs: Tensor, targets: Tensor, classes: int, axis: int | None = None) -> list[list[int]]:
    """Counts, of positions where records have several: one row for each true class, one column for each answer."""
    cells = torch.bincount((targets * classes + predicted(outputs, targets, axis)).flatten(), minlength=classes**2)
    return [[int(count) for count in row] for row in cells.reshape(classes, classes)]


def client_models(federation: Server) -> dict[str, nn.Module]:
    """The model as the server has it, as a client is sent it, and centred."""
    defence, model = federation.defence, federation.model
    broadcast = defence.broadcast(model)
    views = {"the server's model": model, "as a client is sent it": defence.client_view(model, broadcast)}
    if isinstance(innermost(defence), Veil):
        views["centred by a client that thinks"] = client_view(model, broadcast, centred=True)
    defence.forget()
    return views


def scores(views: Mapping[str, nn.Module], data: Data, loss: Loss | None = None) -> dict[str, dict[str, float]]:
    """Test metrics of each view."""
    device = next(next(iter(views.values())).parameters()).device
    inputs, targets = moved(data.test.inputs, device), data.test.targets.to(device)
    return {name: metrics(predict(view, inputs), targets, loss, axis=head_axis(view)) for name, view in views.items()}


def view_sections(views: Mapping[str, nn.Module], data: Data, loss: Loss | None = None) -> list[Section]:
    """What the server has against what a client sees."""
    found = scores(views, data, loss)
    name = next(metric for metric in METRICS if metric in next(iter(found.values())))
    rows = [[view, f"{values[name]:.4f}"] for view, values in found.items()]
    sections: list[Section] = [Table("What the server has, and what a client sees", ["model", f"test {name}"], rows)]
    if name == "accuracy" and 0 < len(data.classes) <= MOST_CLASSES:
        device = next(next(iter(views.values())).parameters()).device
        inputs, targets = moved(data.test.inputs, device), data.test.targets
        parts = [
            Matrix(view, data.classes, confusion(predict(m, inputs).cpu(), targets, data.outputs, head_axis(m)))
            for view, m in list(views.items())[:2]
        ]
        sections.append(Beside("Answers on the test data", parts, "Rows are true classes, columns answers."))
    return sections


SHARES = {
    "scaled": "multiplied by secret factors, or masked additively (the final layer)",
    "signed": "multiplied by secret signs",
    "moved": "sent as they are, in secret places",
    "bare": "sent as they are",
}


def coverage_section(plan: Plan) -> Section:
    """How much of the model a veil covers."""
    rows = [[kind, f"{100 * plan.shares[kind]:.1f} %", words] for kind, words in SHARES.items()]
    note = "Each value counts once, under the strongest. " + (known_in_words(plan) or "")
    return Table("What the veil covers", ["parameters' values", "share", "in each broadcast"], rows, note.strip())


ESTIMATED = (
    "What the defence itself does to the gradient. Veil: estimated by the server from the terms it adds up. PPDL: "
    "measured beside it. A defence that is not here does not know it, or adds none."
)


def curve_sections(histories: Mapping[str, History], note: str = ESTIMATED) -> list[Section]:
    """Metrics and errors over rounds."""
    sections: list[Section] = []
    for name in METRICS:
        series = {run: history.curve(name) for run, history in histories.items() if history.curve(name)}
        if series:
            sections.append(Curves(f"Test {name}", "round", name, series))
    nodes = {run: history.curve("nodes") for run, history in histories.items() if history.curve("nodes")}
    if nodes:
        repeated = sum(r.get("repeated", 0) for history in histories.values() for r in history.records)
        found = f"Gradients that each client computes. {repeated} rounds were repeated because they had too few."
        sections.append(Curves("Nodes", "round", "nodes", nodes, note=found))
    errors = {run: [(r, e) for r, e in h.curve("error") if e > 0] for run, h in histories.items()}
    errors = {run: points for run, points in errors.items() if points}
    spent = {run: history.curve("epsilon") for run, history in histories.items() if history.curve("epsilon")}
    if spent:
        sections.append(Curves("Epsilon spent", "round", "epsilon", spent, note=SPENT))
    if errors:
        sections.append(Curves("Relative error of the gradient", "round", "error", errors, True, note))
    return sections


def cost_section(histories: Mapping[str, History]) -> Section:
    """Seconds of each run."""
    rows = []
    for run, history in histories.items():
        seconds, rounds = history.records[-1]["seconds"], len(history.records)
        rows.append([run, str(rounds), f"{seconds:.1f}", f"{1e3 * seconds / rounds:.2f}"])
    return Table("Cost", ["run", "rounds", "seconds", "ms a round"], rows, "Evaluation included.")


def run_page(path: Path, federation: Server, data: Data, config: Mapping[str, Any], summary: Mapping[str, Any]) -> Path:
    """Write the page of one run."""
    defence, name = federation.defence, federation.defence.name
    histories, inner = {name: federation.history}, innermost(defence)
    sections = [
        *curve_sections(histories),
        *view_sections(client_models(federation), data, federation.loss),
        *([coverage_section(inner.plan)] if isinstance(inner, Veil) else []),
        *([Text("What is and is not protected", PROTECTION)] if isinstance(inner, Veil) else []),
        *([Text("Differential privacy", (GUARANTEE,))] if isinstance(defence, Private) else []),
        cost_section(histories),
        Facts("Configuration", {key: str(value) for key, value in config.items()}),
    ]
    metric = next((f"test {key} {summary[key]:.4f}" for key in METRICS if key in summary), "no evaluation")
    lead = f"{name}: {metric} after {summary['rounds']} rounds with {config['clients']} clients."
    if summary.get("epsilon") is not None:
        lead += f" Epsilon {summary['epsilon']:.3g} at delta {summary['delta']:g}."
    return write(Page(f"{data.name}, {config['model']}, {name}", lead, sections, str(summary["repeat"])), path)
