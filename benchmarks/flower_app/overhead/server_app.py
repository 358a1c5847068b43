"""Two servers on one grid take rounds in turn, so that both see the same machine."""

import json
import time
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedveil.flower import Server
from overhead.task import CLIENTS, make_model, records

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Seconds and bytes of each round; the first pair, in which data is prepared and workers start, is left out."""
    config = context.run_config
    net, out = str(config["net"]), Path(str(config["out"]))
    example, size = records(net, 0)[0][:2], {"mlp": 8192, "mlp-512": 512}.get(net, 64)
    whole = net != "mlp-512"
    servers = {
        name: Server(
            grid,
            make_model(net),
            example,
            name,
            torch.optim.Adam,
            batch_size=size,
            whole_shard=whole,
            wait_for=CLIENTS,
        )
        for name in ("plain", "veil")
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
