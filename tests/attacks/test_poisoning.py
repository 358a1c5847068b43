"""The effect of hostile clients on a mean, in closed form; under a veil it is the same, since recovery is linear."""

import pytest
import torch
from tests.attacks.victims import DIGITS, chance
from tests.oracle import flat
from tests.sessions import Session
from torch import nn
from torch.testing import assert_close

from fedveil.attacks import poisoning
from fedveil.attacks.poisoning import (
    ATTACKS,
    CLAIMED_RECORDS,
    HostileEngine,
    HostileStrategy,
    HostileView,
    find_tensors,
)
from fedveil.data import split
from fedveil.defences import Samples
from fedveil.defences.registry import build
from fedveil.errors import BadArgument
from fedveil.federation import Federation, Limits
from fedveil.models import mlp

NEAR = {"rtol": 0, "atol": 1e-12}


def build_view(honest, hostile, dtype=torch.float64):
    """The view of a hostile client beside honest ones with random tensors."""
    random, shapes = chance(), {"weight": (3, 4), "bias": (5,)}
    drawn = [{k: torch.randn(shape, generator=random).to(dtype) for k, shape in shapes.items()} for _ in range(honest)]
    return HostileView(drawn[0], drawn, hostile, 3.0, random)


def overall_mean(view, crafted):
    return torch.stack([flat(one) for one in view.honest_updates] + [flat(crafted)] * view.num_hostile).mean(0)


@pytest.mark.parametrize(("honest", "hostile"), [(2, 1), (3, 2), (5, 4), (9, 1), (9, 4)])
def test_inner_products_reverse_the_mean_exactly_above_the_paper_s_threshold(honest, hostile):
    view = build_view(honest, hostile)
    true, everyone = flat(view.mean()), honest + hostile
    assert_close(overall_mean(view, poisoning.inner_product(view)), -true * honest / everyone, **NEAR)
    for factor in (0.5, honest / hostile - 0.1, honest / hostile + 0.1):
        found = overall_mean(view, poisoning.inner_product(view, factor))
        assert_close(found, true * (honest - factor * hostile) / everyone, **NEAR)
        assert (float(found @ true) < 0) == (factor > honest / hostile)


@pytest.mark.parametrize(("clients", "hostile", "z"), [(50, 24, 1.75), (5, 1, 0.25), (7, 2, 0.57), (5, 3, 0.0)])
def test_a_little_is_enough_takes_its_z_from_the_normal_quantile(clients, hostile, z):
    assert poisoning.stealthy_deviations(clients, hostile) == pytest.approx(z, abs=5e-3)


def test_each_strategy_crafts_what_its_summary_says():
    view = build_view(4, 1)
    mean, (noise, again) = flat(view.mean()), (flat(poisoning.scaled_noise(view)) for _ in range(2))
    rest = torch.stack([flat(one) for one in view.honest_updates[1:]]).sum(0) / 5  # its own honest twin is cancelled
    assert_close(overall_mean(view, poisoning.sign_flip(view)), rest, **NEAR)
    assert float(noise.norm() / mean.norm()) == pytest.approx(1e4)
    assert abs(float(torch.cosine_similarity(noise, again, dim=0))) < 0.97  # 4 deviations of 17 numbers: 4 / sqrt(17)
    rows = torch.stack([flat(one) for one in view.honest_updates])
    assert_close(flat(poisoning.little_is_enough(view)), mean - 0.2533471 * rows.std(0), rtol=0, atol=1e-6)  # of 0.6
    below = flat(poisoning.below_bound(view))
    assert float(below.norm()) == pytest.approx(0.9 * view.bound)
    assert float(torch.cosine_similarity(below, mean, dim=0)) == pytest.approx(-1)
    buffers = poisoning.break_buffers({"mean": torch.zeros(2), "count": torch.tensor(3)})
    assert (buffers["mean"].tolist(), int(buffers["count"])) == ([-1000, -1000], 2**63 - 1)
    with pytest.raises(BadArgument, match="int has neither gradients nor passes"):
        find_tensors(3)
    with pytest.raises(BadArgument, match="5 of 5 clients are hostile"):
        federation(hostile=5)


@pytest.mark.parametrize(("dtype", "sizes"), [(torch.float32, (1e37, 1e20)), (torch.float64, (5.4e306, 7.2e154))])
def test_overflow_is_finite_until_it_is_summed_or_squared(dtype, sizes):
    view = build_view(4, 1, dtype)
    large, root = flat(poisoning.overflow(view)), flat(poisoning.overflow(view, squares=True))
    assert [float(large[0]), float(root[0])] == pytest.approx(sizes, rel=0.03)
    assert torch.stack([large] * 40).sum(0).isinf().all()
    assert root.square().isinf().all()
    assert torch.stack([root] * 40).sum(0).isfinite().all()


def recover_all(name, loss, attack):
    """The gradients of four honest clients, and of the last one's poisoned upload, without the noise."""
    torch.manual_seed(0)
    model, inputs = mlp(6, 3, hidden=5).double(), torch.randn(40, 6, dtype=torch.float64)
    targets = nn.functional.one_hot(inputs[:, :3].argmax(1), 3).double()
    defence = Session(build(name), model, inputs[:2], loss)
    broadcast = defence.broadcast()
    uploads = [defence.step(broadcast, Samples(inputs[k::4], targets[k::4])) for k in range(4)]
    *honest, own = (find_tensors(upload)[1] for upload in uploads)
    bad = poisoning.poison(ATTACKS[attack], uploads[3], HostileView(own, honest, 1, 1.0, torch.Generator()))
    return [flat(one.gradients) for one in defence.recover_each([*uploads, bad])]


@pytest.mark.parametrize("loss", ["squared_error", "cross_entropy"])
def test_multiples_and_means_of_uploads_are_those_of_the_gradients(loss):
    *others, own, flipped = recover_all("veil", loss, "sign-flip")
    plain, veiled = (recover_all(name, loss, "inner-product")[-1] for name in ("plain", "veil"))
    near = 1e-9 * float(own.norm())  # the promised precision of recovery in float64
    assert_close(flipped, -own, rtol=0, atol=near)
    assert_close(veiled, plain, rtol=0, atol=6 * near)  # its factor is 6
    assert_close(plain, -6 * torch.stack(others).mean(0), rtol=0, atol=6 * near)


PARTS = [(DIGITS.train.inputs[rows], DIGITS.train.targets[rows]) for rows in split(DIGITS, 5)]
TEST = DIGITS.test.inputs, DIGITS.test.targets
DEFENCES = pytest.mark.parametrize("defence", ["plain", "veil"])


def adam(parameters):
    return torch.optim.Adam(parameters, 1e-2)


def federation(attack="sign-flip", defence="plain", hostile=1, model=None, seed=0, **settings):
    torch.manual_seed(seed)
    one = Federation(model or mlp(64, 10), PARTS, defence, adam, seed=seed, loss="squared_error", **settings)
    one.use_engine(HostileEngine(one.clients, ATTACKS[attack], hostile, one.limits))
    return one


def fit(one, rounds):
    """The faults of a run."""
    one.fit(rounds=rounds)
    return [fault for record in one.history.records for fault in record.get("faults", [])]


@pytest.mark.parametrize(
    ("attack", "parts", "settings"),
    [(None, 5, {"fuse": False})]
    + [(attack, 4, {"limits": Limits()}) for attack in ("scaled-noise", "overflow", "square-overflow")],
)
def test_without_hostile_clients_or_if_they_are_refused_it_is_the_federation_of_the_honest(attack, parts, settings):
    poisoned = federation(attack or "sign-flip", hostile=bool(attack) + 0, **settings)
    torch.manual_seed(0)
    honest = Federation(mlp(64, 10), PARTS[:parts], "plain", adam, loss="squared_error", **settings)
    for one in (poisoned, honest):
        one.fit(rounds=4)
    for a, b in zip(poisoned.model.parameters(), honest.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("factor", [10.0, 3.0])
@DEFENCES
def test_a_client_that_knows_the_bound_stays_below_it_and_a_slightly_larger_norm_is_refused(defence, factor):
    one, above = (federation("below-bound", defence, limits=Limits(norm_factor=factor)) for _ in range(2))
    assert not fit(one, 6)
    craft = lambda view: poisoning.scale(1.01 / 0.9, poisoning.below_bound(view))  # noqa: E731
    above.clients.strategy = HostileStrategy("above the bound", craft)
    if defence == "plain":  # under a veil, norms of uploads are not norms of gradients
        assert len(fit(above, 6)) == 6


@pytest.mark.parametrize(
    ("limits", "weight", "error"),
    [(None, 1, 1e-4), (Limits(), 0.5, 1e-4), (Limits(max_records=288), 288 / (1437 + 1), 1e-3)],
)
def test_a_claim_takes_the_whole_mean_or_what_its_cap_allows(limits, weight, error):
    one, caught = federation("records", limits=limits), []
    assert [one.clients.claim_records(client) for client in (3, 4)] == [287, CLAIMED_RECORDS]
    found = one.step(lambda _, uploads: caught.extend(uploads))
    rows = torch.stack([flat(upload.gradients) for upload in caught]).double()
    weights = torch.linalg.lstsq(rows.T, flat(found.gradients).double()).solution
    assert float(weights[4]) == pytest.approx(weight, abs=error)  # float32 gradients, and rows far from parallel


@pytest.mark.parametrize(("limits", "harmed"), [(None, True), (Limits(), False)])
@DEFENCES
def test_broken_statistics_are_refused_by_default_and_harm_without_limits(defence, limits, harmed):
    model = nn.Sequential(nn.Linear(64, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 10))
    found, norm = fit(federation("buffers", defence, limits=limits, model=model), 3), model[1]
    assert bool((norm.running_mean < -10).any() or (norm.running_var < 0).any()) == harmed
    assert (not 0 <= int(norm.num_batches_tracked) <= 10) == harmed
    assert len(found) == (0 if harmed else 3)
    assert all(fault.startswith("client 4: ") for fault in found)


def accuracy(rounds, **changes):
    """Each client takes all of its records in every round; with batches, a fifth of them is worth more or less."""
    return federation(batch_size=300, **changes).fit(rounds=rounds, test=TEST, evaluate_every=rounds).last["accuracy"]


@DEFENCES
def test_the_default_bound_stops_scaled_and_overflow_attacks_which_ruin_the_model_without_it(defence):
    honest = accuracy(25, defence=defence, hostile=0)
    assert honest >= 0.9
    for attack in ("scaled-noise", "square-overflow", "overflow"):
        assert accuracy(25, defence=defence, attack=attack, limits=Limits()) >= honest - 0.02
    assert accuracy(25, defence=defence, attack="scaled-noise") < 0.5
