"""Make the tables and the page of results from the folders of the runs.

    python -m benchmarks.full.page [--folder runs/full] [--out results/full]

Writes results.json, tables.md, bank.md and report.html. A run that is not complete contributes the number of its
epochs, and no other figure; when it is complete, the same command adds it.
"""

import argparse
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.full.tasks import DEFENCES, IMAGE_TASKS, RUNS, Run
from benchmarks.full.training import read_cpu_seconds
from fedveil.attacks.scores import average
from fedveil.federation.results import read_rounds
from fedveil.files import write_atomically
from fedveil.report import Curves, Page, Section, Table, Text, write

Results = Mapping[str, Any]
TITLES = {"cifar10": "CIFAR-10, 50,000 images", "lesion": "HAM10000, 7,017 images of 64 x 64", "bank": "Bank"}
COMMAND = "python -m benchmarks.full"
OPEN = "not complete"


def collect(folder: Path) -> Results:
    """Return the results of all runs by name; runs that have not started are left out."""
    runs = {run.name: read_run(run, folder / run.name) for run in RUNS if (folder / run.name).is_dir()}
    made = f"torch {torch.__version__}, one thread per run, Python {platform.python_version()}"
    return {"made": made, "runs": runs}


def read_run(run: Run, folder: Path) -> Results:
    """Return the evaluations of a run if it is complete, or else how far it is."""
    lines = read_evaluations(folder)
    done = round(lines[-1]["epoch"]) if lines else 0
    found = {"epochs": run.epochs, "done": done}
    if done < run.epochs or read_rounds(folder) != lines[-1]["round"]:
        return found
    names = IMAGE_TASKS[run.task].metrics if run.task in IMAGE_TASKS else ("mse",)
    curve = [[round(line["epoch"]), *(line[name] for name in names)] for line in lines]
    hours = round(read_cpu_seconds(folder) / 3600, 2)
    return {**found, "columns": ["epoch", *names], "curve": curve, "cpu_hours": hours}


def read_evaluations(folder: Path) -> list[dict[str, Any]]:
    """Return the evaluated rounds in metrics.jsonl; a line that a kill cut short is left out."""
    path, found = folder / "metrics.jsonl", []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record.get("evaluated"):
            found.append(record)
    return found


def last(results: Results, run: Run, metric: str) -> float | None:
    """Return a metric of the last model of a complete run."""
    own = results["runs"].get(run.name, {})
    return own["curve"][-1][own["columns"].index(metric)] if "curve" in own else None


def progress(results: Results, runs: Sequence[Run]) -> str:
    """Describe how far runs are that are not complete."""
    own = [results["runs"].get(run.name, {"done": 0, "epochs": run.epochs}) for run in runs]
    return ", ".join(f"epoch {one['done']} of {one['epochs']}" for one in own)


def image_rows(results: Results, task: str) -> list[list[str]]:
    """Return a row per run of a data set of images."""
    rows, metrics = [], IMAGE_TASKS[task].metrics
    for run in RUNS:
        if run.task != task:
            continue
        start = [str(run.clients), run.defence, str(run.epochs)]
        values = [last(results, run, metric) for metric in metrics]
        if None in values:
            rows.append([*start, f"{OPEN}: {progress(results, [run])}", *[""] * len(metrics)])
            continue
        shown = [format_metric(name, value or 0.0) for name, value in zip(metrics, values, strict=True)]
        rows.append([*start, *shown, f"{results['runs'][run.name]['cpu_hours']:.1f}"])
    return rows


def format_metric(name: str, value: float) -> str:
    """Format the loss as it is, and other metrics in per cent."""
    return f"{value:.4f}" if name == "loss" else f"{100 * value:.2f}"


def image_header(task: str) -> list[str]:
    """Return the header of `image_rows`."""
    shown = {"auc": "AUC, %", "loss": "loss"}
    names = [shown.get(name, f"{name.replace('_', ' ')}, %") for name in IMAGE_TASKS[task].metrics]
    return ["clients", "training", "epochs", *names, "CPU hours"]


def bank_rows(results: Results) -> list[list[str]]:
    """Return a row per depth and number of clients, for the seeds for which all three runs are complete."""
    rows = []
    for layers, clients in dict.fromkeys((run.layers, run.clients) for run in RUNS if run.task == "bank"):
        same = [run for run in RUNS if (run.task, run.layers, run.clients) == ("bank", layers, clients)]
        found = {(run.seed, run.defence): last(results, run, "mse") for run in same}
        whole = [
            seed for seed in sorted({run.seed for run in same}) if None not in [found[seed, name] for name in DEFENCES]
        ]
        values = {name: [found[seed, name] or 0.0 for seed in whole] for name in DEFENCES}
        start = [str(layers), str(clients), str(len(whole))]
        if not whole:
            rows.append([*start, OPEN, *[""] * 4])
            continue
        gaps = [max(abs(a - b) for a, b in zip(values["plain"], values[name], strict=True)) for name in DEFENCES[1:]]
        rows.append([*start, *[format_mean(values[name]) for name in DEFENCES], *[f"{gap:.1e}" for gap in gaps]])
    return sorted(rows, key=lambda row: (int(row[0]), int(row[1])))


def format_mean(values: Sequence[float]) -> str:
    """Format a mean with Student's 95 % interval over seeds."""
    mean = average(values)
    return f"{mean.value:.5f}" + (f" ± {mean.high - mean.value:.5f}" if len(values) > 1 else "")


BANK_HEADER = ["L", "clients", "seeds", *DEFENCES, "veil from plain, at most", "rounding from plain, at most"]
BANK_NOTE = (
    "Test MSE of the last model; 200 epochs, batches of 32 per client, Adam with learning rate 1e-3 and weight decay "
    "5e-4, no biases, as in table 1 of the paper. Only seeds for which all three runs are complete are counted."
)


def curves(results: Results) -> list[Section]:
    """Return one chart per data set and number of clients, with all complete runs."""
    charts: list[Section] = []
    for task, clients in dict.fromkeys((run.task, run.clients) for run in RUNS if run.task in IMAGE_TASKS):
        metric = IMAGE_TASKS[task].metrics[0]
        lines = {}
        for run in RUNS:
            own = results["runs"].get(run.name, {})
            if (run.task, run.clients) == (task, clients) and "curve" in own:
                column = own["columns"].index(metric)
                lines[run.defence] = [(float(point[0]), 100 * point[column]) for point in own["curve"]]
        if lines:
            title = f"{TITLES[task]}, clients: {clients}"
            charts.append(Curves(title, "epoch", f"test {metric.replace('_', ' ')} (%)", lines))
    return charts


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table in Markdown."""
    return [f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows)]


def write_tables(results: Results) -> str:
    """Return the tables of images in Markdown."""
    lines = ["# ResNet20 on all images", "", f"Made by `{COMMAND}.page` with {results['made']}.", ""]
    for task in IMAGE_TASKS:
        lines += [f"## {TITLES[task]}", "", *markdown(image_header(task), image_rows(results, task)), ""]
    return "\n".join(lines)


def write_bank(results: Results) -> str:
    """Return the table of bank in Markdown."""
    about = f"Made by `{COMMAND}.page` with {results['made']}. {BANK_NOTE}"
    return "\n".join(["# Bank", "", about, "", *markdown(BANK_HEADER, bank_rows(results)), ""])


def make_page(results: Results) -> Page:
    """Return the page with all tables and curves."""
    names = [run.name for run in RUNS]
    done = sum("curve" in results["runs"].get(name, {}) for name in names)
    verdict = f"{done} of {len(names)} runs are complete; the others show no figures."
    tables = [Table(TITLES[task], image_header(task), image_rows(results, task)) for task in IMAGE_TASKS]
    about = Text("Computed with", [results["made"]])
    sections = [*tables, *curves(results), Table(TITLES["bank"], BANK_HEADER, bank_rows(results), BANK_NOTE), about]
    return Page("Training at the paper's scale", verdict, sections, f"{COMMAND} cifar10 lesion bank")


def main(argv: Sequence[str] | None = None) -> None:
    """Write all files."""
    parser = argparse.ArgumentParser(prog=f"{COMMAND}.page", description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/full"))
    parser.add_argument("--out", type=Path, default=Path("results/full"))
    given = parser.parse_args(argv)
    results = collect(given.folder)
    given.out.mkdir(parents=True, exist_ok=True)
    write_atomically(given.out / "results.json", json.dumps(results, indent=1) + "\n")
    write_files(results, given.out)


def write_files(results: Results, out: Path) -> None:
    """Write the tables and the page of results."""
    write_atomically(out / "tables.md", write_tables(results))
    write_atomically(out / "bank.md", write_bank(results))
    write(make_page(results), out / "report.html")


if __name__ == "__main__":
    main()
