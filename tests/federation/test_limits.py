"""What one client of a federation may do to a round, and what it may not."""

import dataclasses
import itertools

import pytest
import torch
from tests import asks
from tests.forms import records
from tests.oracle import built, worst
from tests.sessions import watch

from fedveil import Entropy, Federation, Limits
from fedveil.defences import DBCL, PPDL, SPN, Plain, Private, Veil
from fedveil.defences.plain import PlainUpdate
from fedveil.errors import BadArgument, Diverged, TooFewAnswers
from fedveil.federation.history import RoundRecord
from fedveil.federation.limits import AGGREGATORS, PAST_ROUNDS, bounded_shares
from fedveil.federation.local import LocalEngine
from fedveil.scheme import Update

CLIENTS = 5
DEFENCES = {"plain": Plain, "veil": lambda: Veil(entropy=Entropy.for_tests(1))}


def parts(count=CLIENTS, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(20, 6, generator=draw), torch.randn(20, 4, generator=draw)) for _ in range(count)]
    return [(inputs.to(dtype), targets.to(dtype)) for inputs, targets in pairs]


def net(dtype=torch.float32):
    return built(asks.net, dtype=dtype)


def normed(dtype=torch.float32):
    return built(asks.normed, dtype=dtype)


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1)


class Hostile(LocalEngine):
    """Client 0 sends what `alter` makes of its update, and claims `claim` records."""

    def __init__(self, clients, alter, claim=None):
        super().__init__(clients.client, clients.shards, clients.dtype, whole_shard=clients.whole_shard, fused=False)
        self.alter, self.claim = alter, claim

    def updates(self, broadcast, clients, number):
        first, *others = super().updates(broadcast, clients, number)
        return [self.alter(first), *others]

    def claim_records(self, client):
        return self.claim if self.claim and client == 0 else super().claim_records(client)


def hostile(alter=lambda update: update, *, defence="plain", limits=None, claim=None, build=net, data=None, **options):
    run = Federation(build(), data or parts(), DEFENCES[defence](), sgd, limits=limits, **options)
    run.use_engine(Hostile(run.clients, alter, claim))
    return run


def times(factor):
    """All gradients, or passes, times a factor."""

    def alter(update):
        name = "gradients" if isinstance(update, PlainUpdate) else "passes"
        return dataclasses.replace(update, **{name: {n: t * factor for n, t in getattr(update, name).items()}})

    return alter


def buffers(**values):
    def alter(update):
        return dataclasses.replace(update, buffers={**update.buffers, **{f"1.{n}": v for n, v in values.items()}})

    return alter


def values(model):
    return {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}


def honest(clients=range(CLIENTS), rounds=1, build=net, **options):
    run = Federation(build(), [parts()[k] for k in clients], "plain", sgd, fuse=False, **options)
    run.fit(rounds=rounds)
    return values(run.model)


@pytest.mark.parametrize("make", [Plain, Veil, lambda: PPDL(0.3), lambda: SPN(seed=1), lambda: DBCL(seed=1)])
@pytest.mark.parametrize("build", [net, normed])
def test_among_honest_clients_limits_change_nothing(make, build):
    data = parts(dtype=torch.float64)
    data = [(inputs, targets.argmax(1)) for inputs, targets in data]
    ours = Federation(build(torch.float64), data, make(), sgd, limits=Limits())
    theirs = Federation(build(torch.float64), data, make(), sgd, fuse=False)
    for run in (ours, theirs):
        run.fit(rounds=8)
    assert worst(values(ours.model), values(theirs.model)) < 1e-9
    assert not any("faults" in record or "capped" in record for record in ours.history.records)
    norms = ours.history.records[-1]
    assert norms["update_norm"] > 0
    assert ("buffer_norm" in norms) == (build is normed)


REFUSED = {
    **{f"gradient times {size:g}": (net, times(size)) for size in (1e4, 1e20, 1e25, 1e30, 1e38, torch.nan, torch.inf)},
    "mean": (normed, buffers(running_mean=torch.full((10,), -1000.0))),
    "variance": (normed, buffers(running_var=torch.full((10,), -1000.0))),
    "variance a little below 0": (normed, buffers(running_var=torch.full((10,), -1e-3))),
    "mean that overflows": (normed, buffers(running_mean=torch.full((10,), 3e38))),
    "counter": (normed, buffers(num_batches_tracked=torch.tensor(2**63 - 1))),
    "counter below 0": (normed, buffers(num_batches_tracked=torch.tensor(-(2**63)))),
}


@pytest.mark.parametrize("defence", DEFENCES)
@pytest.mark.parametrize("name", REFUSED)
def test_an_update_out_of_bounds_is_refused_by_name_and_the_round_goes_on(name, defence):
    build, alter = REFUSED[name]
    run = hostile(alter, defence=defence, limits=Limits(), build=build)
    run.fit(rounds=3)
    assert all(record["faults"][0].startswith("client 0: ") for record in run.history.records)
    assert worst(values(run.model), honest([1, 2, 3, 4], 3, build=build)) < 1e-4
    assert build is net or run.model[1].num_batches_tracked == 3


@pytest.mark.parametrize("defence", DEFENCES)
@pytest.mark.parametrize(
    "name", ["gradient times 10000", *(name for name, (build, _) in REFUSED.items() if build is normed)]
)
def test_without_limits_the_same_update_ruins_the_model(name, defence):
    build, alter = REFUSED[name]
    run = hostile(alter, defence=defence, build=build)
    run.fit(rounds=1)
    found, good = run.model.state_dict(), honest([1, 2, 3, 4], build=build)
    counter = found.get("1.num_batches_tracked", torch.tensor(1))
    assert worst({name: found[name] for name in good}, good) > 0.1 or counter > 1


@pytest.mark.parametrize("defence", DEFENCES)
def test_a_claim_of_records_counts_up_to_the_cap(defence):
    caps = {"none": {"max_share": 1.0}, "half": {}, "known": {"max_records": 20}, "own": {"max_records": {0: 20}}}
    share = {name: hostile(claim=10**12, defence=defence, limits=Limits(**cap)) for name, cap in caps.items()}
    for run in share.values():
        run.fit(rounds=1)
    alone = honest([0])
    assert worst(values(share["none"].model), alone) < 1e-5  # all of the mean
    for name in ("known", "own"):
        assert worst(values(share[name].model), honest()) < 1e-5
    start, rest, found = values(net()), honest([1, 2, 3, 4]), values(share["half"].model)
    mixed = {name: start[name] + ((alone[name] - start[name]) + (rest[name] - start[name])) / 2 for name in start}
    assert worst(found, mixed) < 1e-5
    assert all(share[name].history.records[0]["capped"] == [0] for name in ("half", "known", "own"))


def test_shares_add_up_and_none_is_above_the_cap():
    draw = torch.Generator().manual_seed(1)
    for _ in range(200):
        count = int(torch.randint(1, 9, (1,), generator=draw))
        records = (10 ** (12 * torch.rand(count, generator=draw, dtype=torch.float64))).long().add(1).tolist()
        most = float(torch.rand(1, generator=draw)) * 0.99 + 0.01
        shares = bounded_shares(records, most)
        assert sum(shares) == pytest.approx(1)
        assert max(shares) <= max(most, 1 / count) * (1 + 1e-12)
        pairs = sorted(zip(records, shares, strict=True))
        assert all(a[1] <= b[1] * (1 + 1e-12) for a, b in itertools.pairwise(pairs))
    assert bounded_shares([30, 10, 10], 0.9) == [0.6, 0.2, 0.2]


@pytest.mark.parametrize("defence", DEFENCES)
@pytest.mark.parametrize("aggregator", AGGREGATORS[1:])
def test_a_rule_stands_a_sign_flip_that_the_mean_does_not(aggregator, defence):
    run = hostile(times(-8.0), defence=defence, limits=Limits(aggregator))
    mean = hostile(times(-8.0), defence=defence, limits=Limits())
    for each in (run, mean):
        each.fit(rounds=1)
    start, good = values(net()), honest([1, 2, 3, 4])

    def along(model):
        return sum(float(((values(model)[n] - start[n]) * (good[n] - start[n])).sum()) for n in good)

    assert along(run.model) > 0 > along(mean.model)


def test_a_rule_protects_buffers_as_it_does_gradients():
    """A change below every bound, in one coordinate."""
    bad = buffers(running_mean=torch.tensor([0.5] + [0.0] * 9))
    runs = [hostile(bad, limits=Limits(rule), build=normed) for rule in ("mean", "median")]
    for run in runs:
        run.fit(rounds=1)
    good = [float(honest([k], build=normed)["1.running_mean"][0]) for k in (1, 2, 3, 4)]
    mean, median = (float(run.model[1].running_mean[0]) for run in runs)
    assert "faults" not in runs[0].history.records[0]
    assert min(good) <= median <= max(good) < mean


def test_the_bound_remembers_rounds_with_longer_gradients():
    """Near convergence a hard batch may be far longer than the median of its round; that is no reason to refuse it."""
    run, first = hostile(times(50.0), limits=Limits(norm_factor=3.0)), hostile(limits=Limits(norm_factor=3.0))
    first.fit(rounds=1)
    length = first.history.records[0].figures["update_norm"]

    def past(norm):
        return RoundRecord(1, 1.0, 0.0, 0.1, 0.0, figures={"update_norm": norm})

    run.history.records[:] = [past(30 * length)]
    run.fit(rounds=1)
    assert "faults" not in run.history.records[-1]
    run.history.records[1:] = [past(length)] * PAST_ROUNDS
    run.fit(rounds=2)
    assert run.history.records[-1]["faults"][0].startswith("client 0: refused: its gradient has norm")


def test_a_fixed_bound_holds_for_two_clients_too():
    run = hostile(times(1e6), limits=Limits(max_norm=100.0), data=parts(2))
    run.fit(rounds=1)
    assert run.history.records[0]["faults"]
    assert worst(values(run.model), honest([1])) < 1e-5


def test_refusals_count_towards_the_hostile_clients_a_rule_stands():
    run = hostile(times(1e30), limits=Limits("krum"))  # four are left, and krum against one needs five
    run.fit(rounds=1)
    assert run.history.records[0]["faults"]


def test_too_few_updates_end_the_run_with_their_names():
    run = hostile(times(1e30), limits=Limits("median", hostile=1, max_norm=1e-9))
    with pytest.raises(TooFewAnswers, match=r"client 0.*client 4"):
        run.fit(rounds=1)
    with pytest.raises(Diverged, match="NaN or infinity"):
        hostile(times(float("nan")), limits=Limits(), data=parts(1)).fit(rounds=1)


@pytest.mark.parametrize("inner", DEFENCES)
@pytest.mark.parametrize("size", [float("nan"), 1e30])
def test_with_privacy_the_round_goes_on_too_and_tells_no_norm(inner, size):
    run = Federation(net(), parts(), Private(DEFENCES[inner](), 1.0, 0.0), sgd, limits=Limits())
    run.use_engine(Hostile(run.clients, times(size)))
    run.fit(rounds=2)
    assert all(record["faults"][0].startswith("client 0: ") for record in run.history.records)
    assert not any("norm" in key for record in run.history.records for key in record)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"aggregator": "meen"}, "use 'mean'"),
        ({"hostile": -1}, "hostile must be an integer"),
        ({"max_share": 0.0}, "max_share must be above 0"),
        ({"max_norm": float("inf")}, "max_norm must be a finite number"),
        ({"norm_factor": 0.5}, "norm_factor must be at least 1"),
        ({"max_records": 0}, "max_records must be an integer"),
        ({"max_records": {3: 1.5}}, "max_records must be an integer"),
    ],
)
def test_limits_that_make_no_sense_are_refused(options, text):
    with pytest.raises(BadArgument, match=text):
        Limits(**options)


def test_what_cannot_be_combined_is_refused():
    with pytest.raises(BadArgument, match="differential privacy clips each update"):
        Federation(net(), parts(), Private(Plain(), 1.0, 0.0), sgd, limits=Limits("median"))
    with pytest.raises(BadArgument, match="krum with hostile=1 needs 5 clients"):
        Federation(net(), parts(4), "plain", sgd, limits=Limits("krum"))
    with pytest.raises(BadArgument, match="needs 5 clients in a round, got 2"):
        Federation(net(), parts(5), "plain", sgd, limits=Limits("median", hostile=2), participation=0.4)


def test_an_update_of_the_veil_keeps_its_secret_whatever_is_refused():
    seen, rounds = [], []
    run = hostile(times(1e30), defence="veil", limits=Limits())
    watch(run, rounds.append).step(lambda broadcast, updates: seen.extend(updates))
    assert isinstance(seen[0], Update)
    with pytest.raises(BadArgument, match="has been released"):
        rounds[0].recover(seen, [1.0] * len(seen))


def test_a_client_with_many_more_batches_than_the_others_is_not_refused():
    data = [(inputs.float() + 3, targets.float()) for inputs, targets in records((4, 4, 4, 400))]
    run = Federation(normed(), data, "plain", sgd, batch_size=4, whole_shard=True, limits=Limits(max_share=1.0))
    run.fit(rounds=3)
    assert not any("faults" in record for record in run.history.records)


def test_counters_grow_no_faster_than_the_median_allows():
    run = hostile(buffers(num_batches_tracked=torch.tensor(10**9)), limits=Limits(), build=normed)
    run.fit(rounds=1)
    assert run.model[1].num_batches_tracked == Limits().norm_factor
    assert "faults" not in run.history.records[0]


def test_a_rule_withstands_a_hostile_client_beside_an_honest_one_that_stands_out():
    """Refusing the honest one would leave a rule that is told to withstand nobody."""

    class Different(Hostile):
        def updates(self, broadcast, clients, number):
            first = super().updates(broadcast, clients, number)[0]
            return [times(factor)(first) for factor in (1.0, 1.0, 1.0, 20.0, -9.0)]

    run = Federation(net(), parts(), "plain", sgd, limits=Limits("trimmed-mean"))
    run.use_engine(Different(run.clients, lambda update: update))
    run.fit(rounds=1)
    assert worst(values(run.model), honest([0])) < 1e-5
