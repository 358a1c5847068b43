"""FLARE's own filters run on a client's update, as FLARE runs them; settings that would disable them are refused."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("nvflare", reason="FLARE is not installed: pip install 'fedveil[nvflare]'")

from nvflare.app_common.filters.svt_privacy import SVTPrivacy
from tests.defences.runs import adam, federation, loss_before_and_after

from fedveil.defences.flare_filters import FlarePercentile, FlareSVT
from fedveil.errors import BadArgument


def arrays(seed=0, scale=1e-2):
    rng = np.random.default_rng(seed)
    return {"a": scale * rng.standard_normal((7, 5)), "b": scale * rng.standard_normal(9)}


def flat(found):
    return np.concatenate([own.ravel() for own in found.values()])


@pytest.mark.parametrize(("percentile", "gamma"), [(10.0, 0.01), (80.0, 0.005), (0.0, 1.0), (100.0, 0.01)])
def test_the_largest_changes_are_sent_truncated(percentile, gamma):
    own = arrays()
    values = flat(own)
    found = flat(FlarePercentile(percentile, gamma).create_filter()(arrays()))
    cutoff = np.quantile(np.abs(values), percentile / 100)
    for value, sent in zip(values, found, strict=True):  # element by element, as its documentation says
        if abs(value) < cutoff:
            assert sent == 0
        else:
            assert sent == math.copysign(min(abs(value), gamma), value)


def test_svt_sends_a_selection_with_noise_of_the_stated_scale():
    fraction, gamma, noise_var = 0.5, 1.0, 4.0
    own = FlareSVT(fraction, 1.0, noise_var, gamma, tau=0.1)
    rng = np.random.default_rng(0)
    values = {"a": rng.uniform(-3, 3, 4000)}
    sent = own.create_filter()({"a": values["a"].copy()})["a"]
    chosen = sent != 0
    assert 0.25 < chosen.mean() <= fraction  # drawn with replacement, so fewer
    noise = sent[chosen] - np.clip(values["a"][chosen], -gamma, gamma)
    scale = 2 * gamma / noise_var  # of a Laplace distribution, whose mean magnitude it is
    error = 6 * scale / math.sqrt(chosen.sum())  # six standard deviations of that mean
    assert abs(np.abs(noise).mean() - scale) < error
    assert abs(noise.mean()) < error * math.sqrt(2)


def test_the_stated_epsilon_is_that_of_flare_s_accountant():
    from nvflare.apis.dxo import DXO, DataKind
    from nvflare.apis.fl_context import FLContext

    own, ledger = FlareSVT(fraction=0.3, epsilon=0.7, noise_var=0.2), SVTPrivacy(0.3, 0.7, 0.2)
    ledger.process(DXO(DataKind.WEIGHT_DIFF, data=arrays()).to_shareable(), FLContext())
    assert own.claimed_epsilon(7 * 5 + 9) == pytest.approx(ledger.get_privacy_spent(), rel=1e-12)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: FlarePercentile(percentile=101), "percentile must be a number from 0 to 100"),
        (lambda: FlarePercentile(gamma=0), "gamma must be a finite number above 0"),
        (lambda: FlareSVT(fraction=0), "fraction must be above 0"),
        (lambda: FlareSVT(epsilon=0), "epsilon must be a finite number above 0"),
        (lambda: FlareSVT(noise_var=-1), "noise_var must be a finite number above 0"),
        (lambda: FlareSVT(tau=1.0), "tau must be a number from 0 to 1e-05"),
    ],
)
def test_settings_with_which_flare_would_send_everything_or_never_end_are_refused(make, what):
    with pytest.raises(BadArgument, match=what):
        make()


def test_a_federation_trains_with_truncated_changes():
    run = federation("mlp", FlarePercentile(), optimizer=adam, loss="cross_entropy")
    before, after = loss_before_and_after(run, 20)
    assert after < before
    assert torch.stack([own.abs().max() for own in run.step().gradients.values()]).max() <= 0.01 * (1 + 1e-9)
