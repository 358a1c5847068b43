"""A record from the first layer's gradient: exact without a defence, and from veiled or selected gradients too."""

import dataclasses

import pytest
import torch
from tests.attacks.victims import DIGITS, chance, gain, observe_digits

from fedveil.attacks import first_layer
from fedveil.attacks.leaked_gradients import Leak, from_difference
from fedveil.attacks.observation import DoesNotApply
from fedveil.defences import PPDL, Plain, Veil
from fedveil.models import cnn, mlp
from fedveil.scheme import Entropy, SquaredError
from fedveil.studies.audit.run import quality

RECORDS = DIGITS.train.inputs.double()


def test_a_plain_difference_gives_the_victim_s_record_and_noise_nothing():
    observed, true = observe_digits(Plain())
    assert torch.allclose(first_layer.rebuild_from_difference(observed), true, atol=1e-9)
    assert torch.allclose(first_layer.rebuild_selected_record(observed), true, atol=1e-9)
    leak, generator = from_difference(observed), chance()
    noise = {name: torch.randn(value.shape, generator=generator).double() for name, value in leak.gradients.items()}
    assert gain(first_layer.record_from_gradient(dataclasses.replace(leak, gradients=noise), "0"), observed, true) < 0


@pytest.mark.parametrize("permute", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_two_veiled_broadcasts_give_it_too_outside_of_the_attacker_s_own_inputs(permute, seed):
    veil = Veil(10, 100.0, permute=permute, entropy=Entropy.for_tests(seed))
    observed, true = observe_digits(veil, own=400, seed=seed)
    before, after = (first_layer.layer_rows(seen.broadcast.parameters, "0") for seen in observed.rounds)
    span = torch.linalg.svd(first_layer.append_ones(observed.own_batch(observed.rounds[0])[0]), full_matrices=False)[2]
    direction = first_layer.common_direction(first_layer.pair_rows(before, after), span)
    wanted = first_layer.append_ones(true[None])[0]
    wanted = wanted - span.T @ (span @ wanted)
    assert abs(float(direction @ wanted / wanted.norm())) > 1 - 1e-4  # the formula leaves out the step's square
    floor = quality(observed.inputs.mean(0), true, 1.0)
    assert quality(first_layer.rebuild_veiled_record(observed), true, 1.0) > floor + 3


@pytest.mark.parametrize("seed", range(2))
def test_ppdl_s_noise_averages_out_over_rounds_and_its_selection_hides_little(seed):
    gains = {}
    for rounds in (2, 12):
        observed, true = observe_digits(PPDL(1.0, 1e-2, seed=seed), rounds, seed=seed)
        gains[rounds] = gain(first_layer.rebuild_selected_record(observed), observed, true)
        published = gain(first_layer.rebuild_from_difference(observed), observed, true)
    assert gains[12] > gains[2] + 3  # about 10 log10(11) dB where noise is all there is
    assert gains[12] > published + 6
    assert published < 2
    observed, true = observe_digits(PPDL(0.1, seed=seed), 6)  # selection hides no record that is the same in all rows
    found = gain(first_layer.rebuild_selected_record(observed), observed, true)
    assert found > max(10, gain(first_layer.rebuild_from_difference(observed), observed, true))


def test_networks_and_rounds_that_do_not_fit_are_refused():
    veiled, plain = (observe_digits(one, batch=65)[0] for one in (Veil(entropy=Entropy.for_tests(0)), Plain()))
    for call, given, why in (
        (first_layer.first_linear, cnn(1, 10, size=8), "is not a Linear with a bias"),
        (first_layer.rebuild_veiled_record, veiled, "the attacker's 65 records span all directions"),
        (first_layer.rebuild_veiled_record, plain, "not veiled"),
        (first_layer.rebuild_selected_record, dataclasses.replace(plain, rounds=plain.rounds[-1:]), "two broadcasts"),
    ):
        with pytest.raises(DoesNotApply, match=why):
            call(given)


def mixed_gradient(deltas):
    """The gradient of a first layer whose unit i gets delta_ik from record k of six."""
    rows = deltas.double() @ first_layer.append_ones(RECORDS[:6])
    return Leak(mlp(64, 10), {"0.weight": rows[:, :-1].float(), "0.bias": rows[:, -1].float()}, SquaredError())


def test_rows_that_agree_show_a_record_of_a_batch():
    deltas = torch.randn(20, 6, generator=chance())
    control = first_layer.record_from_agreeing_rows(mixed_gradient(deltas), "0")
    deltas[[4, 11], :3], deltas[[4, 11], 4:] = 0.0, 0.0  # two units that only record 3 moves
    found = first_layer.record_from_agreeing_rows(mixed_gradient(deltas), "0")
    assert (found - RECORDS[3]).abs().max() <= 2 * torch.finfo(torch.float32).eps  # weight and bias round once each
    assert min(float((control - one).abs().max()) for one in RECORDS[:6]) > 0.1
    with pytest.raises(DoesNotApply, match="fewer than two units have a gradient"):
        first_layer.record_from_agreeing_rows(mixed_gradient(torch.eye(20, 6)[:, [0] * 6]), "0")
