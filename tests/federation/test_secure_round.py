"""Secure aggregation in a federation: the model of plain training, dropouts, refusals, what the server sees."""

import copy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from tests.engines import member
from tests.federation.secured import (
    NAMES,
    POLICY,
    SIZES,
    adam,
    floats,
    net,
    normed,
    parties,
    parts,
    plain_of,
    server_of,
)
from tests.oracle import built, worst
from tests.sessions import Session
from torch import nn

from fedveil import Entropy, Federation, Limits
from fedveil.defences import DBCL, PPDL, SPN, Plain, Private, Veil
from fedveil.errors import BadArgument, ModelMismatch, TooFewAnswers
from fedveil.federation.protocol import MaskedAnswer, Step, read
from fedveil.federation.sums import Packing, Sums, encode_words
from fedveil.models import mlp, resnet
from fedveil.secagg import Identity, Opening, Party, Roster
from fedveil.wire import read_kind


def one_process(defence, rounds=6, build=net, data=None, optimizer=adam, **options):
    options = {"loss": "squared_error", "batch_size": 8, **options}
    run = Federation(build(), data or parts(), defence, optimizer, **options)
    run.fit(rounds=rounds)
    return run


@pytest.mark.parametrize("build", [net, normed])
@pytest.mark.parametrize("loss", ["squared_error", "cross_entropy"])
@pytest.mark.parametrize("make", [Plain, Veil, lambda: large(3)])
def test_one_process_trains_the_model_of_plain_training(make, loss, build):
    summed = one_process(make(), build=build, loss=loss, secure_aggregation=True)
    plain = one_process("plain", build=build, loss=loss, fuse=False)
    assert worst(floats(summed.model), floats(plain.model)) < 1e-6
    assert all(record["records"] == sum(SIZES) for record in summed.history.records)


def large(groups, seed=1):
    """A veil with large noise, the same in every run of the tests."""
    return Veil(groups, additive=1e6, multiplicative=100.0, entropy=Entropy.for_tests(seed))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["mlp", "resnet8"])
@pytest.mark.parametrize("loss", ["squared_error", "cross_entropy"])
def test_fifty_rounds_with_large_noise(kind, loss, dtype):
    draw = torch.Generator().manual_seed(0)

    def build():
        return built(lambda: mlp(6, 4, hidden=10) if kind == "mlp" else resnet(8, 3, 4, norm="batch"), dtype=dtype)

    shape = (6,) if kind == "mlp" else (3, 8, 8)
    data = [(torch.randn(n, *shape, generator=draw).to(dtype), torch.randint(4, (n,), generator=draw)) for n in SIZES]

    def sgd(parameters):
        """Adam's first steps are signs of gradients: any rounding may flip an element near 0."""
        return torch.optim.SGD(parameters, 1e-2, momentum=0.9)

    options = {"loss": loss, "data": data, "build": build, "rounds": 50, "fuse": False, "optimizer": sgd}
    plain = floats(one_process("plain", **options).model)
    others = one_process(Plain(rounding=1), **options), one_process(large(2), **options)
    baseline = 1e-7 if dtype == torch.float64 else max(worst(floats(other.model), plain) for other in others)
    summed = one_process(large(2), secure_aggregation=True, **options)
    assert worst(floats(summed.model), plain) < 10 * baseline


def skipped(run):
    return [record["round"] for record in run.history.records if "skipped" in record]


@pytest.mark.parametrize(
    ("build", "loss", "make", "rounds"),
    [
        (net, "squared_error", lambda: large(2, 5), 60),
        *[
            pytest.param(build, loss, make, 200, marks=pytest.mark.slow)
            for build in (net, normed)
            for loss in ("squared_error", "cross_entropy")
            for make in (Veil, lambda: large(2))
        ],
    ],
)
def test_hardly_a_sum_wraps_around(build, loss, make, rounds):
    """None with the default veil; with the largest noise that is accepted, one in a hundred may."""
    run = one_process(make(), rounds=rounds, build=build, loss=loss, secure_aggregation=True)
    assert len(skipped(run)) <= (rounds // 100 if run.defence.noise.additive > 1 else 0)


@pytest.mark.parametrize("make", [lambda: one_process("veil", rounds=0, secure_aggregation=True), server_of])
def test_a_sum_that_wraps_around_is_noticed_and_the_next_round_has_headroom(make):
    run = make()
    run.rounds.sums.headroom = -60  # far too small for the first round
    before = copy.deepcopy(floats(run.model))
    run.fit(rounds=1)
    (record,) = run.history.records
    assert "rows wrapped around; the next round has 16 more bits of headroom" in record["skipped"]
    assert worst(floats(run.model), before) == 0
    run.fit(rounds=7)
    found = skipped(run)
    assert found == list(range(1, len(found) + 1))  # at first only
    assert len(found) <= 5
    assert run.history.records[-1]["fixed_point_error"] < 1e-6


@pytest.mark.parametrize("build", [net, normed])
@pytest.mark.parametrize("defence", ["plain", "veil"])
def test_rounds_over_an_engine_are_plain_ones(defence, build):
    server = server_of(defence, build=build)
    server.fit(rounds=4)
    assert worst(floats(server.model), plain_of(4, build=build)) < 1e-6
    first, *others = server.history.records
    assert (first["answers"], first["asked"], first["records"]) == (5, 5, sum(SIZES))
    assert first["exchanges"] == 4  # hello, upload, settle, reveal
    assert {record["exchanges"] for record in others} == {3}
    assert 0 < first["fixed_point_error"] < 1e-8


# the number of an ask: 0 hello, 1 upload, 2 settle, 3 reveal (4 if there was a second settle)
@pytest.mark.parametrize(("number", "clients"), [(1, (0, 1, 3, 4)), (2, (0, 1, 3, 4)), (3, (0, 1, 2, 3, 4))])
def test_a_member_that_vanishes_costs_no_repeat(number, clients):
    server = server_of("veil", {("site-2", number): lambda data: None})
    server.fit(rounds=1)
    (record,) = server.history.records
    assert (record["answers"], record.get("attempts", 1)) == (len(clients), 1)
    assert record["records"] == sum(SIZES[k] for k in clients)
    assert worst(floats(server.model), plain_of(1, clients)) < 1e-6


@pytest.mark.parametrize("number", [2, 3])
def test_two_that_vanish_make_the_round_repeat_but_never_after_the_reveal(number):
    server = server_of("veil", {(name, number): lambda data: None for name in NAMES[:2]})  # t = 4 of 5
    before = copy.deepcopy(floats(server.model))
    server.fit(rounds=1)
    (record,) = server.history.records
    if number == 3:
        assert "3 of 5 clients have revealed: at least 4" in record["skipped"]
        assert worst(floats(server.model), before) == 0
        server.fit(rounds=2)
    else:
        assert record["attempts"] == 2
        assert any("aborted: settle: 3 of 5 clients remain" in text for text in record["faults"])
    assert server.history.records[-1]["answers"] == 5
    assert worst(floats(server.model), plain_of(1)) < 1e-6


@pytest.mark.parametrize("data", [b"garbage", b""])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_garbage_costs_its_member_the_round(number, data):
    server = server_of("veil", {("site-2", number): lambda _: data})
    server.fit(rounds=2)
    first, second = server.history.records
    assert (first["answers"], second["answers"]) == (4, 5)
    assert any(text.startswith("client site-2: malformed") for text in first["faults"])


def test_a_member_that_lost_its_key_is_greeted_again():
    known = parties()
    server = server_of("veil", known=known)
    server.fit(rounds=1)
    again = Party(known["site-2"]._identity, known["site-2"]._roster, policy=POLICY)
    server.engine.transport.answers["site-2"] = member(net, parts()[2], 2, again)
    server.fit(rounds=3)
    assert [record["answers"] for record in server.history.records] == [5, 4, 5]  # its old key costs it one round


def test_a_client_without_an_identity_or_with_one_refuses_the_other_kind_of_server():
    server = server_of("veil", known={"site-0": None, **{n: p for n, p in parties().items() if n != "site-0"}})
    server.fit(rounds=1)
    (record,) = server.history.records
    assert record["answers"] == 4
    assert any("does not take part in secure aggregation" in text for text in record["faults"])
    with pytest.raises(TooFewAnswers, match="requires secure aggregation"):
        server_of("plain", attempts=1, secure_aggregation=False).fit(rounds=1)


def test_a_stranger_whom_the_servers_roster_has_stops_every_client():
    known = parties()
    stranger = Identity.new("site-4")
    others = {name: party._roster.public_key(name) for name, party in known.items()}
    wrong = Roster({**others, "site-4": stranger.public()})
    known["site-4"] = Party(stranger, wrong, policy=POLICY)
    server = server_of("veil", known=known, attempts=1, secure_aggregation=wrong)
    with pytest.raises(TooFewAnswers, match="fewer than 3 valid replies after 1 attempt") as caught:
        server.fit(rounds=1)
    assert str(caught.value).count("the key of site-4 is not signed by site-4") == 4


def test_members_that_stay_away_cost_nothing_while_enough_are_left():
    server = server_of("veil")
    server.fit(rounds=1)
    for down, rounds in (({"site-2"}, 2), ({"site-2", "site-3"}, 3), (set(), 4)):
        server.engine.transport.down = down
        server.fit(rounds=rounds)
    assert [record["answers"] for record in server.history.records] == [5, 4, 3, 5]  # three of a roster of four
    assert [record["exchanges"] for record in server.history.records] == [4, 3, 3, 3]
    server.engine.transport.down = {"site-1", "site-2", "site-3"}
    with pytest.raises(TooFewAnswers, match="2 clients are present, but secure aggregation needs at least 3"):
        server.fit(rounds=5)


def test_a_fraction_of_the_members_is_a_roster():
    server = server_of("veil", participation=0.8)
    server.fit(rounds=4)
    assert [(record["answers"], "faults" in record) for record in server.history.records] == [(4, False)] * 4


@pytest.mark.parametrize(
    ("defence", "options", "text"),
    [
        (PPDL(0.3), {}, "ppdl is not linear"),
        (DBCL(), {}, "dbcl is not linear"),
        (SPN(), {}, "SPN .* is not linear"),
        (Private(Veil(), 1.0, 1.0), {}, "differential privacy clips recovered gradients, but veil"),
        (Private(type("Doubled", (Plain,), {})(), 1.0, 0.0), {}, "differential privacy clips recovered gradients"),
        (Veil(multiplicative=1e4), {}, "leave too few digits"),
        ("veil", {"limits": Limits("median")}, "limits and aggregation rules need individual updates"),
    ],
)
def test_what_needs_single_updates_is_refused(defence, options, text):
    for start in (partial(one_process, secure_aggregation=True), server_of):
        with pytest.raises(BadArgument, match=text):
            start(defence, **options)


def averaging():
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, momentum=None), nn.Linear(5, 4)).double()


@pytest.mark.parametrize(
    ("options", "text"),
    [({"data": parts((10, 10))}, "at least 3"), ({"build": averaging}, r"1 averages over all batches \(momentum=N")],
)
def test_what_one_process_cannot_sum_is_refused(options, text):
    with pytest.raises(BadArgument, match=text):
        one_process("veil", secure_aggregation=True, **options)


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_private_plain_training_clips_on_the_clients_and_counts_each_of_them_once(noise):
    def private():
        return Private(Plain(), 0.05, noise, entropy=Entropy.for_tests(3))

    summed = one_process(private(), rounds=3, secure_aggregation=True)
    trusted = one_process(private(), rounds=3)
    assert worst(floats(summed.model), floats(trusted.model)) < 1e-6
    spent = [[record.get("epsilon") for record in run.history.records] for run in (summed, trusted)]
    assert spent[0] == spent[1]
    server = server_of(Private(Plain(), 0.05, 0.0))
    server.fit(rounds=3)
    whole = one_process(private(), rounds=3, whole_shard=True) if not noise else None
    assert whole is None or worst(floats(server.model), floats(whole.model)) < 1e-6
    assert server.defence_server.accountant.rounds == 3


@pytest.mark.parametrize(("absent", "records"), [(0, None), (2, None), (3, None), (1, -8), (1, 2**40)])
def test_no_client_counts_more_than_the_clip_whoever_contributes_nothing(absent, records):
    """The sum is divided by the members, not by a word that clients choose."""
    model, clip = nn.Linear(4, 2, bias=False).double(), 1.0
    session = Session(Private(Plain(), clip, 0.0), model, torch.zeros(2, 4).double())
    session.broadcast()
    sums = Sums(session.defence, session.client, model, torch.zeros(2, 4).double())
    hellos = tuple(party.hello("a run") for party in list(parties().values())[:4])
    opening = Opening("a run", 0, 0, hellos, *sums.layout(session.round, len(hellos)))
    long, none = torch.full((2, 4), 5.0).double(), torch.full((2, 4), torch.nan).double()
    updates = [long, *[torch.zeros(2, 4).double()] * (3 - absent), *[none] * absent]
    words = [encode_words({"gradient/weight": own}, 50, opening, clip) for own in updates]
    if records is not None:
        words[3][1] = records % 2**64
    mean = sums.aggregate(session.round, np.sum(words, 0), opening).gradients["weight"]
    assert 4 * float(mean.norm()) == pytest.approx(clip, rel=1e-9)


class Boastful(Party):
    """Says that it has more records than there are."""

    def upload(self, ticket, words):
        words = words.copy()
        words[1] = 2**63
        return super().upload(ticket, words)


def test_a_client_that_spoils_the_sum_costs_rounds_and_not_the_run():
    server = server_of("veil", known=parties(kinds={"site-2": Boastful}))
    before = copy.deepcopy(floats(server.model))
    server.fit(rounds=2)
    assert all("expected a total of 1 to 2^53" in record["skipped"] for record in server.history.records)
    assert worst(floats(server.model), before) == 0


def test_what_the_server_receives_holds_no_update_and_no_number_of_records(monkeypatch):
    """The words of a client are uniform without its seeds; here: no plain answer, no count, nothing repeated."""
    server, seen = server_of("plain"), []
    ask = server.engine.transport.ask

    def tapped(common, own, **options):
        for name, data in ask(common, own, **options):
            seen.append(data)
            yield name, data

    monkeypatch.setattr(server.engine.transport, "ask", tapped)
    server.fit(rounds=2)
    uploads = [read(data, MaskedAnswer) for data in seen if read_kind(data) == "maskedanswer"]
    assert all(set(vars(masked)) == {"round", "token", "defence", "tensors"} for masked in uploads)
    assert len({masked.tensors["upload"].numpy().tobytes()[-4096:] for masked in uploads}) == len(uploads) == 10
    steps = [read(data, Step).step for data in seen if read_kind(data) != "maskedanswer"]
    assert set(steps) == {"hello", "settle", "reveal"}


def test_words_and_back():
    draw = torch.Generator().manual_seed(1)
    update = {
        "passes/w": torch.randn(3, 4, 5, generator=draw).double() * torch.tensor([1.0, 1e6, 1e-6]).view(3, 1, 1),
        "buffer/mean": torch.randn(5, generator=draw).float(),
        "buffer/count": torch.tensor(7),
    }
    packing = Packing.from_tensors(update)
    assert packing.rows == (1, 5, 20, 20, 20)
    largest = update["passes/w"].abs().flatten(1).amax(1).tolist()
    sizes = {"passes/w": largest, "buffer/mean": [3.0], "buffer/count": [7.0]}
    hello = parties()["site-0"].hello("a run")
    exponents, counts = packing.choose_exponents(sizes, 100, 0), (3, 11, 50, 36)
    opening = Opening("a run", 0, 0, (hello,) * 4, exponents, packing.rows, True)
    with np.errstate(over="ignore"):
        total = sum((packing.pack(update, n, opening) for n in counts), np.zeros(opening.size, np.uint64))
    records, mean = packing.unpack(total, opening)
    assert records == 100
    rounding = packing.bound_rounding(opening.exponents, 4, records)
    for row in range(3):
        error = (mean["passes/w"][row] - update["passes/w"][row]).abs().max()
        assert error <= rounding["passes/w"][row] + 2**-52 * update["passes/w"][row].abs().max()
    assert torch.equal(mean["buffer/count"], update["buffer/count"])
    assert mean["buffer/mean"].dtype == torch.float32
    with pytest.raises(ModelMismatch, match="the server expects 4 rows, but this client's update has 5"):
        packing.pack(update, 3, replace(opening, rows=packing.rows[:-1]))
    for wrong in (float("nan"), float("inf")):
        spoilt = {**update, "buffer/mean": torch.full((5,), wrong)}
        assert packing.pack(spoilt, 3, opening).tolist() == [1] + [0] * (opening.size - 1)
