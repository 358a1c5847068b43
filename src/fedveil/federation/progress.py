"""Progress bars and one-line progress reports, the same for every engine."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from fedveil.federation.history import RoundRecord, select_main_metrics
from fedveil.federation.stopping import Monitor

if TYPE_CHECKING:
    from fedveil.federation.server import Server

INTERVAL = 1.0  # minimum number of seconds between lines


def describe_round(record: RoundRecord, rounds: int) -> str:
    """Describe a round in one line: metrics, replies, times, bytes and faults."""
    figures, notes = record.figures, record.notes
    metrics = select_main_metrics(record.metrics).items()
    parts = [f"round {record.round}/{rounds}", *(f"{name} {value:.4f}" for name, value in metrics)]
    if "answers" in figures:
        parts.append(f"{figures['answers']} of {figures['asked']} clients answered")
        client_time = f" (clients computed {figures['seconds_work']:.3f} s)" if "seconds_work" in figures else ""
        waiting_time, recovery_time = figures["seconds_waiting"], figures["seconds_recovery"]
        parts.append(f"waited {waiting_time:.3f} s{client_time}, recovery {recovery_time:.3f} s")
        parts.append(f"{figures['bytes_total'] / 1e6:.2f} MB")
    if "skipped" in notes:
        parts.append(f"skipped: {notes['skipped']}")
    if isinstance(exclusions := notes.get("excluded"), Mapping):
        parts += [f"{name} is excluded: {reason}" for name, reason in exclusions.items()]
    if faults := notes.get("faults"):
        parts.append(f"{len(faults)} faults, the last: {list(faults)[-1]}")
    return ", ".join(parts)


def describe_progress(server: "Server") -> str:
    """Describe the last round of a server; with differential privacy, only the round and the budget spent."""
    history, num_rounds = server.history, server.planned_rounds
    if not history.records:
        return "waiting for the first round"
    last_record = history.records[-1]
    if server.defence_server.accountant is None:
        return describe_round(replace(last_record, metrics=history.metrics), num_rounds)
    return f"round {last_record.round}/{num_rounds}, epsilon {last_record.figures.get('epsilon', 0.0):.3g}"


def print_progress(rounds: int) -> Callable[[RoundRecord], None]:
    """Return a callback that prints at most one line per second, except after faults and after the last round."""
    last_time = -INTERVAL

    def show(record: RoundRecord) -> None:
        nonlocal last_time
        now = time.monotonic()
        if now - last_time >= INTERVAL or record.notes.get("faults") or record.round == rounds:
            last_time = now
            print(describe_round(record, rounds), flush=True)

    return show


@contextmanager
def show_bar(callbacks: list[Callable[[RoundRecord], object]], rounds: int, monitor: Monitor | None) -> Iterator[None]:
    """Show a progress bar with the latest and the best value of the monitored metric.

    Args:
        callbacks: the callbacks of the run; a callback that updates the bar is added.
        rounds: number of the last round.
        monitor: the monitored metric, if the model is evaluated.
    """
    from tqdm.auto import tqdm

    with tqdm(total=rounds, unit="round", dynamic_ncols=True) as bar:
        best: float | None = None

        def show(record: RoundRecord) -> None:
            nonlocal best
            if monitor is not None and monitor.key in record.metrics:
                value = record.metrics[monitor.key]
                best = value if monitor.improves(value, best) else best
                values = {monitor.key: f"{value:.4g}"} | ({} if best is None else {"best": f"{best:.4g}"})
                bar.set_postfix(values, refresh=False)
            bar.update(record.round - bar.n)

        callbacks.append(show)
        yield
