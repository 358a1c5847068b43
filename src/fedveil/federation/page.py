"""The report page of a run."""

import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING

import torch
from pydantic import TypeAdapter
from torch import nn

from fedveil.federation.evaluate import METRICS, metrics, predict_classes, predict_source
from fedveil.federation.history import VALIDATION, History
from fedveil.federation.results import RunDetails, RunSummary, Setting, primary_metric
from fedveil.federation.status import CLIENT_COLUMNS, RunStatus, describe_status, label_metric, list_clients
from fedveil.graph import Plan
from fedveil.graph.coverage import describe_known_values
from fedveil.records.sources import Source
from fedveil.report import Curves, Facts, Matrix, Page, Section, SideBySide, Table, Text, count
from fedveil.scheme import Broadcast, Loss, client_view
from fedveil.scheme.outputs import head_axis

if TYPE_CHECKING:
    from fedveil.federation.server import Server

ERROR_TITLE = "Relative error of the gradient"
SERVER_MODEL, NO_DATA = "the server's model", " (no data needed)"
MAX_CLASSES = 20
MAX_CLIENTS = 30  # maximum number of rows in the table of clients
REFRESH = 5  # seconds until the page of a running federation reloads itself
MAX_POINTS = 60  # approximate maximum number of points on a curve of medians

TEXTS = TypeAdapter(dict[str, str]).validate_python(
    tomllib.loads(files("fedveil.federation").joinpath("texts.toml").read_text(encoding="utf-8"))
)
PROTECTION = (TEXTS["protection"],)


def client_models(server: "Server") -> dict[str, nn.Module]:
    """Return the server's model and a client's copies: as received and, for a veil, with the offset removed."""
    defence, model = server.defence, server.model
    defence_round = server.defence_server.start_round(model)
    broadcast = defence_round.broadcast
    views = {SERVER_MODEL: model, "as received by a client": defence.client_view(model, broadcast)}
    if isinstance(broadcast, Broadcast):
        views[f"offset removed{NO_DATA}"] = client_view(model, broadcast, centred=True)
    defence_round.release()
    return views


def scores(views: Mapping[str, nn.Module], test: Source, loss: Loss | None = None) -> dict[str, dict[str, float]]:
    """Return the test metrics of each view."""
    return {name: metrics(*predict_source(view, test), loss, axis=head_axis(view)) for name, view in views.items()}


def confusion_counts(views: Mapping[str, nn.Module], test: Source, classes: int) -> dict[str, list[list[int]]]:
    """Return the confusion matrices of the first two views; rows are true classes, columns are predicted classes."""
    result = {}
    for name, view in list(views.items())[:2]:
        outputs, targets = predict_source(view, test)
        predictions = predict_classes(outputs, targets, head_axis(view))
        counts = torch.bincount((targets * classes + predictions).flatten(), minlength=classes**2)
        result[name] = counts.reshape(classes, classes).tolist()
    return result


def view_sections(
    views: Mapping[str, nn.Module], test: Source, classes: Sequence[str], name: str, values: Mapping[str, float]
) -> list[Section]:
    """Return sections that compare a metric of the server's model with the same metric of a client's copies."""
    rows = [[view, f"{value:.4f}"] for view, value in values.items()]
    sections: list[Section] = [Table("The server's model and a client's copy", ["model", f"test {name}"], rows)]
    if name == "accuracy" and 0 < len(classes) <= MAX_CLASSES:
        matrices = [
            Matrix(view, classes, counts) for view, counts in confusion_counts(views, test, len(classes)).items()
        ]
        sections.append(SideBySide("Predictions on the test data", matrices))
    return sections


def format_metric(name: str, value: float) -> str:
    """Format a metric: accuracy in per cent, any other metric as a number."""
    return f"{100 * value:.1f} %" if name == "accuracy" else f"{value:.3g}"


def verdict(name: str, values: Mapping[str, float], budget: str = "") -> str:
    """Summarise a run in one sentence, given a metric's value for each view, in the order of `client_models`."""
    server_value, client_value, *without_offset = (format_metric(name, value) for value in values.values())
    suffix = f", {without_offset[0]} with the offset removed" if without_offset else ""
    client_text = f"a client's copy has {client_value} as received{suffix} (fedveil audit measures adaptive clients)"
    return f"Test {name} {server_value}{budget}; {client_text}."


def class_sections(summary: RunSummary) -> list[Section]:
    """Return a table of the results by class, and the metric that chose the best model."""
    header = ["class", "precision", "recall", "F1", "records"]
    rows = [
        [figures.name, f"{figures.precision:.3f}", f"{figures.recall:.3f}", f"{figures.f1:.3f}", str(figures.records)]
        for figures in summary.by_class
    ]
    best_model = [Text("The best model", (f"Chosen by {summary.best_on}.",))] if summary.best_on else []
    return [*([Table("Test results by class", header, rows)] if 0 < len(rows) <= MAX_CLASSES else []), *best_model]


def veil_sections(plan: Plan, num_draws: int = 0) -> list[Section]:
    """Return sections on how a veil perturbs the model; `num_draws` is the number of draws of persistent noise."""
    rows = [[kind, f"{100 * plan.shares[kind]:.1f} %", TEXTS[kind]] for kind in ("scaled", "signed", "moved", "bare")]
    note = "Each value is counted once, under the strongest perturbation. " + (describe_known_values(plan) or "")
    table = Table("What the veil perturbs", ["kind of value", "fraction", "in each broadcast"], rows, note.strip())
    noise = [TEXTS["kept"], TEXTS["redrawn"].format(num_draws)][:num_draws]
    return [table, Text("What is and is not protected", (*PROTECTION, *noise))]


def curve_sections(histories: Mapping[str, History], note: str = TEXTS["error"]) -> list[Section]:
    """Return curves of metrics, epsilon and errors over the rounds."""
    sections: list[Section] = []
    names_by_run = {run: history.names for run, history in histories.items()}
    names = set[str]().union(*names_by_run.values())
    for name in METRICS:
        keys = {"Validation": VALIDATION + name, "Test": name}
        for data_name, key in keys.items():
            series = {run: history.curve(key) for run, history in histories.items() if key in names_by_run[run]}
            only_at_end = (
                key == name and VALIDATION + name in names and all(len(value) == 1 for value in series.values())
            )
            if series and not only_at_end:
                sections.append(Curves(f"{data_name} {name}", "round", name, series))
    epsilons = {run: history.curve("epsilon") for run, history in histories.items() if "epsilon" in names_by_run[run]}
    if epsilons:
        sections.append(Curves("Epsilon spent", "round", "epsilon", epsilons, note=TEXTS["spent"]))
    errors = {
        run: [(r, e) for r, e in h.curve("error") if e > 0]
        for run, h in histories.items()
        if "error" in names_by_run[run]
    }
    if plotted_errors := {run: points for run, points in errors.items() if points}:
        sections.append(error_section(plotted_errors, note))
    return sections


def error_section(errors: Mapping[str, Sequence[tuple[int, float]]], note: str) -> Curves:
    """Return curves of the relative error of the gradient: medians of several rounds, with 80 % intervals."""
    lines: dict[str, list[tuple[float, float]]] = {}
    intervals: dict[str, list[tuple[float, float]]] = {}
    for run, points in errors.items():
        window_size = max(1, round(len(points) / MAX_POINTS))
        for start in range(0, len(points), window_size):
            values = torch.tensor([error for _, error in points[start : start + window_size]], dtype=torch.float64)
            low, middle, high = torch.quantile(values, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
            lines.setdefault(run, []).append((points[min(start + window_size // 2, len(points) - 1)][0], middle))
            intervals.setdefault(run, []).append((low, high))
    if window_size > 1:
        note = f"Each point is the median of {window_size} rounds; the band contains 80 % of them. {note}"
    shown_intervals = intervals if window_size > 1 else {}
    return Curves(ERROR_TITLE, "round", "error", lines, True, note, bands=shown_intervals)


def cost_section(histories: Mapping[str, History]) -> Section:
    """Return a table of each run's duration."""
    rows = []
    for run, history in histories.items():
        seconds, rounds = history.records[-1].seconds, len(history.records)
        rows.append([run, str(rounds), f"{seconds:.1f}", f"{1e3 * seconds / rounds:.2f}"])
    return Table("Cost", ["run", "rounds", "seconds", "ms per round"], rows, "Times include evaluation.")


def settings_section(settings: Mapping[str, Setting]) -> Section:
    """Return the settings of a run."""
    texts = {
        key: ", ".join(setting) if isinstance(setting, tuple | list) else str(setting)
        for key, setting in settings.items()
    }
    return Facts("Configuration", {key: text for key, text in texts.items() if text})


def client_sections(status: RunStatus) -> list[Section]:
    """Return a table of remote clients, those that need attention first, or an empty list if clients are not remote."""
    rows = list_clients(status)
    if not rows:
        return []
    note = f"{len(rows) - MAX_CLIENTS:,} more clients are in status.json." if len(rows) > MAX_CLIENTS else ""
    return [Table("Clients", CLIENT_COLUMNS, rows[:MAX_CLIENTS], note)]


def live_page(server: "Server", title: str, status: RunStatus, settings: Mapping[str, Setting]) -> Page:
    """Return the page of a run that has not finished; while the run is in progress, the page reloads itself."""
    history, monitor = server.history, server.monitor
    metric_text = ""
    if monitor is not None and monitor.key in history.metrics:
        data_name = "Validation" if monitor.prefix else "Test"
        value = format_metric(monitor.name, history.metrics[monitor.key])
        metric_text = f" {data_name} {monitor.name} {value} after round {history.last.round}."
    metric_names = ("state", *map(label_metric, status.metrics))
    facts = {name: text for name, text in describe_status(status).items() if name not in metric_names}
    curves = curve_sections({server.defence.name: history}) if history.records else []
    sections = [
        Facts("Status", facts),
        *client_sections(status),
        *(section for section in curves if section.title != ERROR_TITLE),
        *([Text("Differential privacy", (TEXTS["privacy"],))] if server.defence_server.accountant else []),
        settings_section(settings),
    ]
    return Page(
        f"{title}, {server.defence.name}",
        f"{status.headline}.{metric_text}",
        sections,
        "",
        "" if status.ended else f"This page reloads itself every {REFRESH} s until the run has ended.",
        status.state,
        refresh=0 if status.ended else REFRESH,
        progress=None if status.ended else status.round / max(1, status.rounds),
    )


def run_page(
    server: "Server",
    test: Source | None,
    details: RunDetails,
    summary: RunSummary,
    status: RunStatus,
    settings: Mapping[str, Setting],
) -> Page:
    """Return the page of a run that has ended."""
    name, defence_server = server.defence.name, server.defence_server
    histories = {name: server.history}
    # count draws before client_models draws again
    perturbation_sections = (
        veil_sections(defence_server.plan, defence_server.draws) if defence_server.plan is not None else []
    )
    values: dict[str, float] = {}
    metric, test_sections = "", list[Section]()
    if test is not None and server.round:
        models = client_models(server)
        all_scores = scores(models, test, server.loss)
        metric = primary_metric(next(iter(all_scores.values())))
        values = {view: values[metric] for view, values in all_scores.items()}
        test_sections = view_sections(models, test, [str(name) for name in details.encoding.classes], metric, values)
    sections = [
        *(curve_sections(histories) if server.round else []),
        *test_sections,
        *class_sections(summary),
        *client_sections(status),
        *perturbation_sections,
        *([Text("Differential privacy", (TEXTS["privacy"],))] if summary.budget else []),
        *([cost_section(histories)] if server.round else []),
        settings_section(settings),
    ]
    budget, epsilon = summary.budget, summary.budget.epsilon if summary.budget else None
    clients = server.terms.clients
    summary_text = f"{count(summary.rounds, 'round')}" + (f" with {count(clients, 'client')}." if clients else ".")
    summary_text += f" Stopped {summary.stopped}." if summary.stopped else ""
    if budget and epsilon is not None:
        summary_text += f" Epsilon {epsilon:.3g} at delta {budget.delta:g}."
    epsilon_text = f" at epsilon {epsilon:.3g}" if epsilon is not None else ""
    return Page(
        f"{details.title or type(server.model).__name__}, {name}",
        verdict(metric, values, epsilon_text)
        if values
        else f"{count(summary.rounds, 'round')}, without an evaluation{epsilon_text}.",
        sections,
        summary.repeat,
        summary_text,
        f"test {metric} {format_metric(metric, values[SERVER_MODEL])}" if values else "",
    )
