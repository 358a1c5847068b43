"""A record from the first layer's gradient: exact without a defence, and from two veiled broadcasts too."""

import dataclasses

import pytest
import torch
from tests.configs import config_of

from fedveil.attacks.first_layer import (
    common_direction,
    first_linear,
    joined,
    paired_rows,
    record_from_agreeing_rows,
    record_from_gradient,
    record_under_a_veil,
    with_one,
)
from fedveil.attacks.leaks import Leak, from_difference, received
from fedveil.attacks.observed import DoesNotApply
from fedveil.data import load
from fedveil.defences import PPDL, Plain, Veil
from fedveil.federation import Federation
from fedveil.models import cnn, mlp
from fedveil.scheme import Entropy, SquaredError
from fedveil.studies.audit.rebuild import quality, rebuild
from fedveil.studies.observation import observe

DATA = load("digits")
RECORDS = DATA.train.inputs.double()


def seen_by_a_client(defence, *, own=400, batch=4, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = mlp(64, 10).double()
    parts = [(RECORDS[:own], DATA.train.targets[:own]), (RECORDS[1000:1001], DATA.train.targets[1000:1001])]
    federation = Federation(
        network, parts, defence, lambda p: torch.optim.SGD(p, 0.1), batch_size=batch, fuse=False, seed=seed
    )
    return observe(federation, rounds=2), RECORDS[1000]


def test_a_plain_difference_gives_the_victim_s_record():
    observed, record = seen_by_a_client(Plain())
    found = record_from_gradient(from_difference(observed), first_linear(observed.architecture))
    assert torch.allclose(found, record, atol=1e-9)


@pytest.mark.parametrize("permute", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_two_veiled_broadcasts_give_it_too_outside_of_the_attacker_s_own_inputs(permute, seed):
    veil = Veil(10, 100.0, permute=permute, entropy=Entropy.for_tests(seed))
    observed, record = seen_by_a_client(veil, seed=seed)
    before, after = (joined(dict(seen.broadcast.parameters), "0") for seen in observed.rounds)
    own = with_one(observed.inputs[observed.rounds[0].rows])
    span = torch.linalg.svd(own, full_matrices=False)[2]
    direction = common_direction(paired_rows(before, after), span)
    wanted = with_one(record[None])[0]
    wanted = wanted - span.T @ (span @ wanted)
    assert abs(float(direction @ wanted / wanted.norm())) > 1 - 1e-4  # the step's square is not part of the formula
    floor = quality(observed.inputs.mean(0), record, 1.0)
    assert quality(record_under_a_veil(observed), record, 1.0) > floor + 3


def test_noise_in_place_of_a_gradient_gives_nothing():
    observed, record = seen_by_a_client(Plain())
    leak = from_difference(observed)
    chance = torch.Generator().manual_seed(0)
    noise = {
        name: torch.randn(value.shape, generator=chance, dtype=value.dtype) for name, value in leak.gradients.items()
    }
    found = record_from_gradient(dataclasses.replace(leak, gradients=noise), "0").clamp(0, 1)
    assert quality(found, record, 1.0) < quality(observed.inputs.mean(0), record, 1.0)


def test_what_was_not_sent_is_not_matched():
    kept = []
    for seed in range(5):
        observed, record = seen_by_a_client(PPDL(0.1, seed=seed), seed=seed)
        leak = from_difference(observed)
        masked = received(leak, learning_rate=observed.learning_rate)
        with_mask, without = (record_from_gradient(x, "0").clamp(0, 1) for x in (masked, leak))
        kept.append(quality(with_mask, record, 1.0) - quality(without, record, 1.0))
    assert sorted(kept)[2] > 0  # the middle one of five: where a unit lost its bias, a mask can cost something


def test_networks_and_batches_that_do_not_fit_are_refused():
    with pytest.raises(DoesNotApply, match="does not begin with a Linear"):
        first_linear(cnn(1, 10, size=8))
    observed, _ = seen_by_a_client(Veil(entropy=Entropy.for_tests(0)), batch=65)
    with pytest.raises(DoesNotApply, match="65 own records leave no direction free"):
        record_under_a_veil(observed)
    plain, _ = seen_by_a_client(Plain())
    with pytest.raises(DoesNotApply, match="not veiled"):
        record_under_a_veil(plain)


def test_every_defence_has_its_figures_and_a_floor():
    for defence, attackers in {
        "plain": set(),
        "veil": {"two broadcasts, own records"},
        "ppdl": {"rounds stacked"},
        "dbcl": {"sketches stacked"},
        "spn": set(),
    }.items():
        found = rebuild(lambda share, what: None, config_of(data="digits", defence=defence), DATA, 2).psnr
        assert set(found) == {"as published", "floor", *attackers}
        assert all(figures.low <= figures.value <= figures.high for figures in found.values())


def mixed_gradient(deltas, records):
    """The gradient of a first layer whose unit i gets delta_ik from record k."""
    rows = deltas.double() @ with_one(records)
    gradients = {"0.weight": rows[:, :-1].float(), "0.bias": rows[:, -1].float()}
    return Leak(mlp(records.shape[1], 10), gradients, SquaredError())


def test_rows_that_agree_show_a_record_of_a_batch():
    chance = torch.Generator().manual_seed(0)
    records, deltas = RECORDS[:6], torch.randn(20, 6, generator=chance)
    control = record_from_agreeing_rows(mixed_gradient(deltas, records), "0")
    deltas[[4, 11], :3], deltas[[4, 11], 4:] = 0.0, 0.0  # two units that only record 3 moves
    found = record_from_agreeing_rows(mixed_gradient(deltas, records), "0")
    assert (found - records[3]).abs().max() <= 2 * torch.finfo(torch.float32).eps  # weight and bias round once each
    assert min(float((control - one).abs().max()) for one in records) > 0.1


def test_rows_without_a_gradient_do_not_agree():
    deltas = torch.zeros(20, 6)
    deltas[7] = 1.0
    with pytest.raises(DoesNotApply, match="fewer than two units have a gradient"):
        record_from_agreeing_rows(mixed_gradient(deltas, RECORDS[:6]), "0")
