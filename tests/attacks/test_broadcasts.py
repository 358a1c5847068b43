"""Two broadcasts and no data remove the veil: exactly while the model stands still, and nearly so while it moves."""

import copy
import dataclasses

import pytest
import torch
from tests.attacks.test_adaptive import NETWORKS, OUTPUTS, apart, observe, records
from tests.oracle import built
from torch import nn

from fedveil import analyse
from fedveil.attacks import Round
from fedveil.attacks.broadcasts import Heads, fit_noise, pick_candidates, six_broadcasts, two_broadcasts
from fedveil.attacks.observed import DoesNotApply
from fedveil.attacks.veil import centred
from fedveil.defences import Plain, Veil
from fedveil.scheme import CrossEntropy, Entropy, SquaredError


class Attention(nn.Module):
    """An encoder layer over five tokens and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, OUTPUTS)

    def forward(self, x):
        return self.head(self.layer(x.unflatten(1, (5, 8))).mean(1))


EVERY = {**NETWORKS, "attention": (Attention, (40,))}
LOSSES = {"squared error": SquaredError(), "cross-entropy": CrossEntropy()}


def seen(name, loss, rounds=2, moved=0.0, **noise):
    """Broadcasts of a model that moves by a random step between rounds."""
    make, shape = EVERY[name]
    model = built(make)
    inputs, _ = records(model, shape)
    targets = torch.nn.functional.one_hot(torch.arange(len(inputs)) % OUTPUTS, OUTPUTS).double()
    veil = Veil(entropy=Entropy.for_tests(3), additive=100.0, **noise)
    observed, chance = observe(veil, model, inputs, targets, loss, rounds=1), torch.Generator().manual_seed(5)
    found = [*observed.rounds]
    for _ in range(rounds - 1):
        with torch.no_grad():
            for value in model.parameters():
                value += moved * value.std() * torch.randn(value.shape, generator=chance, dtype=value.dtype)
        broadcast = veil.perturb(model, analyse(model, inputs[:2]), loss).broadcast
        found.append(Round(copy.deepcopy(broadcast), veil.client_view(model, broadcast)))
    return model, inputs, dataclasses.replace(observed, model=found[-1].model, rounds=tuple(found))


@pytest.mark.parametrize(("groups", "loss"), [(1, "cross-entropy"), (OUTPUTS, "squared error")])
@pytest.mark.parametrize("name", EVERY)
def test_while_the_model_stands_still_two_broadcasts_give_it_away_exactly(name, groups, loss):
    model, inputs, observed = seen(name, LOSSES[loss], groups=groups)
    assert apart(centred(observed).model, model, inputs) > 1e-3
    assert apart(two_broadcasts(observed).model, model, inputs) < 1e-7


@pytest.mark.parametrize(("name", "groups"), [("mlp", 1), ("mlp", OUTPUTS), ("batchnorm", OUTPUTS)])
def test_while_the_model_moves_the_error_is_about_as_large_as_a_step(name, groups):
    model, inputs, observed = seen(name, SquaredError(), rounds=6, moved=1e-3, groups=groups)
    offset = apart(centred(observed).model, model, inputs)
    two, six = (apart(attack(observed).model, model, inputs) for attack in (two_broadcasts, six_broadcasts))
    assert two < 0.05
    assert max(two, six) < offset / 4


def test_one_broadcast_or_the_same_one_twice_does_not_apply():
    _, _, observed = seen("mlp", SquaredError())
    once = dataclasses.replace(observed, rounds=observed.rounds[-1:])
    twice = dataclasses.replace(observed, rounds=observed.rounds[-1:] * 2)
    for short in (once, twice):
        with pytest.raises(DoesNotApply, match="two broadcasts of different rounds"):
            two_broadcasts(short)


def test_a_plain_model_has_no_veil_to_remove():
    make, shape = NETWORKS["mlp"]
    model = built(make)
    inputs, targets = records(model, shape)
    with pytest.raises(DoesNotApply, match="no veil"):
        two_broadcasts(observe(Plain(), model, inputs, targets, SquaredError()))


def test_no_record_is_used():
    model, inputs, observed = seen("mlp", SquaredError(), groups=OUTPUTS)
    blind = dataclasses.replace(
        observed, inputs=torch.zeros_like(observed.inputs), targets=torch.zeros_like(observed.targets)
    )
    assert apart(two_broadcasts(blind).model, model, inputs) < 1e-7


def planted(rounds, groups, chance, *, anew=True, drift=0.0, uneven=1.0):
    """Heads with noise of known sizes; the first half of the numbers moves `uneven` times as far as the rest."""
    numbers = 60
    values = torch.randn(numbers, generator=chance, dtype=torch.float64)
    noise = torch.randn(groups, numbers, generator=chance, dtype=torch.float64)
    sizes, heads = torch.randn(rounds, groups, generator=chance, dtype=torch.float64), []
    for size in sizes:
        noise = torch.randn(groups, numbers, generator=chance, dtype=torch.float64) if anew else noise
        heads.append(Heads(values + size @ noise, noise))
        step = drift * torch.randn(numbers, generator=chance, dtype=torch.float64)
        step[: numbers // 2] *= uneven
        values = values + step
    return heads, sizes


@pytest.mark.parametrize("groups", [1, 5])
def test_the_fit_finds_planted_noise(groups):
    heads, sizes = planted(3, groups, torch.Generator().manual_seed(1))
    assert torch.allclose(fit_noise(heads), sizes, atol=1e-9)


def test_numbers_that_move_little_decide():
    errors = {"all alike": 0.0, "weighted": 0.0}
    for seed in range(20):
        heads, sizes = planted(6, 1, torch.Generator().manual_seed(seed), drift=1e-3, uneven=100.0)
        errors["weighted"] += float((fit_noise(heads) - sizes).abs().mean())
        design = torch.zeros(5, 60, 6, dtype=torch.float64)
        for t in range(5):
            design[t, :, t], design[t, :, t + 1] = heads[t].noise[0], -heads[t + 1].noise[0]
        change = torch.stack([heads[t].values - heads[t + 1].values for t in range(5)])
        plain = torch.linalg.lstsq(design.flatten(0, 1), change.flatten()[:, None]).solution
        errors["all alike"] += float((plain - sizes).abs().mean())
    assert errors["weighted"] < errors["all alike"] / 3


def test_noise_that_is_kept_shows_only_its_changes():
    heads, sizes = planted(2, 1, torch.Generator().manual_seed(2), anew=False)
    found = fit_noise(heads)
    assert torch.allclose(found[0] - found[1], sizes[0] - sizes[1], atol=1e-6)
    assert not torch.allclose(found, sizes, atol=1e-2)


def test_the_nearest_candidates_of_consecutive_rounds_are_the_true_ones():
    chance = torch.Generator().manual_seed(3)
    heads, sizes = planted(4, 3, chance, drift=0.05)
    candidates, places = [], [2, 0, 1, 2]
    for size, place in zip(sizes, places, strict=True):
        every = torch.randn(3, 3, generator=chance, dtype=torch.float64)
        every[place] = size
        candidates.append(every)
    assert pick_candidates(heads, candidates) == places


def test_it_takes_the_factors_into_account(monkeypatch):
    """Necessity: with the head's columns as received, two broadcasts do not fit."""
    from fedveil.attacks import broadcasts

    form = broadcasts.canonical_form

    def blind(*asked, **more):
        found = form(*asked, **more)
        return found._replace(factors=torch.ones_like(found.factors))

    model, inputs, observed = seen("mlp", SquaredError(), groups=OUTPUTS)
    monkeypatch.setattr(broadcasts, "canonical_form", blind)
    assert apart(two_broadcasts(observed).model, model, inputs) > 1e-2
