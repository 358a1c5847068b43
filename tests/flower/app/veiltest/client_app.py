"""A client that answers, or misbehaves as the run's config says."""

from pathlib import Path

from flwr.app import Message
from flwr.clientapp import ClientApp
from tests.deployed.misbehaving import after, before
from tests.deployed.task import make_model, parts

from fedveil.flower import answer, cache_records
from fedveil.flower.wrapping import unwrap, wrap

app = ClientApp()


@app.train()
def train(message, context):
    part, config = int(context.node_config["partition-id"]), context.run_config
    kind = before(config, part, unwrap(message.content, "request")[0])
    ready = Path(config["out"]) / f"{part}.safetensors"
    reply = answer(message, context, make_model(config), lambda: cache_records(ready, lambda: parts()[part]))
    return Message(content=wrap(after(kind, unwrap(reply.content, "answer")[0])), reply_to=message)
