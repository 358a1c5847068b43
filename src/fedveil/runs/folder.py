"""A run and its folder: config.json, metrics.jsonl, model.safetensors, report.html, and a checkpoint to go on from."""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors.torch import save

from fedveil.data import Data
from fedveil.defences import Defence, Private, Veil, innermost
from fedveil.errors import BadArgument
from fedveil.federation.evaluate import METRICS
from fedveil.federation.local import Federation, Record
from fedveil.federation.server import Server
from fedveil.files import make_folder, refusals, write_whole
from fedveil.plain_json import to_json
from fedveil.report import write
from fedveil.runs.build import federation_of, load_data
from fedveil.runs.config import Config, configure, flags_of
from fedveil.runs.page import run_page

RETIRED = ("nodes", "tolerance")  # keys of earlier versions, which interpolated losses


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The folder for this process alone: two runs must never write to one."""
    with refusals(make_folder(folder)):
        lock = FileLock(folder / ".lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            what = "another process is working in this folder"
            raise BadArgument(str(folder), what, "wait until it is done, or another --out") from None
    try:
        yield
    finally:
        lock.release()


def prepare_folder(folder: Path, config: Config, resume: bool) -> None:
    """Make the folder; one that holds a run is only continued, and only with the same configuration."""
    known = folder / "config.json"
    if known.exists():
        if not resume:
            what = "there is a run in this folder"
            raise BadArgument(str(folder), what, "--resume to go on with it, or another --out")
        old = read_config(folder).flat()
        for name, value in config.flat().items():
            if name != "epochs" and old[name] != value:
                what = f"the run here has {name} = {old[name]!r}, not {value!r}"
                raise BadArgument(str(folder), what, "resume with the same configuration (only epochs may grow)")
    write_whole(known, json.dumps(config.nested(), indent=2) + "\n")


def read_config(folder: Path) -> Config:
    """The configuration of the run in a folder; keys of earlier versions may be there as long as they were not used."""
    path = folder / "config.json"
    try:
        values = dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise BadArgument(str(folder), f"holds no run: {error}", "name a folder that `fedveil train` wrote") from error
    for key in RETIRED:
        if values.pop(key, None) is not None:
            raise BadArgument(str(path), f"the run used {key!r}, which is gone", "start it anew; decoys do the same")
    return configure(values, str(path))


def finished(config: Config, folder: Path) -> bool:
    """Whether the folder holds this run, and all of it."""
    written = (folder / "summary.json").exists() and (folder / "checkpoint.pt").exists()
    return written and read_config(folder) == config


def open_run(folder: Path, data: Data | None = None) -> tuple[Config, Federation]:
    """The federation of a run's folder as its last checkpoint left it."""
    config = read_config(folder)
    federation = federation_of(config, data or load_data(config))
    federation.resume(folder)
    return config, federation


def spent(defence: Defence) -> dict[str, float | None]:
    """What a private run has spent: epsilon if a client is left out, and if its data are replaced; None if infinite."""
    if not isinstance(defence, Private):
        return {}
    found = {"epsilon": defence.epsilon(), "epsilon_replace": defence.epsilon(replace=True), "delta": defence.delta}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


def covered(defence: Defence) -> dict[str, float]:
    """How much of the model a veil covers: shares of the parameters' values, and of those that known ones reveal."""
    inner = innermost(defence)
    return {**inner.plan.shares, "revealed": inner.plan.known.share} if isinstance(inner, Veil) else {}


def train(
    config: Config,
    folder: Path,
    *,
    resume: bool = False,
    on_round: Callable[[Record], None] | None = None,
    data: Data | None = None,
) -> dict[str, Any]:
    """Run a configuration to its end; returns the summary that `fedveil train` prints.

    Everything that can be refused is refused before the folder is made.
    """
    data = data or load_data(config)
    federation = federation_of(config, data)
    with locked(folder):
        prepare_folder(folder, config, resume)
        if resume and (folder / "checkpoint.pt").exists():
            federation.resume(folder)
        return record_run(
            federation,
            folder,
            data,
            config.flat(),
            f"fedveil train {config.flags()} {flags_of({'out': str(folder)})}",
            epochs=config.training.epochs,
            checkpoint_every=config.training.checkpoint_every or federation.rounds_per_epoch,
            on_round=on_round,
        )


def record_run(
    server: Server,
    folder: Path,
    data: Data,
    config: Mapping[str, Any],
    repeat: str,
    *,
    epochs: int = 1,
    rounds: int | None = None,
    evaluate_every: int | None = None,
    checkpoint_every: int | None = None,
    on_round: Callable[[Record], None] | None = None,
) -> dict[str, Any]:
    """Let a server train, wherever its clients are, and write its folder; returns the summary.

    Args:
        server: before its first round, or resumed.
        folder: where everything goes.
        data: to evaluate on, and for the page.
        config: for the page; "clients" and "model" go into its first line.
        repeat: the command that repeats the run.
        epochs: see `Server.fit`, as for the rest.
        rounds: in place of epochs.
        evaluate_every: rounds.
        checkpoint_every: rounds.
        on_round: called with each round's record.
    """
    lines = [to_json(record) + "\n" for record in server.history.records]
    write_whole(folder / "metrics.jsonl", "".join(lines))
    with (folder / "metrics.jsonl").open("a", buffering=1) as metrics:

        def log(record: Record) -> None:
            with refusals(folder / "metrics.jsonl"):
                metrics.write(to_json(record) + "\n")
            if on_round:
                on_round(record)

        history = server.fit(
            epochs,
            test=(data.test.inputs, data.test.targets),
            rounds=rounds,
            evaluate_every=evaluate_every,
            folder=folder,
            checkpoint_every=checkpoint_every,
            on_round=log,
        )
    values = {name: tensor.detach().cpu().clone() for name, tensor in server.model.state_dict().items()}
    write_whole(folder / "model.safetensors", save(values))
    summary: dict[str, Any] = {
        "folder": str(folder),
        "rounds": server.round,
        **{name: history.last[name] for name in METRICS if name in history.last},
        "best": server.best[0] if server.best else None,
        **covered(server.defence),
        **spent(server.defence),
        "largest_error": max((record["error"] for record in history.records), default=0.0),
        "seconds": history.records[-1]["seconds"] if history.records else 0.0,
        "repeat": repeat,
    }
    write_whole(folder / "summary.json", to_json(summary, indent=2) + "\n")
    write(run_page(server, data, config, summary), folder / "report.html")
    return summary
