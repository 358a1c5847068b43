"""The attack network wins where there is something to win, and only there."""

import functools

import pytest
import torch
from tests.attacks.victims import chance, memorise, records

from fedveil.attacks.features import record_features
from fedveil.attacks.scores import auc, balanced_accuracy, best_threshold
from fedveil.attacks.whitebox import Recipe, make_standardiser, select, train_attack
from fedveil.errors import BadArgument
from fedveil.scheme import SquaredError

COUNT = 600  # of each: own records, victims, known and fresh non-members
ALL = ("last", "second", "third", "label", "loss", "gradient")


@functools.cache
def features(trained_on_members):
    """Features of own, victims, known and fresh, of a network that saw own and victims, or none of them."""
    inputs, targets = records(4 * COUNT, seed=1)
    seen = (inputs[: 2 * COUNT], targets[: 2 * COUNT]) if trained_on_members else records(2 * COUNT, seed=2)
    return record_features(memorise(*seen), inputs, targets, SquaredError())


def parts(trained_on_members, names):
    found = {name: features(trained_on_members)[name] for name in names}
    return [select(found, slice(k * COUNT, (k + 1) * COUNT)) for k in range(4)]


def attack(own, victims, known, fresh):
    done = train_attack(own, known, recipe=Recipe(epochs=15))
    return done, auc(done.score(victims), done.score(fresh))


@pytest.mark.parametrize("names", [("last",), ALL])
@pytest.mark.parametrize("leaks", [True, False])
def test_it_wins_on_a_model_that_leaks_and_guesses_on_one_that_cannot(leaks, names):
    own, victims, known, fresh = parts(leaks, names)
    done, area = attack(own, victims, known, fresh)
    accuracy = balanced_accuracy(done.score(victims), done.score(fresh), best_threshold(*done.held_out))
    if leaks:
        assert area.value > 0.95
        assert accuracy.value > 0.9
        assert not done.collapsed
    else:
        assert 0.5 in area
        assert 0.5 in accuracy


def test_it_finds_a_leak_in_some_pixels_of_a_map_that_its_mean_hides_and_in_some_steps_of_a_sequence():
    maps, steps = (torch.randn(4, COUNT, *shape, generator=chance()) for shape in ((4, 6, 6), (6, 4)))
    maps[:2, :, 1, :3, :3] += 1  # own and victims
    maps[:2, :, 1, 3:, 3:] -= 1  # the mean over pixels is that of non-members
    steps[:2, :, :2] += 1
    for values in (maps, steps):
        assert attack(*({"third": part} for part in values))[1].value > 0.95
    assert attack(*({"third": part.mean((2, 3))} for part in maps))[1].value < 0.6


def test_a_network_without_anything_to_see_collapses_and_too_few_records_and_bad_recipes_are_refused():
    nothing = {"last": torch.zeros(100, 3)}
    done = train_attack(nothing, nothing, recipe=Recipe(epochs=3))
    assert done.collapsed
    few = {"last": torch.zeros(3, 2)}
    with pytest.raises(BadArgument, match="only 3 records of each group are known"):
        train_attack(few, few)
    with pytest.raises(BadArgument, match="0 epochs"):
        Recipe(epochs=0)


def test_the_same_seed_gives_the_same_network_and_every_epoch_is_shown():
    own, victims, known, _ = parts(True, ("last",))
    seen = {}
    watch = lambda number, score: seen.update({number: score(victims)})  # noqa: E731
    first = train_attack(own, known, recipe=Recipe(epochs=5), on_epoch=watch)
    again = train_attack(own, known, recipe=Recipe(epochs=5))
    assert list(seen) == list(range(5))
    assert torch.equal(seen[first.epoch], first.score(victims))  # the network of the chosen epoch
    assert torch.equal(first.score(victims), again.score(victims))


@pytest.mark.parametrize(("shape", "offset", "error"), [((), 5, 1e-2), ((1, 1), 0, 1e-4)])
def test_standardising_removes_scale_and_offset_of_units_and_channels(shape, offset, error):
    values = torch.randn(50, 3, *(4 for _ in shape), generator=chance())
    values[:, 2] = 7.0
    moved = values * torch.tensor([1e3, 1e-3, 2.0]).reshape(1, 3, *shape) + offset
    same, other = (make_standardiser({"last": v})({"last": v})["last"] for v in (values, moved))
    assert torch.allclose(same, other, atol=error)
    assert torch.allclose(same[:, :2].transpose(0, 1).flatten(1).mean(1), torch.zeros(2), atol=1e-6)
    assert (same[:, 2] == 0).all()
