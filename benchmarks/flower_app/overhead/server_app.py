"""Servers on one grid take rounds in turn, so that all see the same machine."""

import json
import time
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedveil.defences import Plain, Veil
from fedveil.flower import Server
from overhead.task import CLIENTS, make_model, records

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Seconds and bytes of each round; the first ones, in which data is prepared and workers start, are left out."""
    config = context.run_config
    net, out = str(config["net"]), Path(str(config["out"]))
    example, size = records(net, 0)[0][:2], {"mlp": 8192, "mlp-512": 512}.get(net, 64)
    servers = {
        name: Server(
            grid,
            make_model(net),
            example,
            defence,
            torch.optim.Adam,
            loss=str(config["loss"]),
            batch_size=size,
            whole_shard=net != "mlp-512",
            wait_for=CLIENTS,
        )
        for name, defence in {"plain": Plain(), "veil": Veil()}.items()
    }
    found: list[dict[str, Any]] = []
    for _ in range(int(config["pairs"]) + 1):
        pair = {}
        for name, server in servers.items():
            began = time.perf_counter()
            details = server.step().details
            pair[name] = {
                "seconds": time.perf_counter() - began,
                "answers": details["answers"],
                "down": details["bytes_down"],
                "up": details["bytes_up"],
            }
        found.append(pair)
    (out / "done.json").write_text(json.dumps(found[1:]))
