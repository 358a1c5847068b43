"""Loss, LiRA and RMIA: against their formulas, on models that leak, and on models that cannot."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm
from tests.attacks.victims import CLASSES, memorise, records
from tests.attacks.victims import chance as seeded

from fedveil.attacks import membership
from fedveil.attacks.features import losses
from fedveil.attacks.membership import Shadows, calibrated_scores, choose_a, confidence, halves, lira, shadow_scores
from fedveil.attacks.scores import auc
from fedveil.errors import BadArgument
from fedveil.federation.evaluate import predict
from fedveil.scheme.losses import CrossEntropy, LogCosh, SquaredError

COUNT = 200


@pytest.fixture(scope="module")
def pool():
    """Records, four shadows on halves of them, and a target that memorised the first half or none of them."""
    inputs, targets = records(2 * COUNT, seed=1)
    inside = halves(2 * COUNT, 4, seeded(0))
    nets = [memorise(inputs[rows], targets[rows], seed) for seed, rows in enumerate(map(torch.tensor, inside))]
    shadow = np.stack([predict(net, inputs).double().numpy() for net in nets])
    one_hot = torch.nn.functional.one_hot(targets, CLASSES).double().numpy()
    leaks = predict(memorise(inputs[:COUNT], targets[:COUNT], 7), inputs).double()
    silent = predict(memorise(*records(COUNT, seed=3), 7), inputs).double()
    return {"targets": targets, "shadows": Shadows(shadow, inside, one_hot, SquaredError()), True: leaks, False: silent}


@pytest.mark.parametrize("leaks", [True, False])
def test_scores_win_on_a_model_that_leaks_and_guess_on_one_that_cannot(pool, leaks):
    targets, outputs = pool["targets"], pool[leaks]
    found = losses(SquaredError(), outputs, targets)
    known = slice(COUNT, COUNT + COUNT // 2)
    scores = {
        "loss": -found.numpy(),
        "by class": calibrated_scores(found, targets, found[known], targets[known]).numpy(),
        **shadow_scores(outputs.numpy(), pool["shadows"], np.arange(2 * COUNT)[known], include_lira=True),
    }
    assert set(scores) == {"loss", "by class", "RMIA", "LiRA online", "LiRA offline"}
    for name, values in scores.items():
        result = auc(values[:COUNT], values[COUNT + COUNT // 2 :], level=1 - 0.05 / len(scores))  # together 95 %
        assert (result.value > 0.95) if leaks else (0.5 in result), (name, result)


@given(seed=st.integers(0, 2**32 - 1))
def test_log_odds_are_those_of_softmax(seed):
    chance = np.random.default_rng(seed)
    logits, classes = chance.normal(0, 5, (6, 4)), chance.integers(0, 4, 6)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    others = np.where(np.arange(4) == classes[:, None], 0, p).sum(1)
    assert np.allclose(confidence(logits, classes), np.log(p[np.arange(6), classes]) - np.log(others))
    assert np.isfinite(confidence(1e6 * logits, classes)).all()


@pytest.mark.parametrize("shadows", [4, 64])  # with 64, each record has its own deviation
def test_lira_is_the_ratio_of_two_normal_densities(shadows):
    chance, inside = np.random.default_rng(0), halves(5, shadows, seeded(0))
    shadow, phi = chance.normal(0, [1, 2, 5, 9, 20], (shadows, 5)), chance.normal(0, 2, 5)
    fits = []
    for chosen in (inside, ~inside):
        columns = [shadow[chosen[:, x], x] for x in range(5)]
        middle = [np.median(values) for values in columns]
        gaps = np.concatenate([values - m for values, m in zip(columns, middle, strict=True)])
        fits.append((middle, [v.std() for v in columns] if shadows == 64 else math.sqrt(np.mean(gaps**2))))
    assert np.allclose(lira(phi, shadow, inside), norm.logpdf(phi, *fits[0]) - norm.logpdf(phi, *fits[1]))
    assert np.allclose(lira(phi, shadow, inside, online=False), norm.cdf(phi, *fits[1]))


@pytest.mark.parametrize("a", [0.0, 0.3, 1.0])
def test_rmia_counts_population_records_that_are_less_likely_members(a):
    chance, inside = np.random.default_rng(0), halves(8, 4, seeded(0))
    shadow, target = chance.uniform(0, 1, (4, 8)), chance.uniform(0, 1, 8)

    def ratio(x):
        outside = [shadow[k, x] for k in range(4) if not inside[k, x]]
        return target[x] / (((1 + a) * np.mean(outside) + (1 - a)) / 2)

    population = np.array([1, 4, 6])
    want = [np.mean([ratio(x) / ratio(z) > 1 for z in population]) for x in range(8)]
    assert np.allclose(membership.rmia(target, shadow, inside, population, a=a), want)


def test_a_is_chosen_on_a_shadow_or_falls_back_and_class_means_are_those_of_known_non_members(pool):
    shadows = pool["shadows"]
    shadow = np.exp(-np.logaddexp(0, -confidence(shadows.outputs / shadows.temperature, shadows.classes)))
    assert choose_a(shadow, shadows.inside) in membership.GRID
    assert choose_a(shadow[:2], shadows.inside[:2]) == membership.FALLBACK
    values, classes = torch.tensor([1.0, 2.0, 5.0]), torch.tensor([0, 1, 2])
    known, known_classes = torch.tensor([3.0, 5.0, 10.0]), torch.tensor([0, 0, 1])
    assert calibrated_scores(values, classes, known, known_classes).tolist() == [3.0, 8.0, 1.0]  # class 2: mean of all


@given(records=st.integers(2, 40), pairs=st.integers(1, 4), seed=st.integers(0, 100))
def test_every_record_is_in_half_of_the_shadows(records, pairs, seed):
    inside = halves(records, 2 * pairs, seeded(seed))
    assert (inside.sum(0) == pairs).all()
    assert abs(inside.sum(1) - records / 2).max() <= 0.5
    size = max(1, records // 3)
    smaller = halves(records, 2 * pairs, seeded(seed), size)
    assert (smaller.sum(1) == size).all()
    assert not (smaller[::2] & smaller[1::2]).any()


def test_shadows_that_do_not_fit_are_refused(pool):
    own = pool["shadows"]
    for call, why in (
        (lambda: halves(10, 3, torch.Generator()), "the number of shadows must be even, got 3"),
        (lambda: Shadows(own.outputs[:1], own.inside[:1], own.targets, own.loss), "a record is in every shadow"),
        (lambda: Shadows(own.outputs[:3], own.inside, own.targets, own.loss), "4 shadows and 400 records"),
        (
            lambda: shadow_scores(own.outputs[0], replace(own, inside=own.inside & False), [0], include_lira=True),
            "a record is not in any shadow",
        ),
        (lambda: replace(own, loss=LogCosh()).temperature, "log_cosh does not define class probabilities"),
    ):
        with pytest.raises(BadArgument, match=why):
            call()
    assert replace(own, loss=CrossEntropy()).temperature == 1
