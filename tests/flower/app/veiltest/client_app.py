"""A client that answers, or misbehaves as the run's config says."""

import dataclasses
import os
import time
from pathlib import Path

import torch
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

from fedveil.federation.remote import Answer, Ask, read, write
from fedveil.flower import answer, prepared
from fedveil.flower.carry import unwrap, wrap
from veiltest.task import images, make_model, parts

app = ClientApp()


def kind_of_fault(config, part, number):
    for word in str(config["faults"]).split():
        who, when, kind = word.split(":")
        if (int(who), int(when)) == (part, number):
            return kind
    return None


def changed(reply, message, change):
    found = read(unwrap(reply.content, "answer"), Answer)
    return Message(content=wrap(write(change(found))), reply_to=message)


def with_nan(found):
    tensors = {name: t * torch.nan if t.is_floating_point() else t for name, t in found.tensors.items()}
    return dataclasses.replace(found, tensors=tensors)


@app.train()
def train(message, context):
    part, config = int(context.node_config["partition-id"]), context.run_config
    ask = read(unwrap(message.content, "ask"), Ask)
    number = ask.round
    if config["capture"]:
        (Path(config["capture"]) / f"{part}-{number}.ask").write_bytes(unwrap(message.content, "ask"))
    if config["marks"]:
        (Path(config["marks"]) / f"{part}-{number}").write_text(str(os.getpid()))
    time.sleep(float(config["work"]))
    kind = kind_of_fault(config, part, number)
    if kind == "raise":
        raise RuntimeError("this client fails")
    if kind == "crash":
        os._exit(1)
    if kind == "sleep":
        time.sleep(3600)
    if kind == "garbage":
        return Message(content=RecordDict(), reply_to=message)
    make = (lambda: parts()[part]) if config["net"] == "mlp" else (lambda: images(part))
    ready = Path(config["out"]) / f"{part}.safetensors"
    reply = answer(message, context, make_model(config), lambda: prepared(ready, make))
    if kind == "nan":
        return changed(reply, message, with_nan)
    if kind == "stale":
        return changed(reply, message, lambda found: dataclasses.replace(found, round=number - 1))
    return reply
