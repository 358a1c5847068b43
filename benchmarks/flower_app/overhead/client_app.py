"""A client answers whichever defence asks."""

from pathlib import Path

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedveil.flower import answer, prepared
from overhead.task import make_model, records

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """All of this client's records, which are ready on its disk."""
    torch.set_num_threads(1)
    net, part = str(context.run_config["net"]), int(context.node_config["partition-id"])
    ready = Path(str(context.run_config["out"])) / f"{part}.safetensors"
    return answer(message, context, make_model(net), lambda: prepared(ready, lambda: records(net, part)))
