"""Clients that misbehave as the run's configuration says: the same faults for the test app of every engine."""

import dataclasses
import os
import time
from pathlib import Path

import torch

from fedveil.federation.protocol import Answer, Ask, read, write

FOR_EVER = 3600.0


def kind_of_fault(config, part, number):
    """The fault of a client in a round, of "part:round:kind ..."."""
    for word in str(config["faults"]).split():
        who, when, kind = word.split(":")
        if (int(who), int(when)) == (part, number):
            return kind
    return None


def before(config, part, sent):
    """What a client does before it answers the bytes of an ask; returns its fault, if that comes afterwards."""
    number = read(sent, Ask).round
    if config["capture"]:
        (Path(config["capture"]) / f"{part}-{number}.ask").write_bytes(sent)
    if config["marks"]:
        (Path(config["marks"]) / f"{part}-{number}").write_text(str(os.getpid()))
    time.sleep(float(config["work"]))
    kind = kind_of_fault(config, part, number)
    if kind == "raise":
        raise RuntimeError("this client fails")
    if kind == "crash":
        os._exit(1)
    if kind == "sleep":
        time.sleep(FOR_EVER)
    if kind == "late":
        time.sleep(float(config["late"]))
    return kind


def after(kind, reply):
    """The bytes of an answer as a client with this fault sends them."""
    if kind == "garbage":
        return b"garbage"
    if kind not in ("nan", "stale"):
        return reply
    found = read(reply, Answer)
    tensors = {name: t * torch.nan if t.is_floating_point() else t for name, t in found.tensors.items()}
    changes = {"nan": {"tensors": tensors}, "stale": {"round": found.round - 1}}
    return write(dataclasses.replace(found, **changes[kind]))
