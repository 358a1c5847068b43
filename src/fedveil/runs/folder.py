"""A run and its folder: config.json, metrics.jsonl, the last and the best model, report.html, and a checkpoint."""

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedveil.data import Data
from fedveil.defences.interface import AnyServer
from fedveil.errors import BadArgument
from fedveil.federation import checkpoint
from fedveil.federation.checkpoint import BEST, MODEL
from fedveil.federation.evaluate import METRICS
from fedveil.federation.fitting import Callback
from fedveil.federation.local import Federation
from fedveil.federation.server import Server
from fedveil.federation.setting import RECORDS
from fedveil.federation.stored import Folder
from fedveil.files import write_whole
from fedveil.locks import locked
from fedveil.plain_json import read_json, to_json
from fedveil.report import write
from fedveil.runs.build import federation_of, load_data, load_factory, named_model, settled
from fedveil.runs.config import Config, configure, read_file, refuse_code
from fedveil.runs.metrics import Metrics
from fedveil.runs.page import run_page

SHAPES = "model.json"
RUN = (checkpoint.LAST, checkpoint.PREVIOUS, MODEL, "summary.json")  # any of them is a run


def holds_run(folder: Path) -> bool:
    """Whether a folder holds a run, or the beginning of one."""
    return any((folder / name).exists() for name in RUN)


def check_folder(folder: Path, config: Config, resume: bool) -> None:
    """Refuse a folder that holds a run, unless it is to be resumed with the same configuration.

    A run that ended before its first checkpoint left nothing to protect.
    """
    if not holds_run(folder):
        return
    if not resume:
        fix = "add --resume (resume=True in Python) to continue it, or choose another --out"
        raise BadArgument(str(folder), "there is a run in this folder", fix)
    old = _config_in(folder).flat()
    for name, value in config.flat().items():
        if name != "epochs" and old[name] != value:
            what = f"the run here has {name} = {old[name]!r}, not {value!r}"
            flag = f"--{name.replace('_', '-')}"
            raise BadArgument(str(folder), what, f"leave out {flag} (only --epochs may grow), or choose another --out")
    if config.training.epochs < int(str(old["epochs"])):
        what = f"the run here has {old['epochs']} epochs, more than {config.training.epochs}"
        raise BadArgument(str(folder), what, f"--epochs {old['epochs']} or more; --patience stops a run early")


def read_config(folder: Folder, *, trust_code: bool = False, named: Collection[str] = ()) -> Config:
    """The configuration of the run in a folder.

    Args:
        folder: of the run. Keys of earlier versions may be there as long as they were not used.
        trust_code: accept a model, data or a defence that are named as `package.module:name`: whoever builds them
            imports that module, and so runs its code. Folders from elsewhere may name any.
        named: keys of which the user has said so already.
    """
    config = _config_in(Path(folder))
    if not trust_code:
        refuse_code(config.flat(), str(Path(folder) / "config.json"), named)
    return config


def _config_in(folder: Path) -> Config:
    path = folder / "config.json"
    if not path.is_file():
        raise BadArgument(str(folder), "holds no run: no config.json", "name a folder that `fedveil train` wrote")
    return configure(read_file(path), str(path))


def finished(config: Config, folder: Path) -> bool:
    """Whether the folder holds this run, all of it, and its last checkpoint is good."""
    try:
        rounds = read_json(folder / "summary.json")["rounds"]
        state = checkpoint.load(folder / checkpoint.LAST)
    except (ValueError, KeyError, TypeError):  # a BadArgument is a ValueError
        return False
    found = _config_in(folder)
    wanted = config if config.training.loss else config.changed(loss=found.training.loss)
    return bool(state["round"] == rounds) and found == wanted


def open_run(folder: Folder, data: Data | None = None, *, trust_code: bool = False) -> tuple[Config, Federation]:
    """The federation of a run's folder as its last checkpoint left it; see `read_config` for `trust_code`."""
    config = read_config(folder, trust_code=trust_code)
    return config, resumed(config, Path(folder), data or load_data(config))


def load_model(
    folder: Folder, *, best: bool = False, model: nn.Module | None = None, trust_code: bool = False
) -> nn.Module:
    """The model that a run left in its folder, in evaluation mode, on the CPU.

    Args:
        folder: of the run.
        best: the model of the best evaluation in place of the last one.
        model: takes the values, in place of one that is built as the run's configuration says. A folder that
            `Federation.fit` wrote, or a run over Flower or FLARE, has none.
        trust_code: build a model that the configuration names as `package.module:name`: that module is imported, and
            so its code is run.

    Raises:
        BadArgument: there is no such file, it is damaged, or it is of another model.
    """
    home = Path(folder)
    path = home / (BEST if best else MODEL)
    try:
        values = load_file(path) if _is_newest(path) else _values_in_checkpoint(home, best)
        network = _architecture(home, trust_code) if model is None else model
        network.load_state_dict(values)
    except SafetensorError as error:
        raise BadArgument(str(path), f"is damaged: {error}", "--resume writes it again from the checkpoint") from error
    except RuntimeError as error:
        raise BadArgument(str(path), f"its values are of another model: {error}", "load_model(..., model=)") from error
    return network.eval()


def _is_newest(path: Path) -> bool:
    """Whether a file of values is there, and no checkpoint beside it is of a later round."""
    last = checkpoint.header(path.parent / checkpoint.LAST)
    return path.is_file() and (last is None or checkpoint.round_of_values(path) >= last.round)


def _values_in_checkpoint(folder: Path, best: bool) -> Mapping[str, Tensor]:
    """The values of a run that was stopped before its end."""
    path = folder / (BEST if best else MODEL)
    if not (found := checkpoint.found_in(folder)):
        here = "the run has no checkpoint yet" if folder.is_dir() else "there is no such folder"
        raise BadArgument(str(path), f"there is no model: {here}", "name the folder of a run")
    try:
        state = checkpoint.load(found[0])
    except checkpoint.Damaged:
        if len(found) == 1:
            raise
        state = checkpoint.load(found[1])
    if best and state["best"] is None:
        raise BadArgument(str(path), "there is no best model: the run was not evaluated", "load_model(folder)")
    values: Mapping[str, Tensor] = state["best"][1] if best else state["model"]
    return values


def _architecture(folder: Path, trust_code: bool) -> nn.Module:
    """The network that a run trained, with new values."""
    if not (folder / "config.json").is_file():
        what = "there is no config.json, which says what network it is"
        raise BadArgument(str(folder), what, "load_model(folder, model=the network)")
    config = read_config(folder, trust_code=trust_code)
    if ":" in config.model.name:
        return load_factory(config.model.name)
    try:
        shapes = read_json(folder / SHAPES)
        shape, outputs = torch.Size(shapes["record"]), int(shapes["outputs"])
    except (ValueError, KeyError, TypeError) as error:
        what = f"{SHAPES}, which has the shape of records, cannot be read: {error}"
        raise BadArgument(str(folder), what, "load_model(folder, model=the network)") from error
    return named_model(config.model, shape, outputs)


def resumed(config: Config, folder: Path, data: Data) -> Federation:
    """The federation of a configuration as the last checkpoint in a folder left it."""
    federation = federation_of(config, data)
    federation.resume(folder)
    return federation


def spent(server: AnyServer) -> dict[str, float | None]:
    """What a private run has spent: epsilon if a client is left out, and if its data are replaced; None if infinite."""
    own = server.accountant
    if own is None:
        return {}
    found = {"epsilon": own.epsilon(), "epsilon_replace": own.epsilon(replace=True), "delta": own.delta}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


def covered(server: AnyServer) -> dict[str, float]:
    """How much of the model a veil covers: shares of the parameters' values, and of those that known ones reveal."""
    plan = server.plan
    return {**plan.shares, "revealed": plan.known.share} if plan is not None else {}


def train(
    config: Config,
    folder: Folder,
    *,
    resume: bool = False,
    on_round: Callback | None = None,
    data: Data | None = None,
) -> dict[str, Any]:
    """Run a configuration to its end; returns the summary that `fedveil train` prints.

    Everything that can be refused is refused before the folder is made.
    """
    home = Path(folder)
    data = data or load_data(config)
    config = settled(config, data)
    federation = federation_of(config, data)
    with locked(home):
        check_folder(home, config, resume)
        if resume and checkpoint.found_in(home):
            federation.resume(home)
            if RECORDS in federation.changed:
                what = "the data changed since the run here was trained on them"
                raise BadArgument(str(home), what, "restore the data, or start a run with another --out")
        write_whole(home / "config.json", json.dumps(config.nested(), indent=2) + "\n")
        if isinstance(data.train.inputs, Tensor):
            shapes = {"record": list(data.train.inputs.shape[1:]), "outputs": data.outputs, "classes": data.classes}
            write_whole(home / SHAPES, json.dumps(shapes) + "\n")
        return record_run(
            federation,
            home,
            data,
            config.flat(),
            f"fedveil train {config.flags()}",
            epochs=config.training.epochs,
            checkpoint_every=config.training.checkpoint_every,
            patience=config.training.patience,
            on_round=on_round,
        )


def record_run(
    server: Server,
    folder: Folder,
    data: Data,
    config: Mapping[str, Any],
    repeat: str,
    *,
    epochs: int = 1,
    rounds: int | None = None,
    resume: bool = False,
    evaluate_every: int | None = None,
    checkpoint_every: int | None = None,
    patience: int | None = None,
    on_round: Callback | None = None,
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
        resume: continue the run in the folder, if there is one; metrics.jsonl is cut back to its checkpoint.
        evaluate_every: rounds.
        checkpoint_every: rounds.
        patience: evaluations.
        on_round: called with each round's record.
    """
    folder, test = Path(folder), (data.test.inputs, data.test.targets)
    how: dict[str, Any] = {"rounds": rounds, "evaluate_every": evaluate_every, "checkpoint_every": checkpoint_every}
    with locked(folder):
        with Metrics(folder / "metrics.jsonl", server) as metrics:
            calls = [metrics.append, *([on_round] if on_round else [])]
            server.fit(epochs, test=test, folder=folder, resume=resume, patience=patience, on_round=calls, **how)
        summary = summary_of(server, folder, repeat, data)
        if server.stalled(patience):
            summary["stopped"] = f"early, after {patience} evaluations without a better one"
        write_whole(folder / "summary.json", to_json(summary, indent=2) + "\n")
        write(run_page(server, data, config, summary), folder / "report.html")
    return summary


def summary_of(server: Server, folder: Path, repeat: str, data: Data) -> dict[str, Any]:
    """How a run ended; for a standardised target also the root mean squared error in the target's own units."""
    history = server.history
    own = {}
    if data.target_scale is not None and "mse" in history.last:
        own["rmse"] = math.sqrt(history.last["mse"]) * data.target_scale[1]
    return {
        "folder": str(folder),
        "rounds": server.round,
        **{name: history.last[name] for name in METRICS if name in history.last},
        **own,
        "best": server.best[0] if server.best else None,
        "model": str(folder / MODEL),
        **({"best_model": str(folder / BEST)} if server.best else {}),
        **covered(server.defence_server),
        **spent(server.defence_server),
        "largest_error": max((record["error"] for record in history.records), default=0.0),
        "seconds": history.records[-1]["seconds"] if history.records else 0.0,
        "repeat": repeat,
    }
