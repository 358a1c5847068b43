"""Mutated bytes into everything that reads bytes: Aborted or BadArgument, nothing else, and never a wrong sum."""

import json
import random

import numpy as np
import pytest
from tests.secagg.group import DIGEST, Group, reveal_all, settle_all, summed

from fedveil.errors import Aborted, BadArgument
from fedveil.secagg import Opening, Tally

MUTATIONS = 200
LENGTHS = (0, 1, 7, 8, 9, 64)


def mutated(data, rng):
    """One of a few kinds of damage."""
    data = bytearray(data)
    kind = rng.randrange(7)
    at = rng.randrange(len(data)) if data else 0
    if not data or kind == 0:
        return rng.randbytes(rng.choice(LENGTHS))
    if kind == 1:
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 2:
        del data[at:]
    elif kind == 3:
        data += rng.randbytes(rng.randrange(1, 100))
    elif kind == 4:
        data[at : at + 8] = rng.randbytes(8)
    elif kind == 5:
        data[:8] = rng.choice([0, 1, len(data), 2**20, 2**63, 2**64 - 1]).to_bytes(8, "little")
    else:
        return with_other_head(bytes(data), rng)
    return bytes(data)


NUMBERS = (None, True, -1, 1.5, 10**30, float("nan"))
ODD = (*NUMBERS, "", "x" * 64, "\ud800", "00" * 32, {}, [], ["c0", "c0"], ["c9"], ["\ud800"], [[]])


def with_other_head(data, rng):
    """A value of the head replaced, left out, or the whole head something else."""
    size = int.from_bytes(data[:8], "little")
    head, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    key = rng.choice(list(head))
    if rng.random() < 0.2:
        del head[key]
    else:
        head[key] = rng.choice(ODD)
    text = json.dumps(rng.choice([head, head, head, *ODD]) if rng.random() < 0.2 else head).encode()
    if rng.random() < 0.05:
        text = b"[" * 5000
    return len(text).to_bytes(8, "little") + text + body


@pytest.fixture(scope="module")
def recorded():
    """Every message of an attempt in which c3 vanishes, and what everyone remembers before each."""
    group = Group(4)
    opening, vectors = group.opening(), group.vectors()
    sent = group.uploads(opening, vectors)
    return group, opening, vectors, sent, group.snapshot()


def at_stage(recorded, stage):
    """A tally and clients just before a stage."""
    group, opening, _, sent, kept = recorded
    group.restore(kept)
    tally = Tally(opening, DIGEST, group.roster)
    for name in group.names[:3]:
        tally.take_upload(name, sent[name])
    if stage == "reveal":
        settle_all(group, tally)
    return group, tally


def survives(call, *arguments):
    """Whether a call accepts its arguments; anything but our own two errors is a bug."""
    try:
        call(*arguments)
    except (Aborted, BadArgument):
        return False
    return True


def finish(group, tally):
    """All that follows the uploads."""
    settle_all(group, tally, refused=[])
    reveal_all(group, tally, refused=[])
    return tally.total()


def ended(call):
    """The sum, or why there is none."""
    try:
        return call(), None
    except Aborted as error:
        return None, error.reason


def test_uploads(recorded):
    rng = random.Random(1)
    (group, opening, vectors, sent, kept), accepted = recorded, 0
    for _ in range(MUTATIONS):
        group.restore(kept)
        tally = Tally(opening, DIGEST, group.roster)
        for name in group.names:
            data = mutated(sent[name], rng) if name == "c1" else sent[name]
            accepted += survives(tally.take_upload, name, data) and name == "c1"
        total, reason = ended(lambda tally=tally: finish(group, tally))
        if total is None:
            assert reason in ("few", "sum", "share")
            continue
        changed = [i for i, value in enumerate(summed(vectors, tally.survivors)) if value != total[i]]
        assert 0 not in changed  # a flip elsewhere in masked words is poisoning by a client, which nobody can see
        assert not changed or "c1" in tally.survivors
    assert 0 < accepted < MUTATIONS


def test_settling(recorded):
    rng = random.Random(2)
    group, tally = at_stage(recorded, "settle")
    common, own = tally.settle()
    kept = group.snapshot()
    answer = group.parties["c0"].settle(common, own["c0"])
    for _ in range(MUTATIONS):
        group.restore(kept)
        survives(group.parties["c0"].settle, mutated(common, rng), own["c0"])
        group.restore(kept)
        survives(group.parties["c0"].settle, common, mutated(own["c0"], rng))
        survives(tally.take_settle_reply, "c0", mutated(answer, rng))
        tally._replies.clear()


def test_revealing(recorded):
    rng = random.Random(5)
    group, tally = at_stage(recorded, "reveal")
    message, kept = tally.reveal(), group.snapshot()
    for _ in range(MUTATIONS):
        survives(group.parties["c0"].reveal, mutated(message, rng))
        group.restore(kept)
    answers = {name: group.parties[name].reveal(message) for name in tally.survivors}
    exact = summed(recorded[2], tally.survivors)
    for _ in range(MUTATIONS):
        tally._revealed.clear()
        for name, data in answers.items():
            survives(tally.take_reveal_reply, name, mutated(data, rng) if name == "c0" else data)
        total, reason = ended(tally.total)
        assert reason in ("few", "share") or np.array_equal(total, exact)


def test_openings_from_values(recorded):
    rng = random.Random(6)
    told = recorded[1].values()
    assert Opening.from_values(json.loads(json.dumps(told))) == recorded[1]
    for _ in range(MUTATIONS):
        values = json.loads(json.dumps(told))
        place = rng.choice([values, values["roster"][0], values["roster"][3]])
        key = rng.choice(list(place))
        if rng.random() < 0.2:
            del place[key]
        else:
            place[key] = rng.choice(ODD)
        survives(Opening.from_values, rng.choice([values] * 5 + [*ODD]))


@pytest.mark.parametrize("wrong", [None, 1, "text", [], b"", bytearray(8), memoryview(b"12345678")])
def test_what_are_no_bytes(recorded, wrong):
    group, tally = at_stage(recorded, "settle")
    for call in (group.parties["c0"].settle, group.parties["c0"].reveal):
        assert not survives(call, wrong)
    assert not survives(tally.take_upload, "c3", wrong)
