"""What hostile clients do to a mean, in closed form; under a veil it is the same, since lifting the noise is linear."""

import math
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.sessions import Session
from torch import nn

from fedveil.attacks.poisoning import (
    ATTACKS,
    CLAIMED,
    Attack,
    Poisoned,
    Sight,
    below_bound,
    broken_buffers,
    deviations,
    inner_product,
    little_is_enough,
    overflow,
    poisoned,
    scaled_noise,
    sent,
    sign_flip,
    times,
)
from fedveil.data import load, split
from fedveil.defences import Samples
from fedveil.defences.registry import build
from fedveil.errors import BadArgument
from fedveil.federation import Federation, Limits
from fedveil.models import mlp

counts = st.tuples(st.integers(2, 9), st.integers(1, 4)).filter(lambda pair: pair[1] < pair[0])


def sight_of(honest, hostile, seed=0, dtype=torch.float64):
    """So many honest clients with random tensors, and one of so many hostile ones."""
    chance = torch.Generator().manual_seed(seed)
    shapes = {"weight": (3, 4), "bias": (5,)}
    every = [
        {name: torch.randn(shape, generator=chance).to(dtype) for name, shape in shapes.items()}
        for _ in range(honest + 1)
    ]
    return Sight(every[0], every[1:], hostile, 3.0, chance)


def flat(tensors):
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


def mean_of_all(sight, crafted):
    rows = [flat(one) for one in sight.honest] + [flat(crafted)] * sight.hostile
    return torch.stack(rows).mean(0)


@hypothesis_settings(max_examples=15)
@given(counts)
def test_inner_products_turn_the_mean_round_exactly_above_the_paper_s_threshold(pair):
    honest, hostile = pair
    sight = sight_of(honest, hostile)
    true = flat(sight.mean())
    near = {"rtol": 0, "atol": 1e-12}
    everyone = honest + hostile
    torch.testing.assert_close(mean_of_all(sight, inner_product(sight)), -true * honest / everyone, **near)
    for factor in (0.5, honest / hostile - 0.1, honest / hostile + 0.1):
        found = mean_of_all(sight, inner_product(sight, factor))
        torch.testing.assert_close(found, true * (honest - factor * hostile) / everyone, **near)
        assert (float(found @ true) < 0) == (factor > honest / hostile)


@pytest.mark.parametrize(("clients", "hostile", "z"), [(50, 24, 1.75), (5, 1, 0.25), (7, 2, 0.57), (5, 3, 0.0)])
def test_a_little_is_enough_takes_its_z_from_the_normal_quantile(clients, hostile, z):
    assert deviations(clients, hostile) == pytest.approx(z, abs=5e-3)


def test_a_little_is_enough_hides_among_as_many_honest_clients_as_the_paper_wants():
    honest, hostile = 2600, 2400  # 1.75 deviations: s = 101 of the honest should lie farther out, in each coordinate
    sight = sight_of(honest, hostile)
    found = flat(little_is_enough(sight))
    z, true, spread = deviations(5000, hostile), flat(sight.mean()), torch.stack([flat(o) for o in sight.honest]).std(0)
    torch.testing.assert_close(found, true - z * spread, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        mean_of_all(sight, little_is_enough(sight)), true - 0.48 * z * spread, rtol=0, atol=1e-12
    )
    beyond = torch.stack([flat(one) < found for one in sight.honest]).double().mean()
    wanted = NormalDist().cdf(-z)
    assert abs(float(beyond) - wanted) < 4 * math.sqrt(wanted * (1 - wanted) / (honest * len(found)))  # 4 deviations


def test_a_flipped_sign_cancels_one_honest_client():
    sight = sight_of(4, 1)
    same = Sight(sight.honest[0], sight.honest, 1, sight.bound, sight.chance)
    rest = torch.stack([flat(one) for one in sight.honest[1:]]).sum(0) / 5
    torch.testing.assert_close(mean_of_all(same, sign_flip(same)), rest, rtol=0, atol=1e-12)


def test_scaled_noise_is_long_and_points_anywhere():
    sight = sight_of(4, 1)
    first, second = flat(scaled_noise(sight)), flat(scaled_noise(sight))
    assert float(first.norm() / flat(sight.mean()).norm()) == pytest.approx(1e4)
    assert abs(float(torch.cosine_similarity(first, second, dim=0))) < 0.97  # 4 deviations of 17 numbers: 4 / sqrt(17)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_overflow_is_finite_until_it_is_summed_or_squared(dtype):
    sight = sight_of(4, 1, dtype=dtype)
    large, root = flat(overflow(sight)), flat(overflow(sight, squares=True))
    assert large.isfinite().all()
    assert root.isfinite().all()
    assert torch.stack([large] * 40).sum(0).isinf().all()
    assert root.square().isinf().all()
    assert torch.stack([root] * 40).sum(0).isfinite().all()
    if dtype == torch.float32:
        assert float(large[0]) == pytest.approx(1e37, rel=0.03)
        assert float(root[0]) == pytest.approx(1e20, rel=0.03)


def test_below_the_bound_is_nearly_as_long_as_may_be_and_points_back():
    sight = sight_of(4, 1)
    found, true = flat(below_bound(sight)), flat(sight.mean())
    assert float(found.norm()) == pytest.approx(0.9 * sight.bound)
    assert float(torch.cosine_similarity(found, true, dim=0)) == pytest.approx(-1)


def test_buffers_are_broken_by_their_dtype():
    found = broken_buffers({"mean": torch.zeros(2), "count": torch.tensor(3)})
    assert found["mean"].tolist() == [-1000, -1000]
    assert int(found["count"]) == 2**63 - 1


def lifted(defence_name, loss, attack):
    """An honest client's gradient and that of the same client's attacked upload, once the noise is removed."""
    torch.manual_seed(0)
    model, inputs = mlp(6, 3, hidden=5).double(), torch.randn(40, 6, dtype=torch.float64)
    targets = torch.nn.functional.one_hot(inputs[:, :3].argmax(1), 3).double()
    defence = Session(build(defence_name), model, inputs[:2], loss)
    broadcast = defence.broadcast()
    uploads = [defence.step(broadcast, Samples(inputs[k::4], targets[k::4])) for k in range(4)]
    honest = [sent(upload) for upload in uploads[:3]]
    bad = poisoned(attack, uploads[3], Sight(sent(uploads[3]), honest, 1, 1.0, torch.Generator()))
    return [one.gradients for one in defence.recover_each([*uploads, bad])]


@pytest.mark.parametrize("loss", ["squared_error", "cross_entropy"])
@pytest.mark.parametrize("defence", ["plain", "veil"])
def test_multiples_and_means_of_uploads_are_those_of_the_gradients(defence, loss):
    *others, own, flipped = lifted(defence, loss, ATTACKS["sign-flip"])
    *_, turned = lifted("plain", loss, ATTACKS["inner-product"])
    *_, veiled = lifted(defence, loss, ATTACKS["inner-product"])
    mean = torch.stack([flat(one) for one in others]).mean(0)
    near = {"rtol": 0, "atol": 1e-9 * float(flat(own).norm())}  # what is promised of a recovery in float64
    torch.testing.assert_close(flat(flipped), -flat(own), **near)
    torch.testing.assert_close(flat(veiled), flat(turned), rtol=0, atol=6 * near["atol"])  # its factor is 6
    torch.testing.assert_close(flat(turned), -6 * mean, rtol=0, atol=6 * near["atol"])


def test_uploads_of_another_kind_are_refused():
    with pytest.raises(BadArgument, match="int has neither gradients nor passes"):
        sent(3)


DATA = load("digits")
PARTS = [(DATA.train.inputs[rows], DATA.train.targets[rows]) for rows in split(DATA, 5)]
TEST = DATA.test.inputs, DATA.test.targets


def adam(parameters):
    return torch.optim.Adam(parameters, 1e-2)


def federation(attack="sign-flip", defence="plain", hostile=1, model=None, seed=0, **settings):
    torch.manual_seed(seed)
    model, settings = model or mlp(64, 10), {"loss": "squared_error", **settings}
    return Poisoned(model, PARTS, defence, adam, attack=ATTACKS[attack], hostile=hostile, seed=seed, **settings)


def test_without_hostile_clients_it_is_the_same_federation():
    torch.manual_seed(0)
    plain, same = Federation(mlp(64, 10), PARTS, "plain", adam, loss="squared_error", fuse=False), federation(hostile=0)
    for one in (plain, same):
        one.fit(rounds=3)
    for a, b in zip(plain.model.parameters(), same.model.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(BadArgument, match="5 of 5 clients are hostile"):
        federation(hostile=5)


@pytest.mark.parametrize("defence", ["plain", "veil"])
def test_only_the_hostile_clients_uploads_change(defence):
    caught, one = [], federation("overflow", defence, hostile=2, limits=Limits())
    one.step(lambda _, uploads: caught.extend(uploads))
    assert [bool((flat(sent(upload)) > 1e36).all()) for upload in caught] == [False] * 3 + [True] * 2


def faults(one):
    return [fault for record in one.history.records for fault in record.get("faults", [])]


@pytest.mark.parametrize("factor", [10.0, 3.0])
@pytest.mark.parametrize("defence", ["plain", "veil"])
def test_who_knows_the_bound_stays_below_it(defence, factor):
    one = federation("below-bound", defence, limits=Limits(norm_factor=factor))
    one.fit(rounds=6)
    assert not faults(one)


def test_a_little_longer_is_refused():
    one = federation(limits=Limits())
    one.attack = Attack("above the bound", lambda sight: times(1.01 / 0.9, below_bound(sight)))
    one.fit(rounds=6)
    assert len(faults(one)) == 6


def shares(limits):
    """How the last client counts in the mean of a round, by what it claims."""
    hostile = federation("records", limits=limits)
    caught = []
    found = hostile.step(lambda _, uploads: caught.extend(uploads))
    rows = torch.stack([flat(upload.gradients) for upload in caught]).double()
    return torch.linalg.lstsq(rows.T, flat(found.gradients).double()).solution


def test_a_claim_takes_the_whole_mean_or_what_its_cap_lets_it():
    assert federation("records").claims(4) == CLAIMED
    assert federation("records").claims(3) == 287
    rounding = 1e-4  # float32 gradients, and rows that are far from parallel
    assert float(shares(None)[4]) == pytest.approx(1, abs=rounding)
    assert float(shares(Limits())[4]) == pytest.approx(0.5, abs=rounding)
    known = Limits(max_records=288)
    assert float(shares(known)[4]) == pytest.approx(288 / (1437 + 1), abs=1e-3)


class Normed(nn.Sequential):
    """A network with statistics."""

    def __init__(self):
        super().__init__(nn.Linear(64, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 10))


@pytest.mark.parametrize("defence", ["plain", "veil"])
def test_broken_statistics_are_refused_by_default_and_harm_without_limits(defence):
    for limits, harmed in ((None, True), (Limits(), False)):
        one = federation("buffers", defence, limits=limits, model=Normed())
        one.fit(rounds=3)
        norm = one.model[1]
        assert bool((norm.running_mean < -10).any() or (norm.running_var < 0).any()) == harmed
        assert (not 0 <= int(norm.num_batches_tracked) <= 10) == harmed
        assert len(faults(one)) == (0 if harmed else 3)
        assert all(fault.startswith("client 4: ") for fault in faults(one))


@pytest.mark.parametrize("attack", ["scaled-noise", "overflow", "square-overflow"])
def test_a_client_that_is_refused_might_as_well_not_be_there(attack):
    hostile = federation(attack, limits=Limits())
    torch.manual_seed(0)
    without = Federation(mlp(64, 10), PARTS[:4], "plain", adam, loss="squared_error", limits=Limits())
    for one in (hostile, without):
        one.fit(rounds=5)
    for a, b in zip(hostile.model.parameters(), without.model.parameters(), strict=True):
        assert torch.equal(a, b)


def accuracy(rounds, **changes):
    """Each client takes all of its records in every round; with batches, what a fifth of them is worth is luck."""
    return federation(batch_size=300, **changes).fit(rounds=rounds, test=TEST, evaluate_every=rounds).last["accuracy"]


@pytest.mark.parametrize("defence", ["plain", "veil"])
def test_the_default_bound_stops_scaled_and_overflow_attacks(defence):
    honest = accuracy(25, defence=defence, hostile=0)
    assert honest >= 0.9
    for attack in ("scaled-noise", "square-overflow"):
        assert accuracy(25, defence=defence, attack=attack, limits=Limits()) >= honest - 0.02


def test_without_a_bound_the_same_attack_ruins_the_model():
    assert accuracy(25, attack="scaled-noise") < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("defence", ["plain", "veil"])
@pytest.mark.parametrize("attack", ["scaled-noise", "overflow", "square-overflow"])
def test_fifty_rounds_under_the_default_bound_end_within_two_points_of_the_honest_run(defence, attack, seed):
    honest = accuracy(50, defence=defence, hostile=0, seed=seed)
    assert honest >= 0.9
    assert accuracy(50, defence=defence, attack=attack, limits=Limits(), seed=seed) >= honest - 0.02
