"""Write the files of `fit(folder=...)` other than checkpoints: settings, records, status, summary and report page."""

import json
import logging
import math
import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pydantic import JsonValue

from fedveil.defences.registry import refers_to_code
from fedveil.errors import FedveilError
from fedveil.federation import checkpoint
from fedveil.federation.description import describe_encoding, describe_run
from fedveil.federation.fitting import FitPlan
from fedveil.federation.history import RoundRecord
from fedveil.federation.results import CONFIG, MetricsFile, RunDetails, Setting, is_repeatable, read_rounds, summarise
from fedveil.federation.rounds import ClearRound
from fedveil.federation.status import ClientStatus, RunStatus, State, find_status, measure_pace, update_clients
from fedveil.files import write_atomically
from fedveil.plain_json import PYTHON, SCHEMA, read_json, to_json
from fedveil.records.encoding import write_encoding

if TYPE_CHECKING:
    from fedveil.federation.server import Server
    from fedveil.report import Page

LOG = logging.getLogger("fedveil")
METRICS, SUMMARY, REPORT = "metrics.jsonl", "summary.json", "report.html"
MAX_NAMES = 20  # maximum number of clients named in the first status
INTERVAL = 5.0  # minimum number of seconds between updates of the page and the status while training
PAUSE_FACTOR = 20  # minimum time between updates, as a multiple of the duration of the last update
MAX_PAUSE = 600.0  # maximum number of seconds between updates


def read_settings(folder: Path) -> dict[str, Setting]:
    """Return the settings in a folder's config.json by name, however the run was started; empty if there is no file."""
    path = folder / CONFIG
    result = read_json(path) if path.is_file() else {}
    sections = result.values() if isinstance(result, dict) else ()
    return {name: value for section in sections if isinstance(section, dict) for name, value in section.items()}


def list_settings(server: "Server") -> dict[str, Setting]:
    """Return the settings of a server as plain values; omit those that are None or are not plain values."""
    description = describe_run(server)
    terms, optimizer = description.terms, description.optimizer.rpartition(".")[2]
    values: dict[str, object] = {
        "server": description.server,
        "clients": terms.clients or None,
        "model": description.model,
        "parameters": description.parameters,
        "defence": description.defence["name"],
        **_flatten(description.defence.get("arguments"), ""),
        "loss": description.loss,
        "optimizer": optimizer.rpartition(":")[2],
        **{name: value for name, value in (description.optimizer_settings or {}).items() if value},
        "clip_norm": description.clip_norm,
        "batch_size": terms.batch_size,
        "whole_shard": terms.whole_shard,
        "participation": description.participation,
        "rounds_per_epoch": description.rounds_per_epoch,
        "secure_aggregation": description.secure_aggregation,
        "seed": description.seed,
        **{f"limits.{name}": value for name, value in (description.limits or {}).items()},
    }
    settings = {name: tuple(map(str, value)) if isinstance(value, list) else value for name, value in values.items()}
    return {name: value for name, value in settings.items() if isinstance(value, bool | int | float | str | tuple)}


def _flatten(arguments: JsonValue, prefix: str) -> dict[str, JsonValue]:
    """Return the arguments of a described defence, with the arguments of an inner object named `outer.inner`."""
    result: dict[str, JsonValue] = {}
    for name, value in arguments.items() if isinstance(arguments, dict) else ():
        if isinstance(value, dict):
            result |= _flatten(value.get("arguments"), f"{prefix}{name}.")
        else:
            result[f"{prefix}{name}"] = value
    return result


def describe_stop(folder: Path) -> str:
    """Return the last saved round of a stopped run, and how to resume it."""
    paths = checkpoint.list_checkpoints(folder)
    tag = checkpoint.read_tag(paths[0]) if paths else None
    if tag is None:
        return "no round is saved; start the run again"
    command = f"fit(folder={str(folder)!r}, resume=True)"
    if is_repeatable(folder):
        settings = read_settings(folder)
        runs_code = any(":" in str(settings.get(key)) for key in ("data", "model")) or refers_to_code(
            str(settings.get("defence"))
        )
        command = f"fedveil train --resume --out {shlex.quote(str(folder))}{' --trust-code' * runs_code}"
    return f"round {tag.round} is saved; resume with {command}"


class RunFolder:
    """Writes the folder of a run while its server trains.

    Args:
        server: the server, after it has resumed the run in the folder, if any.
        plan: the plan of `fit`.
        folder: the run's folder.
        details: details for the page and the summary that the server does not know.
    """

    def __init__(self, server: "Server", plan: FitPlan, folder: Path, details: RunDetails) -> None:
        self._server, self._plan, self._folder, self._details = server, plan, folder, details
        self._metrics = MetricsFile(folder / METRICS, server)
        previous = find_status(folder) if server.round else None  # status of the resumed run
        self._started = previous.started if previous else time.time()
        self._next_update = 0.0  # time of the next update of the page and the status
        self._complete = previous is not None and previous.state == "finished" and self._is_complete(previous.round)
        self._clients: Mapping[str, ClientStatus] = {}
        is_private = server.defence_server.accountant is not None
        self._private, self._timed = is_private, not is_private and isinstance(server.rounds, ClearRound)
        self._settings: Mapping[str, Setting] = {}

    def _is_complete(self, round_number: int) -> bool:
        """Return whether the folder has the files of a run that finished after this round, and no rounds remain."""
        server, plan = self._server, self._plan
        has_ended = server.round >= plan.last_round or plan.has_stalled(server.history.records)
        has_files = round_number == server.round == read_rounds(self._folder) and (self._folder / REPORT).is_file()
        return has_files and (has_ended or not server.defence_server.has_budget)

    def __enter__(self) -> Self:
        self._write_settings()
        write_encoding(self._folder, describe_encoding(self._server, self._details.encoding, self._plan.evaluation))
        engine = self._server.engine
        names = [] if engine.traffic is None else [str(member) for member in engine.members()]
        others = f" and {len(names) - MAX_NAMES:,} more" if len(names) > MAX_NAMES else ""
        connection_text = f"connected at the start: {', '.join(names[:MAX_NAMES])}{others}" if names else ""
        if not self._complete:
            self._show("training" if self._server.round else "waiting", connection_text)
        return self

    def append(self, record: RoundRecord) -> None:
        """Add the record of the round that has just ended; update the status and the page from time to time."""
        self._metrics.append(record)
        traffic, faults = self._server.engine.traffic, record.notes.get("faults", ())
        if traffic is not None:
            texts = [str(fault) for fault in faults]
            asked_members = sorted(traffic.members, key=str)
            self._clients = update_clients(
                self._clients, record.round, asked_members, traffic.seconds, texts, self._timed
            )
        if time.monotonic() >= self._next_update:
            self._show("training")

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        self._metrics.__exit__(error_type)
        if error is not None:
            description = str(error) if isinstance(error, FedveilError) else type(error).__name__
            was_stopped = isinstance(error, KeyboardInterrupt)  # Ctrl-C, or SIGTERM as `Termination`
            self._show(*(("stopped", describe_stop(self._folder)) if was_stopped else ("failed", description)))
            return
        server, folder = self._server, self._folder
        self._write_settings()  # once more, because more clients may have joined
        test = self._plan.evaluation.test if self._plan.evaluation else None
        summary = summarise(server, folder, self._details, test, self._plan.patience)
        server.summary = summary
        if self._complete:
            return
        write_atomically(folder / SUMMARY, to_json(summary.to_dict(), indent=2) + "\n")
        status = self._status("finished", summary.stopped or "")
        from fedveil.federation.page import run_page

        self._write(status, lambda: run_page(server, test, self._details, summary, status, self._settings))

    def _write_settings(self) -> None:
        """Write config.json, unless it is the configuration of `fedveil train`."""
        if is_repeatable(self._folder):
            self._settings = self._details.settings or read_settings(self._folder)
            return
        self._settings = {**list_settings(self._server), **self._details.settings}
        text = json.dumps({"schema": SCHEMA, PYTHON: self._settings}, indent=2, default=str) + "\n"
        path = self._folder / CONFIG
        if not path.is_file() or path.read_text() != text:
            write_atomically(path, text)

    def _status(self, state: State, message: str = "") -> RunStatus:
        server = self._server
        records, accountant = server.history.records, server.defence_server.accountant
        epsilon = records[-1].figures.get("epsilon") if records else None
        return RunStatus(
            state,
            server.round,
            self._plan.last_round,
            self._started,
            time.time(),
            measure_pace(records),
            {} if self._private else dict(server.history.metrics),
            epsilon if epsilon is not None and math.isfinite(epsilon) else None,
            accountant.budget if accountant else None,
            accountant.delta if accountant else None,
            message,
            self._clients,
        )

    def _show(self, state: State, message: str = "") -> None:
        """Write the status and the live page."""
        from fedveil.federation.page import live_page

        start_time = time.monotonic()
        status, title = self._status(state, message), self._details.title or type(self._server.model).__name__
        self._write(status, lambda: live_page(self._server, title, status, self._settings))
        end_time = time.monotonic()
        self._next_update = end_time + min(MAX_PAUSE, max(INTERVAL, PAUSE_FACTOR * (end_time - start_time)))

    def _write(self, status: RunStatus, make_page: "Callable[[], Page]") -> None:
        """Write the status and a page; log errors without raising them, because they must not end the run."""
        from fedveil.report import write

        try:
            status.write(self._folder)
            write(make_page(), self._folder / REPORT)
        except Exception as error:
            LOG.warning("fedveil: the report page could not be written: %s", error)
