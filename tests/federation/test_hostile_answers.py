"""Whatever a minority of clients sends, each answer is refused by name or harmless, and the round has a result."""

import math
import random
from dataclasses import replace

import pytest
import torch
from tests.asks import mutated, net, normed
from tests.oracle import built

from fedveil import Limits
from fedveil.defences import DBCL, PPDL, SPN, Plain, Private, Veil
from fedveil.defences.compression import Int8, TopK
from fedveil.defences.registry import find_codec, find_record
from fedveil.errors import FedveilError
from fedveil.federation.client import ClientSession
from fedveil.federation.limits import adapt_limits, aggregate
from fedveil.federation.protocol import Answer, Request, read, write
from fedveil.federation.remote import decode_answer
from fedveil.scheme.losses import find_loss

CLIENTS, WRONG = 7, 3  # in each round, that many send what was mutated
SIZES = (12, 8, 10, 9, 11, 10, 8)
DEFENCES = {
    "plain": (Plain, normed, "squared_error"),
    "plain, local training": (lambda: Plain(local_epochs=2, local_batch=4), normed, "squared_error"),
    "veil": (Veil, normed, "squared_error"),
    "veil, decoys": (Veil, net, "cross_entropy"),
    "ppdl": (lambda: PPDL(0.3), normed, "squared_error"),
    "dbcl": (DBCL, net, "squared_error"),
    "spn": (SPN, net, "squared_error"),
    "topk": (lambda: TopK(0.3), normed, "squared_error"),
    "int8": (Int8, normed, "squared_error"),
    "private veil": (lambda: Private(Veil(), 1.0, 0.0), net, "squared_error"),
}


def norm(tensors):
    return math.hypot(*[float(own.double().norm()) for own in tensors])


class Round:
    """One broadcast, and every client's honest answer to it."""

    def __init__(self, name):
        make, build, loss = DEFENCES[name]
        self.model, self.defence = built(build).float(), make()
        self.limits = adapt_limits(self.defence, Limits())
        draw = torch.Generator().manual_seed(0)
        data = [(torch.randn(n, 6, generator=draw), torch.randint(4, (n,), generator=draw)) for n in SIZES]
        self.round = self.defence.server(self.model, data[0][0][:2], find_loss(loss)).start_round(self.model)
        self.codec, inner = find_codec(self.defence), self.defence.base
        packed = self.codec.encode_broadcast(self.round.broadcast)
        options = {name: getattr(inner, name) for name in inner.remote_settings if getattr(inner, name) is not None}
        record = find_record(inner).name
        about = record, options, loss, find_loss(loss).settings()
        self.ask = Request("session", 0, "token", *about, True, 8, 0, {}, {}, *packed)
        ask = write(self.ask)  # each client unpacks its own
        self.honest = [ClientSession(built(build).float(), own, client=0).reply(ask) for own in data]
        moved = [self.step({client: data})[0] for client, data in enumerate(self.honest)]
        self.most = {kind: max(own[kind] for own in moved) for kind in moved[0]}

    def step(self, answers):
        """How far the round moves the model with a learning rate of 1, and who was refused."""
        replies, refused = [], set()
        for client, data in answers.items():
            try:
                replies.append(decode_answer(data, self.ask, self.codec, self.round, self.model, client, client)[0])
            except FedveilError:
                refused.add(client)
        result, judged = aggregate(self.round, replies, self.model, self.limits)
        assert result is not None
        before = dict(self.model.named_buffers())
        changes = {"parameters": list(result.gradients.values()), "buffers": [], "counters": []}
        for name, value in result.buffers.items():
            kind = "buffers" if value.is_floating_point() else "counters"
            changes[kind].append(value.double() - before[name].double())
        moved = {kind: norm(found) for kind, found in changes.items()}
        return moved, refused | set(judged)

    def check(self, mutations):
        """The first clients' answers mutated: only they are refused, and what counts is within the bounds."""
        answers = dict(enumerate(self.honest))
        for client, mutate in enumerate(mutations):
            answers[client] = mutate(answers[client])
        moved, refused = self.step(answers)
        assert refused <= set(range(len(mutations)))
        private = isinstance(self.defence, Private)
        for kind, length in moved.items():
            bound = 1.0 if private else Limits().norm_factor * self.most[kind]
            slack = 1e-3 * norm(self.model.buffers()) if kind == "buffers" else 0.0
            assert length <= bound * (1 + 1e-6) + slack, (kind, length, bound)
        return refused


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", DEFENCES)
def test_mutated_answers_are_refused_by_name_or_harmless(name, count):
    tried, refused, rounds = Round(name), 0, -(-count // WRONG)
    assert tried.step(dict(enumerate(tried.honest)))[1] == set()
    for number in range(rounds):
        chance = random.Random(f"{name} {number}")
        refused += len(tried.check([lambda old, chance=chance: mutated(old, chance)] * WRONG))
    assert rounds < refused < WRONG * rounds  # most mutations do harm, and some do none


@pytest.mark.parametrize("name", ["plain", "veil"])
def test_the_check_finds_what_limits_would_stop(name):
    tried = Round(name)
    tried.limits = Limits(norm_factor=None, max_share=1.0)

    def scaled(data):
        found = read(data, Answer)
        tensors = {name: own * 1e4 if own.is_floating_point() else own for name, own in found.tensors.items()}
        return write(replace(found, tensors=tensors))

    with pytest.raises(AssertionError, match="parameters"):
        tried.check([scaled])
