"""The evaluator of reconstructions, and its measures against slow ones."""

import math
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedveil.data import keep_labels, load
from fedveil.errors import BadArgument
from fedveil.models import cnn, resnet
from fedveil.studies.inversion.evaluator import (
    distances,
    make_judge,
    outputs_and_features,
    per_class,
    train_judge,
    wilson,
)


@given(st.integers(1, 200), st.data())
def test_wilson_holds_the_shares_that_a_score_test_does_not_refuse(trials, data):
    hits = data.draw(st.integers(0, trials))
    value, low, high, *counts = wilson(torch.arange(trials) < hits)
    assert (*counts, value) == (hits, trials, hits / trials)
    z = NormalDist().inv_cdf(0.975)
    for end in (low, high):
        if 0 < end < 1:
            assert abs(hits / trials - end) == pytest.approx(z * math.sqrt(end * (1 - end) / trials), rel=1e-9)
    assert 0 <= low <= value <= high <= 1


@given(st.integers(0, 1000), st.booleans())
def test_distances_are_those_of_loops(seed, same_class):
    random = torch.Generator().manual_seed(seed)
    found, known = (torch.randn(count, 3, generator=random, dtype=torch.float64) for count in (5, 9))
    wanted, targets = torch.randint(0, 3, (5,), generator=random), torch.arange(9) % 3
    centroid, nearest = 0.0, 0.0
    for row, label in zip(found, wanted, strict=True):
        own = [k for k, target in zip(known, targets, strict=True) if target == label]
        others = own if same_class else list(known)
        centroid += float((row - sum(own) / len(own)).square().sum()) / 5
        nearest += min(float((row - k).square().sum()) for k in others) / 5
    assert distances(found, wanted, known, targets, same_class=same_class) == pytest.approx((centroid, nearest))


def test_shares_by_class():
    answers, wanted = torch.tensor([0, 1, 1, 2]), torch.tensor([0, 0, 1, 1])
    assert per_class(answers, wanted, 3) == [0.5, 0.5, None]


def test_features_are_what_the_head_gets():
    images = torch.rand(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for model in (cnn(3, 4, width=4), resnet(8, 3, 4, width=4), make_judge(3, 32, 4, 4)):
        head = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
        outputs, features = outputs_and_features(model, images, batch_size=2)
        assert torch.allclose(head(features), outputs)
        assert not any(module._forward_pre_hooks for module in model.modules())
        assert model.training  # as it was
    with pytest.raises(BadArgument, match="no module with parameters"):
        outputs_and_features(nn.Flatten(), images)


def test_a_judge_learns_and_goes_on_after_a_stop(tmp_path):
    data = keep_labels(load("digits", flat=False), range(5, 10))
    judge = train_judge(data, 4, width=8, path=tmp_path / "judge.pt")
    assert (outputs_and_features(judge, data.test.inputs)[0].argmax(1) == data.test.targets).double().mean() > 0.9
    seen = []
    again = train_judge(data, 4, width=8, path=tmp_path / "judge.pt", progress=lambda share, what: seen.append(what))
    assert not seen  # nothing left to train
    assert all(torch.equal(a, b) for a, b in zip(judge.parameters(), again.parameters(), strict=True))
