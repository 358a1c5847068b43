"""Large finite numbers: a finite result is a result, and an overflow names the client that caused it."""

import copy
import dataclasses
import math
import sys

import pytest
import torch
from tests.oracle import batch, built, perturb
from torch import nn

import fedveil
from fedveil import errors
from fedveil.defences.plain import PlainRound, PlainUpdate
from fedveil.scheme.recover import _refuse_overflow, _Sums

FINITE = torch.finfo(torch.float32).max


@pytest.fixture(scope="module")
def planned():
    model = built(lambda: nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))).float()
    inputs, values = batch((5,), 4, dtype=torch.float32)
    return model, fedveil.analyse(model, inputs), inputs, values


def answered(planned, loss, **settings):
    model, plan, inputs, values = planned
    entropy = fedveil.Entropy.for_tests(1)  # factors that are all near 1 let nothing overflow
    secret = perturb(model, plan, loss, entropy=entropy, **settings)
    broadcast = secret.broadcast
    targets = values if loss == "squared_error" else values.argmax(1)
    return secret, [fedveil.client_step(model, broadcast, inputs, targets) for _ in range(3)]


def with_passes(update, change):
    return dataclasses.replace(update, passes={name: change(stack) for name, stack in update.passes.items()})


@pytest.mark.parametrize("loss", ["squared_error", "cross_entropy"])
@pytest.mark.parametrize("size", [1e20, 1e25, 1e30])
def test_a_finite_result_is_a_result(planned, loss, size):
    secret, updates = answered(planned, loss, multiplicative=10.0)
    true = secret.recover(updates).gradients
    found = secret.recover([with_passes(update, lambda t: t * size) for update in updates])
    whole = math.sqrt(sum(float(g.double().norm()) ** 2 for g in true.values()))
    for name, gradient in found.gradients.items():  # linear up to rounding, which grows with what cancels
        assert float((gradient.double() / size - true[name]).norm()) <= 1e3 * found.error * whole
    assert found.error == pytest.approx(secret.recover(updates).error, rel=1e-3)


@pytest.mark.parametrize("loss", ["squared_error", "cross_entropy"])
@pytest.mark.parametrize("place", range(3))
def test_an_overflow_names_its_client(planned, loss, place):
    secret, updates = answered(planned, loss, multiplicative=100.0)
    updates[place] = with_passes(updates[place], lambda t: torch.full_like(t, FINITE))
    with pytest.raises(errors.NonFiniteUpdate, match=f"client {place}: gradient: its finite numbers overflow torch.fl"):
        secret.recover(updates)


def test_where_none_overflows_alone_the_largest_is_named(planned):
    secret, updates = answered(planned, "squared_error")
    sizes = (1e30, 3e38, 1e38)  # all beyond where float32 can square
    clients = [with_passes(updates[0], lambda t, size=size: torch.full_like(t, size)).passes for size in sizes]
    with pytest.raises(errors.NonFiniteUpdate, match="client 1: gradient: "):
        _refuse_overflow(secret.recovery, "gradient", [], clients)


@pytest.mark.parametrize("value", [1e15, 1e25, FINITE])
@pytest.mark.parametrize("alternate", [False, True])
def test_a_refusal_does_not_reveal_the_true_offset(planned, value, alternate):
    """The same pass is refused, or not, whichever place it has, with whatever signs, so that sums may cancel."""
    outcomes = set()
    secret, updates = answered(planned, "cross_entropy", multiplicative=100.0)
    for place in range(3):

        def spoil(stack, place=place):
            stack = stack.clone()
            row = stack[place].view(-1)
            row[:] = value
            if alternate:
                row[::2] *= -1
            return stack

        try:
            secret.recover([updates[0], with_passes(updates[1], spoil)])
            outcomes.add("result")
        except errors.NonFiniteUpdate as error:
            outcomes.add(str(error))
    assert len(outcomes) == 1
    assert (outcomes == {"result"}) == (value < FINITE)


def test_buffers_that_overflow_name_their_client(planned):
    model, _, inputs, values = planned
    model = copy.deepcopy(model)
    model[1].eval()  # its buffers carry factors of any size; in training mode, only signs
    planned = model, fedveil.analyse(model, inputs), inputs, values
    secret, updates = answered(planned, "squared_error", multiplicative=100.0)
    floats = [name for name, buffer in updates[1].buffers.items() if buffer.is_floating_point()]
    sent = {size: updates[1].buffers | {name: torch.full((6,), size) for name in floats} for size in (1e25, FINITE)}
    found = secret.recover([updates[0], dataclasses.replace(updates[1], buffers=sent[1e25])])
    assert all(buffer.isfinite().all() for buffer in found.buffers.values())
    with pytest.raises(errors.NonFiniteUpdate, match="client 1: buffers: its finite numbers overflow"):
        secret.recover([updates[0], dataclasses.replace(updates[1], buffers=sent[FINITE])], [1, 1e6])


def test_the_error_is_finite_where_passes_cancel_completely(planned):
    layout = dataclasses.replace(planned[1].layout, dtype=torch.float64)
    sums = _Sums([1.0, -1.0, 1.0], layout)
    sums.combine(torch.tensor([[1e300], [1e300], [1e-300]], dtype=torch.float64))
    assert sums.finite
    assert sums.error() == sys.float_info.max
    secret, updates = answered(planned, "squared_error")
    assert secret.recover([with_passes(updates[0], torch.zeros_like)]).error < 1e-6


@pytest.mark.parametrize("rounding", [None, 1])
def test_plain_aggregation_takes_large_numbers_and_refuses_others(rounding):
    noise = None if rounding is None else torch.Generator().manual_seed(rounding)
    own = PlainRound(nn.Linear(1, 1), {}, noise)

    def update(gradient, buffer=1.0):
        return PlainUpdate({"w": torch.full((4, 4), gradient)}, {"m": torch.full((4,), buffer), "n": torch.tensor(3)})

    found = own.recover([update(1e20), update(1e25)], [1, 1])
    assert all(t.isfinite().all() for t in (*found.gradients.values(), *found.buffers.values()))
    torch.testing.assert_close(found.gradients["w"], torch.full((4, 4), 5e24), rtol=1e-4, atol=0)
    with pytest.raises(errors.NonFiniteUpdate, match="client 1: gradient w holds NaN"):
        own.recover([update(1e20), update(math.nan)], [1, 1])
    for bad in (math.nan, math.inf):
        with pytest.raises(errors.NonFiniteUpdate, match="client 1: buffer m holds NaN"):
            own.recover([update(1.0), update(1.0, bad)], [1, 1])
