"""A client answers whichever defence asks."""

from functools import cache
from pathlib import Path

import torch
from benchmarks.in_turn import make_model, records
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor

from fedveil.flower import answer, cache_records

app = ClientApp()


@cache
def load_records(net: str, part: int, ready: Path) -> tuple[Tensor, Tensor]:
    """Load records from disk once per process: a simulation answers many messages in one."""
    return cache_records(ready, lambda: records(net, part))  # type: ignore[return-value]


@app.train()
def train(message: Message, context: Context) -> Message:
    """All of this client's records."""
    torch.set_num_threads(1)
    net, part = str(context.run_config["net"]), int(context.node_config["partition-id"])
    ready = Path(str(context.run_config["out"])) / f"{part}.safetensors"
    return answer(message, context, make_model(net), lambda: load_records(net, part, ready))
