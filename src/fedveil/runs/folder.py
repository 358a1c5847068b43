"""The folder of a run: config.json, metrics.jsonl, the last and the best model, report.html and a checkpoint."""

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

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
from fedveil.federation.results import RunDetails, RunSummary, is_repeatable, read_rounds
from fedveil.federation.state import RECORDS, Folder
from fedveil.files import lock_folder, write_atomically
from fedveil.plain_json import SCHEMA
from fedveil.records.encoding import FILE, read_encoding
from fedveil.runs.build import build_federation, choose_loss, choose_settings, load_data, load_factory, named_model
from fedveil.runs.choices import applicable_values, dependent_keys, format_command
from fedveil.runs.settings import (
    SECTION_OF,
    Config,
    Value,
    configure,
    read_file,
    refuse_code,
)

if TYPE_CHECKING:
    from fedveil.federation.user_metrics import Metric

PASS_NETWORK = "pass the network: model=Net() in Python, --network my_package.module:Net on the command line"
RUN_FILES = (
    checkpoint.LAST,
    checkpoint.PREVIOUS,
    MODEL,
    "summary.json",
)  # a folder with any of these files contains a run


def contains_run(folder: Path) -> bool:
    """Return whether a folder contains a run or the beginning of one."""
    return any((folder / name).exists() for name in RUN_FILES)


def check_folder(folder: Path, config: Config, resume: bool) -> None:
    """Refuse a folder that contains a run, unless the run is to be resumed with the same configuration.

    A run that ended before its first checkpoint may be overwritten.
    """
    if not contains_run(folder):
        return
    if not resume:
        fix = "add --resume (resume=True in Python) to continue it, or choose another --out"
        raise BadArgument(str(folder), "this folder already contains a run", fix)
    existing_config = read_config(
        folder, trust_code=True
    )  # the configuration is only compared; nothing is built from it
    for name, value in applicable_values(config).items():
        if name != "epochs" and (existing_value := existing_config.flat()[name]) != value:
            flag = f"--{name.replace('_', '-')}"
            fix = f"leave out {flag} (only --epochs may be increased), or choose another --out"
            raise BadArgument(str(folder), f"the existing run has {name} = {existing_value!r}, not {value!r}", fix)
    if config.training.epochs < (epochs := existing_config.training.epochs):
        message = f"the existing run has {epochs} epochs, more than {config.training.epochs}"
        raise BadArgument(str(folder), message, f"use --epochs {epochs} or more; --patience stops a run early")


def read_config(folder: Folder, *, trust_code: bool = False, named_keys: Collection[str] = ()) -> Config:
    """Read the configuration of the run in a folder.

    Args:
        folder: folder of the run.
        trust_code: accept data, a model or a defence of the form `package.module:name`. Building it imports the module,
            which runs its code; a folder from another source may name any module.
        named_keys: keys that the user also gave on the command line, and whose code is therefore accepted.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        message, fix = "there is no config.json in this folder", "use a folder that `fedveil train` wrote"
        raise BadArgument(str(folder), message, fix)
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
    saved_config = read_config(folder, trust_code=True)
    values, explicit_values = saved_config.flat(), config.explicit_values()
    expected = config if config.training.loss else config.changed(loss=saved_config.training.loss)
    if defaults := [key for key in dependent_keys(config) if key not in explicit_values]:
        expected = expected.changed(**{key: values[key] for key in defaults})
    return applicable_values(expected).items() <= values.items()


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
        model: load the values into this model instead of building one. Required if a program started the run and
            its network cannot be built without arguments.
        trust_code: build a model that the folder names as `package.module:name`. This imports the module, which runs
            its code.

    Raises:
        BadArgument: the file is missing or damaged, or belongs to another model.
    """
    run_folder = Path(folder)
    path = run_folder / (BEST if best else MODEL)
    try:
        values = load_file(path) if _is_newest(path) else _values_in_checkpoint(run_folder, best)
        network = _build_network(run_folder, trust_code) if model is None else model
        network.load_state_dict(values)
    except SafetensorError as error:
        fix = "use --resume to write it again from the checkpoint"
        raise BadArgument(str(path), f"is damaged: {error}", fix) from error
    except RuntimeError as error:
        message = f"its values belong to another model: {error}"
        raise BadArgument(str(path), message, "pass the model of the run: load_model(folder, model=...)") from error
    return network.eval()


def _is_newest(path: Path) -> bool:
    """Return whether a file of values exists and no checkpoint in its folder is from a later round."""
    last_tag = checkpoint.read_tag(path.parent / checkpoint.LAST)
    return path.is_file() and (last_tag is None or checkpoint.read_round(path) >= last_tag.round)


def _values_in_checkpoint(folder: Path, best: bool) -> Mapping[str, Tensor]:
    """Return the model's values from the last valid checkpoint of a run."""
    path = folder / (BEST if best else MODEL)
    if not (checkpoints := checkpoint.list_checkpoints(folder)):
        reason = "the run has no checkpoint yet" if folder.is_dir() else "there is no such folder"
        raise BadArgument(str(path), f"there is no model: {reason}", "use the folder of a run")
    try:
        state = checkpoint.load(checkpoints[0])
    except checkpoint.DamagedCheckpoint:
        if len(checkpoints) == 1:
            raise
        state = checkpoint.load(checkpoints[1])
    if best and state["best"] is None:
        raise BadArgument(str(path), "there is no best model: the run was not evaluated", "leave out best=True")
    values: Mapping[str, Tensor] = state["best"][1] if best else state["model"]
    return values


def _build_network(folder: Path, trust_code: bool) -> nn.Module:
    """Build the network of a run with newly initialised parameters."""
    if not is_repeatable(folder):
        return _build_described_network(folder, trust_code)
    config = read_config(folder, trust_code=trust_code)
    if ":" in config.model.name:
        return load_factory(config.model.name)
    encoding = read_encoding(folder)
    tensor = (encoding.tensors or {}).get("inputs")
    if tensor is None or encoding.outputs is None:
        raise BadArgument(str(folder / FILE), "it does not contain the shapes of inputs and outputs", PASS_NETWORK)
    return named_model(config.model, torch.Size(tensor.shape), math.prod(encoding.outputs.shape))


def _build_described_network(folder: Path, trust_code: bool) -> nn.Module:
    """Build the network of a run that a program started, if its class can be built without arguments."""
    from fedveil.federation.description import DESCRIPTION, read_description

    if not (folder / DESCRIPTION).is_file():
        message = f"there is neither config.json nor {DESCRIPTION}, which specify the network"
        raise BadArgument(str(folder), message, PASS_NETWORK)
    description = read_description(folder)
    if (spec := description.factory) is None:
        message = f"the network is a {description.model.partition(':')[2]}, which cannot be built without arguments"
        raise BadArgument(str(folder), message, PASS_NETWORK)
    if not spec.startswith("fedveil.") and not trust_code:
        message = f"its network is {spec}, and importing this name runs the module's code"
        raise BadArgument(
            str(folder), message, f"{PASS_NETWORK}; or trust the folder with trust_code=True or --trust-code"
        )
    return load_factory(spec)


def resume_federation(config: Config, folder: Path, data: Data) -> Federation:
    """Build the federation of a configuration and restore the last checkpoint in a folder."""
    federation = build_federation(config, data)
    federation.resume(folder)
    return federation


def train(
    config: Config, folder: Folder, *, resume: bool = False, on_round: Callback | None = None, data: Data | None = None
) -> RunSummary:
    """Train the federation of a configuration and write the run's folder; if a setting is invalid, create no folder."""
    run_folder = Path(folder)
    data = data or load_data(config)
    config = choose_settings(choose_loss(config, data), len(data.train.targets))
    federation = build_federation(config, data)
    with lock_folder(run_folder):
        check_folder(run_folder, config, resume)
        if resume and checkpoint.list_checkpoints(run_folder):
            federation.resume(run_folder)
            if RECORDS in federation.changed:
                message = "the data have changed since this run was trained on them"
                raise BadArgument(str(run_folder), message, "restore the data, or start a run with another --out")
        _write_config(run_folder, config)
        validation_part = data.validation if config.data.validation is not None else None
        details = RunDetails(
            f"{data.name}, {config.model.name}",
            config.flat(),
            f"fedveil train {format_command(config)}",
            data.encoding,
        )
        federation.fit(
            config.training.epochs,
            test=(data.test.inputs, data.test.targets),
            validation=(validation_part.inputs, validation_part.targets) if validation_part else None,
            metrics=original_unit_metrics(data),
            folder=run_folder,
            checkpoint_every=config.training.checkpoint_every,
            patience=config.training.patience,
            track_test=config.training.track_test,
            monitor=config.training.monitor,
            mode=config.training.mode,
            on_round=on_round,
            details=details,
            verbose=False,
        )
    assert federation.summary is not None
    return federation.summary


def original_unit_metrics(data: Data) -> "dict[str, Metric]":
    """Return the mean absolute error in the original units, by name, if the target is standardised."""
    if data.target_scale is None:
        return {}
    scale = data.target_scale[1]
    return {"mae": lambda targets, predictions: (targets - predictions).double().abs().mean() * scale}


def _write_config(folder: Path, config: Config) -> None:
    """Write the values that apply to the run to config.json."""
    sections: dict[str, dict[str, Value]] = {}
    for key, value in applicable_values(config).items():
        sections.setdefault(SECTION_OF[key], {})[key] = value
    write_atomically(folder / "config.json", json.dumps({"schema": SCHEMA, **sections}, indent=2) + "\n")
