"""Sketches of several rounds determine the weights, and a record."""

import dataclasses

import pytest
import torch
from tests.attacks.victims import build_victim, gain, observe_broadcasts, observe_digits

from fedveil.attacks.dbcl import rebuild_record, stack_sketches
from fedveil.attacks.observation import DoesNotApply
from fedveil.defences import DBCL, Plain
from fedveil.scheme import SquaredError


@pytest.mark.parametrize("name", ["mlp", "cnn", "batchnorm"])
def test_enough_sketches_determine_the_weights(name):
    model, inputs, outputs = build_victim(name)
    defence, errors = DBCL(2, seed=5), []
    sketched = defence.server(model, inputs[:2], SquaredError()).sketched
    for rounds in (1, 6):
        found = stack_sketches(observe_broadcasts(defence, model, inputs, outputs, SquaredError(), rounds)).model
        pairs = [(found.get_parameter(name), model.get_parameter(name)) for name in sketched]
        gap, size = (torch.cat([part.detach().flatten() for part in parts]) for parts in zip(*pairs, strict=True))
        errors.append(float((gap - size).norm() / size.norm()))
    assert errors[0] > 0.5  # half of the weights are not known
    assert errors[1] < 1e-5
    plain = observe_broadcasts(Plain(), model, inputs, outputs, SquaredError())
    assert stack_sketches(plain) is plain


@pytest.mark.parametrize(("q", "rounds"), [(2, 5), (3, 7)])
def test_sketches_give_the_record(q, rounds):
    observed, true = observe_digits(DBCL(q, seed=3), rounds)
    assert torch.allclose(rebuild_record(observed), true, atol=1e-6)


def test_the_attacker_s_own_part_must_be_subtracted_and_many_records_in_a_batch_hide_one_another():
    observed, true = observe_digits(DBCL(2, seed=3), 5)
    own = observed.rounds[0].upload
    zero = dataclasses.replace(own, gradients={name: 0 * value for name, value in own.gradients.items()})
    blind = tuple(dataclasses.replace(seen, upload=seen.upload and zero) for seen in observed.rounds)
    assert gain(rebuild_record(dataclasses.replace(observed, rounds=blind)), observed, true) < 3
    observed, true = observe_digits(DBCL(2, seed=3), 5, victim=64)
    assert gain(rebuild_record(observed), observed, true) < 3


@pytest.mark.parametrize(
    ("defence", "why"), [(DBCL(2, seed=3), "more equations than inputs, got 64 and 64"), (Plain(), "not sketched")]
)
def test_too_few_sketches_and_other_broadcasts_are_refused(defence, why):
    with pytest.raises(DoesNotApply, match=why):
        rebuild_record(observe_digits(defence, 2)[0])
