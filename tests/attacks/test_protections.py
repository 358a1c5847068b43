"""The attacks of `benchmarks.protections` win where something leaks, and guess where nothing does."""

import numpy as np
import pytest
import torch
from benchmarks.protections.inversion import KNOWN, gain, guesses, server_view
from benchmarks.protections.members import record_scores
from benchmarks.protections.tasks import Protection, new_model, records

from fedveil.attacks.membership import halves
from fedveil.attacks.scores import auc

POOL, POPULATION, SHADOWS = 600, 200, 16


@pytest.mark.parametrize("middle", [0.0, 50.0])
@pytest.mark.parametrize("effect", [3.0, 0.0])
def test_members_are_told_by_confident_models_that_remember_them_and_by_no_others(effect, middle):
    """Log-odds are larger by `effect` deviations for members; around 50, every probability rounds to 1."""
    chance = np.random.default_rng(1)
    difficulty = middle + chance.standard_normal(POOL + POPULATION)
    inside = halves(POOL, SHADOWS, torch.Generator().manual_seed(2))
    member = chance.random(POOL) < 0.5

    def odds(members):
        own = np.concatenate([members, np.zeros(POPULATION, bool)])
        return difficulty + effect * own + chance.standard_normal(POOL + POPULATION)

    found = record_scores(odds(member), np.stack([odds(own) for own in inside]), inside)
    assert set(found) == {"LiRA", "LiRA offline", "RMIA", "RMIA, losses", "loss"}
    if middle > 0:
        del found["RMIA"]  # which compares probabilities
    for name, scores in found.items():
        result = auc(scores[member], scores[~member], level=1 - 0.05 / len(found))  # together 95 %
        assert (result.value > 0.9) if effect else (0.5 in result), (name, result)


@pytest.mark.parametrize(
    ("protection", "known"),
    [
        (Protection(), True),
        (Protection(epsilon=8.0), True),  # the server sees the clipped sum before it adds noise
        (Protection(secure=True, epsilon=8.0), False),
    ],
)
def test_the_server_rebuilds_a_record_unless_its_sum_has_noise(protection, known):
    pytest.importorskip("dp_accounting")
    leak, rows = server_view("digits", protection, new_model("digits", 0), torch.arange(5), 0)
    truth = records("digits").train.tensor[rows].double()
    assert len(truth) == (5 if protection.secure else 1)
    best = max(gain("digits", guess, truth) for guess in guesses(leak))
    assert (best > KNOWN) == known


def test_a_record_is_not_known_from_the_mean_or_from_another():
    every = records("digits").train.tensor.double()
    assert gain("digits", every.mean(0), every[:1]) == pytest.approx(0, abs=1e-9)
    assert max(gain("digits", other, every[:1]) for other in every[1:50]) < KNOWN
