"""A run and its folder: config.json, metrics.jsonl, model.safetensors, report.html, and a checkpoint to go on from."""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from fedveil.data import Data, Part, split
from fedveil.defences import Defence, Private, Veil, innermost
from fedveil.errors import BadArgument
from fedveil.federation.evaluate import METRICS
from fedveil.federation.local import Federation, Record
from fedveil.federation.server import Server
from fedveil.runs.config import (
    Config,
    build_defence,
    build_loss,
    build_model,
    build_optimizer,
    build_schedule,
    configure,
    load_data,
)
from fedveil.runs.page import run_page


def client_parts(config: Config, data: Data) -> list[Part]:
    """Each client's records."""
    rows = split(data, config.clients, how=config.split, seed=config.seed, alpha=config.alpha, column=config.column)
    return [data.train.take(r) for r in rows]


def federation_of(config: Config, data: Data, defence: Defence | None = None) -> Federation:
    """The federation that a configuration describes, or with another defence, before its first round."""
    try:
        model = build_model(config, data).to(config.device)
    except RuntimeError as error:
        raise BadArgument("device", f"cannot use {config.device!r}: {error}", "--device cpu") from error
    return Federation(
        model,
        client_parts(config, data),
        defence or build_defence(config),
        build_optimizer(config),
        schedule=build_schedule(config),
        batch_size=config.batch_size,
        loss=build_loss(config),
        whole_shard=config.whole_shard,
        participation=config.participation,
        fuse=config.fuse,
        seed=config.seed,
    )


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    half = path.with_name(path.name + ".part")
    half.write_text(text)
    os.replace(half, path)


def save_model(path: Path, model: nn.Module) -> None:
    """The model's values as safetensors."""
    half = path.with_name(path.name + ".part")
    save_file({name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}, half)
    os.replace(half, path)


def prepare_folder(folder: Path, config: Config, resume: bool) -> None:
    """Make the folder; one that holds a run is only gone on with, and only with the same configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    known = folder / "config.json"
    own = dataclasses.asdict(config)
    if known.exists() and not resume:
        raise BadArgument(str(folder), "there is a run in this folder", "--resume to go on with it, or another --out")
    if known.exists():
        old = dataclasses.asdict(Config()) | json.loads(known.read_text())  # runs from before a value was there
        other = [name for name, value in own.items() if name != "epochs" and old.get(name) != value]
        if other:
            what = f"the run here has {other[0]} = {old.get(other[0])!r}, not {own[other[0]]!r}"
            raise BadArgument(str(folder), what, "resume with the same configuration (only epochs may grow)")
    write_text(known, json.dumps(own, indent=2) + "\n")


def read_config(folder: Path) -> Config:
    """The configuration of the run in a folder."""
    try:
        return configure(json.loads((folder / "config.json").read_text()), str(folder / "config.json"))
    except (OSError, json.JSONDecodeError) as error:
        raise BadArgument(str(folder), f"holds no run: {error}", "name a folder that `fedveil train` wrote") from error


def finished(config: Config, folder: Path) -> bool:
    """Whether the folder holds this run, and all of it."""
    if not (folder / "summary.json").exists() or not (folder / "checkpoint.pt").exists():
        return False
    return read_config(folder) == config


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
    """Run a configuration to its end; returns the summary that `fedveil train` prints."""
    prepare_folder(folder, config, resume)
    data = data or load_data(config)
    federation = federation_of(config, data)
    if resume and (folder / "checkpoint.pt").exists():
        federation.resume(folder)
    every = config.checkpoint_every or federation.rounds_per_epoch
    repeat = f"fedveil train {config.flags()} --out {folder}"
    values = dataclasses.asdict(config)
    return record_run(
        federation, folder, data, values, repeat, epochs=config.epochs, checkpoint_every=every, on_round=on_round
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
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record) for record in server.history.records]
    write_text(folder / "metrics.jsonl", "".join(line + "\n" for line in lines))
    with (folder / "metrics.jsonl").open("a", buffering=1) as metrics:

        def log(record: Record) -> None:
            metrics.write(json.dumps(record) + "\n")
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
    save_model(folder / "model.safetensors", server.model)
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
    write_text(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    run_page(folder / "report.html", server, data, config, summary)
    return summary
