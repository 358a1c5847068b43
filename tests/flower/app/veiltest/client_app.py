"""A client that answers, or misbehaves as the run's config says."""

import dataclasses
import json
import os
import time
from pathlib import Path

import numpy as np
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

from fedveil.flower import answer, prepared
from fedveil.flower.wire import read_answer, read_ask, write_answer
from veiltest.task import images, make_model, parts

app = ClientApp()


def kind_of_fault(config, part, number):
    for word in str(config["faults"]).split():
        who, when, kind = word.split(":")
        if (int(who), int(when)) == (part, number):
            return kind
    return None


def changed(reply, message, change):
    return Message(content=write_answer(change(read_answer(reply.content))), reply_to=message)


def with_nan(found):
    arrays = {name: np.full_like(a, np.nan) if a.dtype.kind == "f" else a for name, a in found.arrays.items()}
    return dataclasses.replace(found, arrays=arrays)


@app.train()
def train(message, context):
    part, config = int(context.node_config["partition-id"]), context.run_config
    ask = read_ask(message.content)
    number = ask.round
    if config["capture"]:
        text = json.dumps(ask.values)
        np.savez(Path(config["capture"]) / f"{part}-{number}.npz", **ask.arrays, **{"values.json": np.array(text)})
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
