"""The attack network wins where there is something to win, and only there."""

import functools

import pytest
import torch
from tests.attacks.leaking import learnt_by_heart, records

from fedveil.attacks.features import record_features
from fedveil.attacks.scores import auc, balanced_accuracy, best_threshold
from fedveil.attacks.whitebox import Recipe, select, standardised, train_attack
from fedveil.errors import BadArgument
from fedveil.scheme import SquaredError

COUNT = 600  # of each: own records, victims, known and fresh non-members


@functools.cache
def parts(trained_on_members):
    """Features of own, known, victims and fresh, of a network that saw own and victims, or none of them."""
    inputs, targets = records(4 * COUNT, seed=1)
    members = slice(0, 2 * COUNT)
    taught = (inputs[members], targets[members]) if trained_on_members else records(2 * COUNT, seed=2)
    net = learnt_by_heart(*taught)
    found = record_features(net, inputs, targets, SquaredError(), extras=("label", "loss", "gradient"))
    own, victims, known, fresh = (select(found, slice(k * COUNT, (k + 1) * COUNT)) for k in range(4))
    return own, known, victims, fresh


def only(names, features):
    return [{name: part[name] for name in names} for part in features]


ALL = ("last", "second", "third", "label", "loss", "gradient")


@pytest.mark.parametrize("names", [("last",), ALL])
def test_it_wins_on_a_model_that_leaks(names):
    own, known, victims, fresh = only(names, parts(True))
    done = train_attack(own, known, recipe=Recipe(epochs=15))
    assert auc(done.score(victims), done.score(fresh)).value > 0.95
    threshold = best_threshold(*done.held)
    assert balanced_accuracy(done.score(victims), done.score(fresh), threshold).value > 0.9
    assert not done.collapsed


@pytest.mark.parametrize("telling", ["last", "second", "third"])
def test_it_finds_the_layer_that_tells(telling):
    chance = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(4, COUNT, 8, generator=chance) for name in ("last", "second", "third")}
    drawn[telling][:2] += 1  # own and victims
    own, victims, known, fresh = ({name: values[k] for name, values in drawn.items()} for k in range(4))
    done = train_attack(own, known, recipe=Recipe(epochs=15))
    assert auc(done.score(victims), done.score(fresh)).value > 0.95


def planted(shape, where, seed=0):
    """Own, victims, known and fresh: noise, in which members are 1 larger at the places `where` of every record."""
    drawn = torch.randn(4, COUNT, *shape, generator=torch.Generator().manual_seed(seed))
    drawn[(slice(0, 2), slice(None), *where)] += 1
    return [{"third": part} for part in drawn]


def test_it_finds_a_leak_in_some_pixels_of_a_map_that_its_mean_hides():
    own, victims, known, fresh = planted((4, 6, 6), (1, slice(0, 3), slice(0, 3)))
    for part in (own, victims):
        part["third"][:, 1, 3:, 3:] -= 1  # the mean over pixels is that of non-members
    done = train_attack(own, known, recipe=Recipe(epochs=15))
    assert auc(done.score(victims), done.score(fresh)).value > 0.95
    means = [{"third": part["third"].mean((2, 3))} for part in (own, victims, known, fresh)]
    pooled = train_attack(means[0], means[2], recipe=Recipe(epochs=15))
    assert auc(pooled.score(means[1]), pooled.score(means[3])).value < 0.6


def test_it_finds_a_leak_in_some_steps_of_a_sequence():
    own, victims, known, fresh = planted((6, 4), (slice(0, 2), slice(0, 4)))
    done = train_attack(own, known, recipe=Recipe(epochs=15))
    assert auc(done.score(victims), done.score(fresh)).value > 0.95


@pytest.mark.parametrize("names", [("last",), ALL])
def test_it_guesses_on_a_model_that_cannot_leak(names):
    own, known, victims, fresh = only(names, parts(False))
    done = train_attack(own, known, recipe=Recipe(epochs=15))
    assert 0.5 in auc(done.score(victims), done.score(fresh))
    assert 0.5 in balanced_accuracy(done.score(victims), done.score(fresh), best_threshold(*done.held))


def test_a_network_without_anything_to_see_is_seen_to_collapse():
    nothing = {"last": torch.zeros(100, 3)}
    done = train_attack(nothing, nothing, recipe=Recipe(epochs=3))
    assert done.collapsed
    assert done.epochs[done.chosen].train == 0.5


def test_the_same_seed_gives_the_same_network_and_every_epoch_is_shown():
    own, known, victims, _ = only(("last",), parts(True))
    seen = []

    def watch(number, score):
        seen.append((number, score(victims)))

    first = train_attack(own, known, recipe=Recipe(epochs=5), on_epoch=watch)
    again = train_attack(own, known, recipe=Recipe(epochs=5))
    assert [number for number, _ in seen] == list(range(5))
    assert torch.equal(seen[first.chosen][1], first.score(victims))  # the chosen epoch's network is the one kept
    assert torch.equal(first.score(victims), again.score(victims))
    assert max(epoch.validation for epoch in first.epochs) == first.epochs[first.chosen].validation


def test_standardising_takes_out_scale_and_offset():
    chance = torch.Generator().manual_seed(0)
    values = torch.randn(50, 4, generator=chance)
    values[:, 3] = 7.0
    moved = values * torch.tensor([1e3, 1e-3, 2.0, 1.0]) + 5
    plain, other = standardised({"last": values}), standardised({"last": moved})
    assert torch.allclose(plain({"last": values})["last"], other({"last": moved})["last"], atol=1e-2)
    assert (plain({"last": values})["last"][:, 3] == 0).all()


def test_standardising_takes_the_factors_of_channels_out_of_maps():
    values = torch.randn(50, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    values[:, 2] = 7.0
    moved = values * torch.tensor([1e3, 1e-3, 2.0]).reshape(1, 3, 1, 1)
    plain, other = standardised({"third": values}), standardised({"third": moved})
    same = plain({"third": values})["third"]
    assert torch.allclose(same, other({"third": moved})["third"], atol=1e-4)
    assert torch.allclose(same[:, :2].mean((0, 2, 3)), torch.zeros(2), atol=1e-6)
    assert (same[:, 2] == 0).all()


def test_too_few_records_and_bad_recipes_are_refused():
    few = {"last": torch.zeros(3, 2)}
    with pytest.raises(BadArgument, match="there are 3 known records of each kind"):
        train_attack(few, few)
    with pytest.raises(BadArgument, match="0 epochs"):
        Recipe(epochs=0)
