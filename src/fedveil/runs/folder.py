"""The folder of a run: config.json, metrics.jsonl, the last and the best model, report.html and a checkpoint."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedveil.data import Data
from fedveil.errors import BadArgument
from fedveil.federation import checkpoint
from fedveil.federation.checkpoint import BEST, MODEL
from fedveil.federation.fitting import Callback
from fedveil.federation.local import Federation
from fedveil.federation.server import Server
from fedveil.federation.state import RECORDS, Folder
from fedveil.files import write_atomically
from fedveil.locks import lock_folder
from fedveil.plain_json import read_json, to_json
from fedveil.runs.build import build_federation, choose_loss, choose_settings, load_data, load_factory, named_model
from fedveil.runs.choices import applicable_values, chosen_keys, format_command
from fedveil.runs.results import MetricsFile, RunSummary, metrics_of, read_rounds, summarise
from fedveil.runs.settings import (
    SCHEMA,
    SECTION_OF,
    Config,
    Value,
    check_schema,
    configure,
    read_file,
    refuse_code,
)

SHAPES = "model.json"
RUN = (checkpoint.LAST, checkpoint.PREVIOUS, MODEL, "summary.json")  # a folder with any of these files contains a run


def contains_run(folder: Path) -> bool:
    """Return whether a folder contains a run or the beginning of one."""
    return any((folder / name).exists() for name in RUN)


def check_folder(folder: Path, config: Config, resume: bool) -> None:
    """Refuse a folder that contains a run, unless the run is to be resumed with the same configuration.

    A run that ended before its first checkpoint may be overwritten.
    """
    if not contains_run(folder):
        return
    if not resume:
        fix = "add --resume (resume=True in Python) to continue it, or choose another --out"
        raise BadArgument(str(folder), "this folder already contains a run", fix)
    old = read_config(folder, trust_code=True)  # it is only compared; nothing is built from it
    for name, value in applicable_values(config).items():
        if name != "epochs" and (before := old.flat()[name]) != value:
            flag = f"--{name.replace('_', '-')}"
            fix = f"leave out {flag} (only --epochs may be increased), or choose another --out"
            raise BadArgument(str(folder), f"the existing run has {name} = {before!r}, not {value!r}", fix)
    if config.training.epochs < (epochs := old.training.epochs):
        what = f"the existing run has {epochs} epochs, more than {config.training.epochs}"
        raise BadArgument(str(folder), what, f"use --epochs {epochs} or more; --patience stops a run early")


def read_config(folder: Folder, *, trust_code: bool = False, named_keys: Collection[str] = ()) -> Config:
    """Read the configuration of the run in a folder.

    Args:
        folder: folder of the run.
        trust_code: accept data, a model or a defence given as `package.module:name`. Building it imports that module,
            which runs its code; a folder from elsewhere may refer to any module.
        named_keys: keys for which the user has already given the same code.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        what, fix = "there is no config.json in this folder", "use a folder that `fedveil train` wrote"
        raise BadArgument(str(folder), what, fix)
    config = configure(read_file(path), str(path))
    if not trust_code:
        refuse_code(config.flat(), str(path), named_keys)
    return config


def is_finished(config: Config, folder: Path) -> bool:
    """Return whether the folder contains a finished run of this configuration with a valid checkpoint."""
    try:
        state = checkpoint.load(folder / checkpoint.LAST)
    except ValueError:  # a BadArgument is a ValueError
        return False
    if state["round"] != read_rounds(folder):
        return False
    found = read_config(folder, trust_code=True)
    values, given = found.flat(), config.given()
    wanted = config if config.training.loss else config.changed(loss=found.training.loss)
    if defaults := [key for key in chosen_keys(config) if key not in given]:
        wanted = wanted.changed(**{key: values[key] for key in defaults})
    return applicable_values(wanted).items() <= values.items()


def open_run(folder: Folder, data: Data | None = None, *, trust_code: bool = False) -> tuple[Config, Federation]:
    """Restore the federation of a run from its last checkpoint; see `read_config` for `trust_code`."""
    config = read_config(folder, trust_code=trust_code)
    return config, resume_federation(config, Path(folder), data or load_data(config))


def load_model(
    folder: Folder, *, best: bool = False, model: nn.Module | None = None, trust_code: bool = False
) -> nn.Module:
    """Return the model of a run, in evaluation mode, on the CPU.

    Args:
        folder: folder of the run.
        best: return the model from the best evaluation instead of the last one.
        model: load the values into this model instead of building one from the run's configuration. Required for
            folders without a configuration, as written by `Federation.fit` and by runs on Flower or FLARE.
        trust_code: build a model that the configuration gives as `package.module:name`. This imports the module, which
            runs its code.

    Raises:
        BadArgument: the file is missing or damaged, or belongs to another model.
    """
    home = Path(folder)
    path = home / (BEST if best else MODEL)
    try:
        values = load_file(path) if _is_newest(path) else _values_in_checkpoint(home, best)
        network = _architecture(home, trust_code) if model is None else model
        network.load_state_dict(values)
    except SafetensorError as error:
        fix = "use --resume to write it again from the checkpoint"
        raise BadArgument(str(path), f"is damaged: {error}", fix) from error
    except RuntimeError as error:
        what = f"its values belong to another model: {error}"
        raise BadArgument(str(path), what, "pass the right model: load_model(folder, model=...)") from error
    return network.eval()


def _is_newest(path: Path) -> bool:
    """Return whether a file of values exists and no checkpoint in its folder is from a later round."""
    last = checkpoint.read_tag(path.parent / checkpoint.LAST)
    return path.is_file() and (last is None or checkpoint.read_round(path) >= last.round)


def _values_in_checkpoint(folder: Path, best: bool) -> Mapping[str, Tensor]:
    """Return the model's values from the last valid checkpoint of a run."""
    path = folder / (BEST if best else MODEL)
    if not (found := checkpoint.found_in(folder)):
        here = "the run has no checkpoint yet" if folder.is_dir() else "there is no such folder"
        raise BadArgument(str(path), f"there is no model: {here}", "use the folder of a run")
    try:
        state = checkpoint.load(found[0])
    except checkpoint.Damaged:
        if len(found) == 1:
            raise
        state = checkpoint.load(found[1])
    if best and state["best"] is None:
        raise BadArgument(str(path), "there is no best model: the run was not evaluated", "call load_model(folder)")
    values: Mapping[str, Tensor] = state["best"][1] if best else state["model"]
    return values


def _architecture(folder: Path, trust_code: bool) -> nn.Module:
    """Build the network of a run, with new initial values."""
    if not (folder / "config.json").is_file():
        what = "there is no config.json, which specifies the network"
        raise BadArgument(str(folder), what, "pass the network: load_model(folder, model=...)")
    config = read_config(folder, trust_code=trust_code)
    if ":" in config.model.name:
        return load_factory(config.model.name)
    try:
        shapes = read_json(folder / SHAPES)
        check_schema(shapes, SHAPES)
        shape, outputs = torch.Size(shapes["record"]), int(shapes["outputs"])
    except (ValueError, KeyError, TypeError) as error:
        what = f"{SHAPES}, which contains the shape of records, cannot be read: {error}"
        raise BadArgument(str(folder), what, "pass the network: load_model(folder, model=...)") from error
    return named_model(config.model, shape, outputs)


def resume_federation(config: Config, folder: Path, data: Data) -> Federation:
    """Build the federation of a configuration and restore the last checkpoint in a folder."""
    federation = build_federation(config, data)
    federation.resume(folder)
    return federation


def train(
    config: Config, folder: Folder, *, resume: bool = False, on_round: Callback | None = None, data: Data | None = None
) -> RunSummary:
    """Train the federation of a configuration and write its folder, which is created only if all settings are valid."""
    home = Path(folder)
    data = data or load_data(config)
    config = choose_settings(choose_loss(config, data), len(data.train.targets))
    federation = build_federation(config, data)
    with lock_folder(home):
        check_folder(home, config, resume)
        if resume and checkpoint.found_in(home):
            federation.resume(home)
            if RECORDS in federation.changed:
                what = "the data have changed since this run was trained on them"
                raise BadArgument(str(home), what, "restore the data, or start a run with another --out")
        _write_config(home, config, data)
        return record_run(
            federation,
            home,
            data,
            config.flat(),
            f"fedveil train {format_command(config)}",
            epochs=config.training.epochs,
            checkpoint_every=config.training.checkpoint_every,
            patience=config.training.patience,
            validation=config.data.validation is not None,
            track_test=config.training.track_test,
            monitor=config.training.monitor,
            mode=config.training.mode,
            on_round=on_round,
        )


def _write_config(folder: Path, config: Config, data: Data) -> None:
    """Write the configuration, and the shape of a record, which is needed to build the library's networks."""
    sections: dict[str, dict[str, Value]] = {}
    for key, value in applicable_values(config).items():
        sections.setdefault(SECTION_OF[key], {})[key] = value
    write_atomically(folder / "config.json", json.dumps({"schema": SCHEMA, **sections}, indent=2) + "\n")
    if isinstance(data.train.inputs, Tensor):
        shapes = {"record": list(data.train.inputs.shape[1:]), "outputs": data.outputs, "classes": data.classes}
        write_atomically(folder / SHAPES, json.dumps({"schema": SCHEMA, **shapes}) + "\n")


def record_run(
    server: Server,
    folder: Folder,
    data: Data,
    config: Mapping[str, Value],
    repeat: str,
    *,
    epochs: int = 1,
    rounds: int | None = None,
    resume: bool = False,
    evaluate_every: int | None = None,
    checkpoint_every: int | None = None,
    patience: int | None = None,
    validation: bool = False,
    track_test: bool = False,
    monitor: str | None = None,
    mode: str | None = None,
    on_round: Callback | None = None,
) -> RunSummary:
    """Train with a server on any engine, write the run's folder and return the summary.

    Args:
        server: a new or resumed server.
        folder: folder of the run.
        data: data to evaluate on; the page also uses them.
        config: values to show on the page; must contain "clients" and "model".
        repeat: the command that repeats the run.
        epochs: see `Server.fit`.
        rounds: number of rounds, instead of epochs.
        resume: continue the run in the folder, if there is one; metrics.jsonl is truncated to the checkpoint's rounds.
        evaluate_every: number of rounds between evaluations.
        checkpoint_every: number of rounds between checkpoints.
        patience: number of evaluations without improvement after which to stop.
        validation: let the data's validation part choose the best model, not the test part.
        track_test: see `Server.fit`.
        monitor: see `Server.fit`.
        mode: see `Server.fit`.
        on_round: called with each round's record.
    """
    from fedveil.report import write  # imported here because only the end of a run needs it
    from fedveil.runs.page import run_page

    folder, test = Path(folder), (data.test.inputs, data.test.targets)
    chosen = data.validation if validation else None
    with lock_folder(folder):
        with MetricsFile(folder / "metrics.jsonl", server) as metrics:
            server.fit(
                epochs,
                rounds=rounds,
                test=test,
                validation=(chosen.inputs, chosen.targets) if chosen else None,
                track_test=track_test,
                metrics=metrics_of(data),
                monitor=monitor,
                mode=mode,
                folder=folder,
                resume=resume,
                evaluate_every=evaluate_every,
                checkpoint_every=checkpoint_every,
                patience=patience,
                on_round=[metrics.append, *([on_round] if on_round else [])],
                verbose=False,
            )
        summary = summarise(server, folder, repeat, data, patience)
        write_atomically(folder / "summary.json", to_json(summary.to_dict(), indent=2) + "\n")
        write(run_page(server, data, config, summary), folder / "report.html")
    return summary
