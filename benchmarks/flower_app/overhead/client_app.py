"""A client answers whichever defence asks."""

from functools import cache
from pathlib import Path

import torch
from benchmarks.in_turn import make_model, records
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor

from fedveil.flower import answer, prepared

app = ClientApp()


@cache
def loaded(net: str, part: int, ready: Path) -> tuple[Tensor, Tensor]:
    """Records that are ready on disk, and stay in memory if this process stays."""
    return prepared(ready, lambda: records(net, part))  # type: ignore[return-value]


@app.train()
def train(message: Message, context: Context) -> Message:
    """All of this client's records."""
    torch.set_num_threads(1)
    net, part = str(context.run_config["net"]), int(context.node_config["partition-id"])
    ready = Path(str(context.run_config["out"])) / f"{part}.safetensors"
    return answer(message, context, make_model(net), lambda: loaded(net, part, ready))
