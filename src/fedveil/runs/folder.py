"""A run and its folder: config.json, metrics.jsonl, model.safetensors, report.html, and a checkpoint to go on from."""

import json
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save

from fedveil.data import Data
from fedveil.defences import Defence, Private, Veil, innermost
from fedveil.errors import BadArgument
from fedveil.federation import checkpoint
from fedveil.federation.evaluate import METRICS
from fedveil.federation.local import Federation, Record
from fedveil.federation.server import Server
from fedveil.files import refusals, write_whole
from fedveil.locks import locked
from fedveil.plain_json import to_json
from fedveil.report import write
from fedveil.runs.build import federation_of, load_data
from fedveil.runs.config import Config, configure, flags_of, refuse_code
from fedveil.runs.page import run_page

RUN = (checkpoint.LAST, checkpoint.PREVIOUS, "model.safetensors", "summary.json")  # any of them is a run
RETIRED = ("nodes", "tolerance")  # keys of earlier versions, which interpolated losses


def prepare_folder(folder: Path, config: Config, resume: bool) -> None:
    """Write the configuration; a folder that holds a run is only continued, and only with the same one.

    A run that ended before its first checkpoint left nothing to protect.
    """
    if any((folder / name).exists() for name in RUN):
        if not resume:
            what = "there is a run in this folder"
            raise BadArgument(str(folder), what, "--resume to go on with it, or another --out")
        old = _config_in(folder).flat()
        for name, value in config.flat().items():
            if name != "epochs" and old[name] != value:
                what = f"the run here has {name} = {old[name]!r}, not {value!r}"
                raise BadArgument(str(folder), what, "resume with the same configuration (only epochs may grow)")
    write_whole(folder / "config.json", json.dumps(config.nested(), indent=2) + "\n")


def read_config(folder: Path, *, trust_code: bool = False, named: Collection[str] = ()) -> Config:
    """The configuration of the run in a folder.

    Args:
        folder: of the run. Keys of earlier versions may be there as long as they were not used.
        trust_code: accept a model, data or a defence that are named as `package.module:name`: whoever builds them
            imports that module, and so runs its code. Folders from elsewhere may name any.
        named: keys of which the user has said so already.
    """
    config = _config_in(folder)
    if not trust_code:
        refuse_code(config.flat(), str(folder / "config.json"), named)
    return config


def _config_in(folder: Path) -> Config:
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
    """Whether the folder holds this run, all of it, and its last checkpoint is good."""
    try:
        rounds = json.loads((folder / "summary.json").read_text())["rounds"]
        state = checkpoint.load(folder / checkpoint.LAST)
    except (OSError, ValueError, KeyError, TypeError):  # a BadArgument is a ValueError
        return False
    return bool(state["round"] == rounds) and _config_in(folder) == config


def open_run(folder: Path, data: Data | None = None, *, trust_code: bool = False) -> tuple[Config, Federation]:
    """The federation of a run's folder as its last checkpoint left it; see `read_config` for `trust_code`."""
    config = read_config(folder, trust_code=trust_code)
    return config, resumed(config, folder, data or load_data(config))


def resumed(config: Config, folder: Path, data: Data) -> Federation:
    """The federation of a configuration as the last checkpoint in a folder left it."""
    federation = federation_of(config, data)
    federation.resume(folder)
    return federation


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
        if resume and checkpoint.found_in(folder):
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
    test = data.test.inputs, data.test.targets
    how: dict[str, Any] = {"rounds": rounds, "evaluate_every": evaluate_every, "checkpoint_every": checkpoint_every}
    with locked(folder):
        lines = [to_json(record) + "\n" for record in server.history.records]
        write_whole(folder / "metrics.jsonl", "".join(lines))
        with (folder / "metrics.jsonl").open("a", buffering=1) as metrics:

            def log(record: Record) -> None:
                with refusals(folder / "metrics.jsonl"):
                    metrics.write(to_json(record) + "\n")
                if on_round:
                    on_round(record)

            server.fit(epochs, test=test, folder=folder, on_round=log, **how)
        values = {name: tensor.detach().cpu().clone() for name, tensor in server.model.state_dict().items()}
        write_whole(folder / "model.safetensors", save(values))
        summary = summary_of(server, folder, repeat)
        write_whole(folder / "summary.json", to_json(summary, indent=2) + "\n")
        write(run_page(server, data, config, summary), folder / "report.html")
    return summary


def summary_of(server: Server, folder: Path, repeat: str) -> dict[str, Any]:
    """How a run ended."""
    history = server.history
    return {
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
