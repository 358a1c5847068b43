"""Faults of an answer as functions of its bytes, and what the server says to each: the same for every engine."""

import dataclasses
import json
import pickle

import torch

from fedveil.federation.protocol import Answer, read, write
from fedveil.wire import to_bytes


def altered(**changes):
    """The answer with other values; functions get the old one."""

    def change(data):
        found = read(data, Answer)
        new = {name: to(getattr(found, name)) if callable(to) else to for name, to in changes.items()}
        return write(dataclasses.replace(found, **new))

    return change


def tensors(change):
    """The answer with its first floating tensor changed."""

    def alter(found):
        name = next(n for n, t in found.items() if t.is_floating_point())
        return {**found, name: change(found[name].clone())}

    return altered(tensors=alter)


def head(text):
    """The answer with another head."""

    def change(old):
        size = int.from_bytes(old[:8], "little")
        found = json.loads(old[8 : 8 + size])
        found["__metadata__"]["fedveil"] = text(found["__metadata__"]["fedveil"]) if callable(text) else text
        new = json.dumps(found).encode()
        return len(new).to_bytes(8, "little") + new + old[8 + size :]

    return change


def first(tensor, value):
    tensor.view(-1)[0] = value
    return tensor


def without_first(found):
    return dict(list(found.items())[1:])


FAULTS = {
    "other format": (
        head(lambda h: h.replace(": 2", ": 9", 1)),
        "malformed: answer: expected 'answer' in format 2, got 'answer' in format 9",
    ),
    "other kind": (
        (lambda _: to_bytes("request", {}, {})),
        "malformed: answer: expected 'answer' in format 2, got 'request'",
    ),
    "no json": (head("{"), "malformed: answer: the message cannot be read: JSONDecodeError"),
    "no values": (head("{}"), "malformed: answer: the message cannot be read: KeyError"),
    "no fields": ((lambda _: to_bytes("answer", {}, {})), "malformed: answer: round must be int, got NoneType"),
    "garbage": ((lambda _: b"garbage"), "malformed: answer: the message cannot be read"),
    "cut off": ((lambda old: old[:-1]), "malformed: answer: the message cannot be read"),
    "too long": ((lambda old: old + b"0"), "malformed: answer: the message cannot be read"),
    "a pickle": ((lambda _: pickle.dumps([print])), "malformed: answer: the message cannot be read"),
    "no records": (altered(records=0), "malformed: answer: records must be from 1 to 2^53, got 0"),
    "yes records": (altered(records=True), "malformed: answer: records must be int, got bool"),
    "last round": (altered(round=-1), "stale: the answer belongs to another exchange, in round -1"),
    "other token": (altered(token="0" * 32), "stale: the answer belongs to another exchange, in round 0"),
    "other defence": (altered(defence="spn"), "stale: the answer belongs to another exchange"),
    "nan": (tensors(lambda t: first(t, torch.nan)), "not finite:"),
    "infinity": (tensors(lambda t: first(t, torch.inf)), "not finite:"),
    "other dtype": (tensors(torch.Tensor.float), "refused:"),
    "whole numbers": (tensors(torch.Tensor.long), "refused:"),
    "text": ((lambda old: old.replace(b"F64", b"STR")), "malformed:"),
    "other shape": (tensors(lambda t: t[..., :-1]), "refused:"),
    "missing": (altered(tensors=without_first), "refused:"),
    "no time": (altered(seconds=-1.0), "malformed: answer: seconds must be from 0"),
    "endless": (altered(seconds=float("inf")), "malformed: answer: seconds must be from 0"),
}
"""By name: the fault, and how the server's text for it begins."""
