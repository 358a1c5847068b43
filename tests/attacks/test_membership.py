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
from fedveil.attacks.membership import (
    Shadows,
    calibrated_scores,
    choose_form,
    confidence,
    halves,
    lira,
    lira_forms,
    rmia_forms,
    shadow_scores,
)
from fedveil.attacks.scores import auc
from fedveil.errors import BadArgument
from fedveil.federation.evaluate import predict
from fedveil.scheme.losses import CrossEntropy, LogCosh, Poisson, SquaredError

COUNT = 200


@pytest.fixture(scope="module")
def pool():
    """Records, four shadows on halves of them, and a target that memorised the first half or none of them."""
    inputs, targets = records(2 * COUNT, seed=1)
    inside = halves(2 * COUNT, 4, seeded(0))
    nets = [memorise(inputs[rows], targets[rows], seed) for seed, rows in enumerate(map(torch.tensor, inside))]
    shadow = np.stack([predict(net, inputs).double().numpy() for net in nets])
    one_hot = torch.nn.functional.one_hot(targets, CLASSES).double()
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
        **{
            name: own.scores for name, own in shadow_scores(outputs.numpy(), pool["shadows"], include_lira=True).items()
        },
    }
    assert set(scores) == {"loss", "by class", "RMIA", "LiRA"}
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
    assert np.allclose(norm.cdf(lira(phi, shadow, inside, online=False)), norm.cdf(phi, *fits[1]))


@pytest.mark.parametrize("a", [0.0, 0.3, 1.0])
def test_rmia_orders_records_by_the_papers_ratio(a):
    chance, inside = np.random.default_rng(0), halves(8, 4, seeded(0))
    shadow, target = chance.uniform(0, 1, (4, 8)), chance.uniform(0, 1, 8)

    def ratio(x):
        outside = [shadow[k, x] for k in range(4) if not inside[k, x]]
        return target[x] / (((1 + a) * np.mean(outside) + (1 - a)) / 2)

    found = membership.rmia(np.log(target), np.log(shadow), inside, a=a)
    assert np.allclose(found, np.log([ratio(x) for x in range(8)]))
    population = np.array([1, 4, 6])  # the paper's score has the same order, but ties
    paper = np.array([np.mean([ratio(x) / ratio(z) > 1 for z in population]) for x in range(8)])
    assert (np.diff(paper[np.argsort(found)]) >= 0).all()


def test_the_form_is_chosen_on_shadows_and_the_target_plays_no_part(pool):
    shadows = pool["shadows"]
    outputs = [pool[leaks].numpy() for leaks in (True, False)]
    for forms in (rmia_forms, lira_forms):
        every = [list(forms(own, shadows)) for own in outputs]
        chosen = [choose_form(own, shadows.membership).name for own in every]
        assert chosen[0] == chosen[1]

        def mean(form):
            return np.mean([form.quality(shadows.membership, number) for number in range(4)])

        best = next(form for form in every[0] if form.name == chosen[0])
        assert mean(best) == pytest.approx(max(map(mean, every[0])))


def test_too_few_shadows_leave_the_form_that_suits_the_loss_and_class_means_are_those_of_known_non_members(pool):
    two = replace(pool["shadows"], outputs=pool["shadows"].outputs[:2], membership=pool["shadows"].membership[:2])
    names = {}
    for loss in (SquaredError(), CrossEntropy()):
        found = shadow_scores(pool[True].numpy(), replace(two, loss=loss), include_lira=True)
        names[loss.name] = [found["RMIA"].form, found["LiRA"].form]
    assert names["squared_error"] == ["exp(-1 loss / mean), a = 0.3", "online, -log loss"]
    assert names["cross_entropy"] == ["probability, a = 0.3", "online, log-odds"]
    values, classes = torch.tensor([1.0, 2.0, 5.0]), torch.tensor([0, 1, 2])
    known, known_classes = torch.tensor([3.0, 5.0, 10.0]), torch.tensor([0, 0, 1])
    assert calibrated_scores(values, classes, known, known_classes).tolist() == [3.0, 8.0, 1.0]  # class 2: mean of all


def test_confident_models_trained_with_squared_error_are_attacked_through_losses():
    """Outputs of members are nearer to their targets, but every probability rounds to 1."""
    chance, count = np.random.default_rng(0), 400
    truth = torch.nn.functional.one_hot(torch.from_numpy(chance.integers(0, 3, count)), 3).double()
    inside = halves(count, 4, seeded(0))

    def outputs(members):
        width = np.where(members, 1e-3, 1e-2) * chance.lognormal(0, 0.5, count)
        return truth.numpy() + width[:, None] * chance.normal(size=(count, 3))

    shadows = Shadows(np.stack([outputs(own) for own in inside]), inside, truth, SquaredError())
    target = outputs(np.arange(count) < count // 2)
    probability = next(form for form in rmia_forms(target, shadows) if form.name.startswith("probability"))
    blind = probability.compare(probability.target, probability.shadow, inside)
    assert len(np.unique(np.exp(probability.target))) == 1
    assert auc(blind[: count // 2], blind[count // 2 :]).low < 0.9  # what is left of it is rounding
    found = shadow_scores(target, shadows, include_lira=True)
    for name, (scores, form) in found.items():
        assert "loss" in form
        assert auc(scores[: count // 2], scores[count // 2 :]).low > 0.9, name


@pytest.mark.parametrize("loss", [SquaredError(), LogCosh(), Poisson()], ids=lambda loss: loss.name)
@pytest.mark.parametrize("leaks", [True, False])
def test_quantities_have_no_classes_but_rmia_and_lira_tell_their_members(loss, leaks):
    chance, count = np.random.default_rng(1), 400
    truth, inside = torch.from_numpy(chance.poisson(4.0, (count, 1)).astype(float)), halves(count, 8, seeded(1))
    best = np.log(np.maximum(truth.numpy(), 0.1)) if loss.name == "poisson" else truth.numpy()

    def outputs(members):
        return best + np.where(members, 0.02, 0.5)[:, None] * chance.normal(size=(count, 1))

    shadows = Shadows(np.stack([outputs(own) for own in inside]), inside, truth, loss)
    assert shadows.classes is None
    target = outputs((np.arange(count) < count // 2) & leaks)
    for scores, form in shadow_scores(target, shadows, include_lira=True).values():
        result = auc(scores[: count // 2], scores[count // 2 :], level=0.975)  # two attacks, together 95 %
        assert (result.low > 0.9) if leaks else (0.5 in result), (form, result)


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
        (lambda: Shadows(own.outputs[:1], own.membership[:1], own.targets, own.loss), "a record is in every shadow"),
        (lambda: Shadows(own.outputs[:3], own.membership, own.targets, own.loss), "4 shadows and 400 records"),
    ):
        with pytest.raises(BadArgument, match=why):
            call()
    assert replace(own, loss=CrossEntropy()).temperature == 1
    assert replace(own, loss=LogCosh()).classes is None


def test_lira_is_offline_if_a_record_is_in_no_shadow(pool):
    some = replace(pool["shadows"], membership=pool["shadows"].membership & (np.arange(2 * COUNT) > 10))
    assert {form.name.split(",")[0] for form in lira_forms(pool[True].numpy(), some)} == {"offline"}
