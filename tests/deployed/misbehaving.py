"""Clients that misbehave as the run's configuration says: the same faults for the test app of every engine."""

import os
import time
from pathlib import Path

from fedveil.federation.protocol import Request, read


def kind_of_fault(config, part, number):
    """The fault of a client in a round, of "part:round:kind ..."."""
    for word in str(config["faults"]).split():
        who, when, kind = word.split(":")
        if (int(who), int(when)) == (part, number):
            return kind
    return None


def wait_for_record(file, number):
    """Wait until the server has ended a round without this client; a fixed sleep would eat into the next round."""
    while len(file.read_text().splitlines()) <= number:
        time.sleep(0.1)


def before(config, part, sent):
    """What a client does before it answers the bytes of an ask; returns its fault, if that comes afterwards."""
    number = read(sent, Request).round
    if config["capture"]:
        (Path(config["capture"]) / f"{part}-{number}.ask").write_bytes(sent)
    if config["marks"]:
        (Path(config["marks"]) / f"{part}-{number}").write_text(str(os.getpid()))
    time.sleep(float(config["work"]))
    kind = kind_of_fault(config, part, number)
    if kind == "raise":
        raise RuntimeError("this client fails")
    if kind == "late":
        wait_for_record(Path(config["out"]) / "records.jsonl", number)
    return kind


def after(kind, reply):
    """The bytes of an answer as a client with this fault sends them."""
    return b"garbage" if kind == "garbage" else reply
