"""The status of a run in its folder: progress, clients, privacy budget and expected end."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from fedveil.errors import BadArgument
from fedveil.federation.history import VALIDATION, RoundRecord
from fedveil.federation.protocol import Member
from fedveil.files import write_atomically
from fedveil.plain_json import SCHEMA, check_schema, read_json, to_json

STATUS = "status.json"
PACE_ROUNDS = 20  # number of rounds from which the expected end is computed
SLOW_FACTOR, SLOW_SECONDS = 2.0, 0.5  # an answer is slow if it takes longer than 2 x the median and 0.5 s
CLIENT_COLUMNS = ("client", "answered", "last round")
State = Literal["waiting", "training", "finished", "stopped", "failed"]
BUILT_IN = ("accuracy", "auc", "balanced_accuracy", "f1", "loss", "mae", "mse", "r2")  # Fedveil's metrics
FAULT_PATTERN = re.compile(r"client (.+?): (.*)", re.DOTALL)


@dataclass(frozen=True)
class ClientStatus:
    """The status of a remote client since the server process started.

    Attributes:
        asked: number of rounds in which the client was asked.
        answered: number of rounds in which it answered.
        last: the last round in which it answered, or 0.
        seconds: duration of its last answer; None with differential privacy or secure aggregation, because the
            duration depends on the client's records.
        fault: its last fault, with the reason.
        fault_round: the round of this fault.
    """

    asked: int = 0
    answered: int = 0
    last: int = 0
    seconds: float | None = None
    fault: str = ""
    fault_round: int = 0


@dataclass(frozen=True)
class RunStatus:
    """The status of a run. With differential privacy, the status depends on neither records nor test data.

    Attributes:
        state: "waiting" for the first round, "training", "finished", "stopped" by a signal, or "failed".
        round: number of complete rounds.
        rounds: number of planned rounds.
        started, updated: seconds since 1970.
        pace: seconds per round, over the last rounds; None before the first.
        metrics: the latest test metrics; empty with differential privacy.
        epsilon, budget, delta: the privacy budget spent, its limit, and delta; None without differential privacy.
        message: the reason why the run failed or stopped early, how to resume it, or notes about the last round.
        clients: remote clients by name; empty if clients are in the server's process.
    """

    state: State
    round: int
    rounds: int
    started: float
    updated: float
    pace: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    epsilon: float | None = None
    budget: float | None = None
    delta: float | None = None
    message: str = ""
    clients: Mapping[str, ClientStatus] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        """Whether the run has finished, was stopped or failed."""
        return self.state in ("finished", "stopped", "failed")

    @property
    def expected_end(self) -> float | None:
        """The expected end in seconds since 1970, if all planned rounds are run; None if unknown."""
        if self.ended or self.pace is None:
            return None
        return self.updated + self.pace * (self.rounds - self.round)

    @property
    def headline(self) -> str:
        """The state and the round in a few words."""
        if self.state == "waiting":
            return f"Waiting for the first of {self.rounds} rounds"
        share = f" ({self.round / self.rounds:.0%})" if 0 < self.round < self.rounds else ""
        return f"{self.state.capitalize()}: round {self.round} of {self.rounds}{share}"

    def write(self, folder: Path) -> None:
        """Write the status to a run's folder."""
        write_atomically(folder / STATUS, to_json({"schema": SCHEMA, **asdict(self)}) + "\n")


def read_status(folder: Path) -> RunStatus:
    """Read the status of the run in a folder."""
    path = folder / STATUS
    if not path.is_file():
        message = f"there is no {STATUS}: no run has been started in this folder"
        raise BadArgument(str(folder), message, "use the folder that was passed to fit(folder=...) or --out")
    try:
        return TypeAdapter(RunStatus).validate_python(check_schema(read_json(path), str(path)))
    except ValidationError as error:
        first_error = error.errors()[0]
        message = f"{'.'.join(map(str, first_error['loc']))} is not valid: {first_error['msg']}"
        raise BadArgument(str(path), message, "use the version of Fedveil that wrote it") from error


def find_status(folder: Path) -> RunStatus | None:
    """Return the status of the run in a folder; None if the status is missing or damaged."""
    try:
        return read_status(folder)
    except ValueError:  # a BadArgument is a ValueError
        return None


def find_runs(folder: Path) -> list[Path]:
    """Return a folder if it contains a run, or else the runs in its subfolders (as with FLARE), latest first."""
    if (folder / STATUS).is_file():
        return [folder]
    result = sorted(folder.rglob(STATUS), key=lambda path: path.stat().st_mtime, reverse=True)
    return [path.parent for path in result]


def measure_pace(records: Sequence[RoundRecord]) -> float | None:
    """Return the mean number of seconds per round over the last rounds, or None before the first."""
    if not records:
        return None
    start_seconds = records[-1 - PACE_ROUNDS].seconds if len(records) > PACE_ROUNDS else 0.0
    return max(0.0, records[-1].seconds - start_seconds) / min(PACE_ROUNDS, len(records))


def update_clients(
    clients: Mapping[str, ClientStatus],
    round_number: int,
    asked: Sequence[Member],
    seconds: Mapping[Member, float],
    faults: Sequence[str],
    store_seconds: bool,
) -> dict[str, ClientStatus]:
    """Return the status of remote clients after a round.

    Args:
        clients: the status before the round.
        round_number: the round that has ended.
        asked: the clients that were asked.
        seconds: the duration of each client's answer.
        faults: the faults in the round's record.
        store_seconds: whether the durations may be stored.
    """
    result = dict(clients)
    for member in asked:
        client = result.get(str(member), ClientStatus())
        client = replace(client, asked=client.asked + 1)
        if member in seconds:
            duration = round(seconds[member], 3) if store_seconds else None
            client = replace(client, answered=client.answered + 1, last=round_number, seconds=duration)
        result[str(member)] = client
    for match in map(FAULT_PATTERN.fullmatch, faults):
        if match and match[1] in result:
            client = result[match[1]]
            was_refused = client.last == round_number and match[2].startswith("refused")
            answered, last = client.answered - was_refused, 0 if was_refused else client.last
            result[match[1]] = replace(client, fault=match[2], fault_round=round_number, answered=answered, last=last)
    return result


def _median(numbers: Sequence[float]) -> float:
    return sorted(numbers)[(len(numbers) - 1) // 2]


def list_clients(status: RunStatus) -> list[list[str]]:
    """Return a row per client for `CLIENT_COLUMNS`; clients with missing answers come first, then slow ones."""
    times = [client.seconds for client in status.clients.values() if client.seconds is not None]
    slow_seconds = max(SLOW_SECONDS, SLOW_FACTOR * _median(times)) if times else 0.0
    sorted_clients = sorted(
        status.clients.items(),
        key=lambda item: (item[1].fault_round != status.round, -(item[1].seconds or 0.0), item[0]),
    )
    return [
        [name, f"{client.answered} of {client.asked}", _describe_client(client, status.round, slow_seconds)]
        for name, client in sorted_clients
    ]


def _describe_client(client: ClientStatus, round_number: int, slow_seconds: float) -> str:
    """Describe a client's last round; a description that begins with "failed" is highlighted."""
    last_answer = f"last answer in round {client.last}" if client.last else "no answer yet"
    if client.fault_round == round_number and client.last != round_number:
        return f"failed: {client.fault}; {last_answer}"
    if client.last != round_number:
        return last_answer
    seconds = "" if client.seconds is None else f" in {client.seconds:.3g} s"
    text = f"{'slow: ' if client.seconds is not None and client.seconds > slow_seconds else ''}answered{seconds}"
    return text + (f"; fault in round {client.fault_round}: {client.fault}" if client.fault else "")


def format_time(seconds: float) -> str:
    """Format a time in seconds since 1970.

    >>> format_time(0.0)
    '1970-01-01 00:00:00 UTC'
    """
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def format_duration(seconds: float) -> str:
    """Format a duration with one or two units.

    >>> format_duration(42.4), format_duration(130), format_duration(7300), format_duration(200_000)
    ('42 s', '2 min', '2 h 2 min', '2 d 7 h')
    """
    minutes = round(seconds / 60)
    if seconds < 60:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    hours, days = minutes // 60, minutes // 1440
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{days} d {hours % 24} h"


def label_metric(name: str) -> str:
    """Return the label of a metric; labels of Fedveil's metrics on test records begin with "test".

    >>> label_metric("validation_balanced_accuracy"), label_metric("accuracy"), label_metric("my_lift")
    ('validation balanced accuracy', 'test accuracy', 'my_lift')
    """
    base_name = name.removeprefix(VALIDATION)
    label = base_name.replace("_", " ") if base_name in BUILT_IN else base_name
    return f"validation {label}" if base_name != name else f"test {label}" if base_name in BUILT_IN else base_name


def describe_status(status: RunStatus, now: float | None = None) -> dict[str, str]:
    """Return facts about a run by name; given `now`, include how long ago the status was updated."""
    age = "" if now is None else f" ({format_duration(max(0.0, now - status.updated))} ago)"
    result = {"state": status.headline, "started": format_time(status.started)}
    result["ended" if status.ended else "updated"] = f"{format_time(status.updated)}{age}"
    if (expected_end := status.expected_end) is not None and status.pace is not None:
        remaining = format_duration(expected_end - status.updated if now is None else max(0.0, expected_end - now))
        result["expected end"] = f"{format_time(expected_end)}, in {remaining} ({status.pace:.3g} s per round)"
    result |= {label_metric(name): f"{value:.4g}" for name, value in status.metrics.items()}
    if status.delta is not None:
        limit = "" if status.budget is None else f" of {status.budget:g}"
        spent_text = "0" if not status.round else "infinite" if status.epsilon is None else f"{status.epsilon:.3g}"
        result["epsilon spent"] = f"{spent_text}{limit}, at delta {status.delta:g}"
    if status.clients:
        answered = sum(client.last == status.round for client in status.clients.values())
        result["clients"] = f"{len(status.clients)}; {answered} answered in the last round"
    return result | ({"note": status.message} if status.message else {})
