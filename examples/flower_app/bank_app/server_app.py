"""The server app, which defines the model, its optimizer, its defence and its test data."""

import json
import shlex
from pathlib import Path

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from bank_app.task import make_model
from fedveil import Limits
from fedveil.data import load
from fedveil.defences import Veil
from fedveil.federation.progress import print_progress
from fedveil.federation.results import RunDetails
from fedveil.flower import Server

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, resuming from the last checkpoint if there is one, and write the run's folder."""
    config, out = context.run_config, Path(str(context.run_config["out"]))
    rounds, lr, decay = int(config["rounds"]), float(config["lr"]), float(config["weight-decay"])
    data = load(str(config["data"]), path=Path(str(config["path"])) if config["path"] else None)
    veil = Veil(int(config["groups"]), float(config["additive"]))
    server = Server(
        grid,
        make_model(config),
        data.test.inputs[:2],
        veil if config["defence"] == "veil" else str(config["defence"]),
        lambda p: torch.optim.Adam(p, lr, betas=(0.9, 0.99), weight_decay=decay),
        schedule=(
            (lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, rounds))
            if config["schedule"] == "cosine"
            else None
        ),
        loss="squared_error",
        whole_shard=bool(config["whole-shard"]),
        batch_size=int(config["batch-size"]),
        wait_for=int(config["wait-for"]),
        min_answers=int(config["min-answers"]),
        limits=Limits(str(config["aggregator"]), int(config["hostile"])),
        timeout=float(config["timeout"]),
        secure_aggregation=bool(config["secure-aggregation"]),
        patience=float(config["patience"]),
        attempts=int(config["attempts"]),
        seed=int(config["seed"]),
    )
    words = [f"{name}={json.dumps(value)}" for name, value in config.items()]
    repeat = shlex.join(["flwr", "run", ".", "--run-config", " ".join(words)])
    server.fit(
        rounds=rounds,
        test=(data.test.inputs, data.test.targets),
        folder=out,
        resume=True,
        on_round=print_progress(rounds),
        details=RunDetails(f"{config['data']}, mlp", config, repeat, data.encoding),
    )
