"""Whatever a minority of clients sends, each answer is refused by name or harmless, and the round has a result."""

import math

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from tests.asks import net, normed
from tests.mutations import MUTATIONS
from tests.oracle import built

from fedveil import Limits
from fedveil.defences import DBCL, PPDL, SPN, Plain, Private, Veil
from fedveil.defences.registry import find_codec, find_record
from fedveil.errors import FedveilError
from fedveil.federation.client import ClientSession
from fedveil.federation.limits import aggregate, limits_for
from fedveil.federation.protocol import Ask, read, write
from fedveil.federation.remote import decode_answer
from fedveil.scheme.losses import find_loss

CLIENTS, WRONG = 7, 3  # in each round, that many send what was mutated
SIZES = (12, 8, 10, 9, 11, 10, 8)


DEFENCES = {
    "plain": (Plain, normed, "squared_error"),
    "veil": (Veil, normed, "squared_error"),
    "veil, decoys": (Veil, net, "cross_entropy"),
    "ppdl": (lambda: PPDL(0.3), normed, "squared_error"),
    "dbcl": (DBCL, net, "squared_error"),
    "spn": (SPN, net, "squared_error"),
    "private veil": (lambda: Private(Veil(), 1.0, 0.0), net, "squared_error"),
}


class Round:
    """One broadcast, and every client's honest answer to it."""

    def __init__(self, name):
        make, build, loss = DEFENCES[name]
        self.model, self.defence = built(build).float(), make()
        self.limits = limits_for(self.defence, Limits())
        draw = torch.Generator().manual_seed(0)
        data = [(torch.randn(n, 6, generator=draw), torch.randint(4, (n,), generator=draw)) for n in SIZES]
        self.round = self.defence.server(self.model, data[0][0][:2], find_loss(loss)).start_round(self.model)
        self.codec, inner = find_codec(self.defence), self.defence.base
        packed = self.codec.encode_broadcast(self.round.broadcast)
        options = {name: getattr(inner, name) for name in inner.remote_settings}
        record = find_record(inner).name
        self.ask = Ask(
            "session", 0, "token", record, options, loss, find_loss(loss).settings(), True, 8, 0, {}, *packed
        )
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
        moved = {
            kind: math.sqrt(sum(float(t.double().square().sum()) for t in found)) for kind, found in changes.items()
        }
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
            slack = 1e-3 * math.sqrt(sum(float(b.double().square().sum()) for b in self.model.buffers()))
            assert length <= bound * (1 + 1e-6) + (slack if kind == "buffers" else 0.0), (kind, length, bound)
        return refused


def fuzz(name, rounds, again=True):
    tried = Round(name)
    assert tried.step(dict(enumerate(tried.honest)))[1] == set()

    @settings(
        max_examples=rounds, deadline=None, database=None, derandomize=again, suppress_health_check=list(HealthCheck)
    )
    @given(st.lists(MUTATIONS, min_size=WRONG, max_size=WRONG), st.data())
    def run(kinds, data):
        refused = tried.check([lambda old, kind=kind: kind(old, data.draw) for kind in kinds])
        event(f"{len(refused)} refused")

    run()


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", DEFENCES)
def test_mutated_answers_are_refused_by_name_or_harmless(name, count):
    fuzz(name, -(-count // WRONG), again=count == 200)


@pytest.mark.parametrize("name", ["plain", "veil"])
def test_the_check_finds_what_limits_would_stop(name):
    tried = Round(name)
    tried.limits = Limits(norm_factor=None, max_share=1.0)

    def scaled(data):
        from tests.mutations import Answer, _written

        found = read(data, Answer)
        return _written(found, tensors={n: t * 1e4 if t.is_floating_point() else t for n, t in found.tensors.items()})

    with pytest.raises(AssertionError, match="parameters"):
        tried.check([scaled])
