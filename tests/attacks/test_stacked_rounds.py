"""Records from several rounds: PPDL's noise averages out, and DBCL's sketches determine weights and record."""

import dataclasses

import pytest
import torch
from tests.configs import config_of

from fedveil.attacks.dbcl import record
from fedveil.attacks.first_layer import from_plain_difference
from fedveil.attacks.observed import DoesNotApply
from fedveil.attacks.ppdl import rank_one, stacked
from fedveil.data import load
from fedveil.defences import DBCL, PPDL, Plain, registry
from fedveil.federation import Federation
from fedveil.models import mlp
from fedveil.studies.audit.rebuild import quality, rebuild
from fedveil.studies.observation import observe

DATA = load("digits")
RECORDS = DATA.train.inputs.double()


def seen_by_a_client(defence, rounds, *, own=100, victim=1, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = mlp(64, 10).double()
    last = slice(1000, 1000 + victim)
    parts = [(RECORDS[:own], DATA.train.targets[:own]), (RECORDS[last], DATA.train.targets[last])]
    federation = Federation(
        network, parts, defence, lambda p: torch.optim.SGD(p, 0.1), batch_size=4, fuse=False, seed=seed
    )
    return observe(federation, rounds), RECORDS[1000]


def test_rank_one_fits_the_numbers_that_are_there():
    chance = torch.Generator().manual_seed(0)
    factors, wanted = torch.randn(40, generator=chance).double(), torch.randn(10, generator=chance).double()
    sent = (torch.rand(40, 10, generator=chance) < 0.5).double()
    found = rank_one(torch.outer(factors, wanted) + 1e3 * (1 - sent), sent)
    assert abs(float(found @ wanted / wanted.norm())) > 1 - 1e-9


@pytest.mark.parametrize("seed", range(2))
def test_ppdl_s_noise_averages_out_over_rounds(seed):
    figures = {}
    for rounds in (2, 12):
        observed, true = seen_by_a_client(PPDL(1.0, 1e-2, seed=seed), rounds, seed=seed)
        figures[rounds] = quality(stacked(observed).clamp(0, 1), true, 1.0)
        published = quality(from_plain_difference(observed).clamp(0, 1), true, 1.0)
    assert figures[12] > figures[2] + 3  # about 10 log10(11) dB where noise is all there is
    assert figures[12] > published + 6
    assert published < quality(observed.inputs.mean(0), true, 1.0) + 2


def test_ppdl_s_selection_does_not_hide_a_record_that_is_the_same_in_all_rows():
    observed, true = seen_by_a_client(PPDL(0.1, seed=0), 6)
    found, published = (quality(a(observed).clamp(0, 1), true, 1.0) for a in (stacked, from_plain_difference))
    assert found > published
    assert found > quality(observed.inputs.mean(0), true, 1.0) + 10
    observed, true = seen_by_a_client(Plain(), 2)
    assert torch.allclose(stacked(observed), true, atol=1e-9)
    with pytest.raises(DoesNotApply, match="two broadcasts"):
        stacked(dataclasses.replace(observed, rounds=observed.rounds[-1:]))


@pytest.mark.parametrize(("q", "rounds"), [(2, 5), (3, 7)])
def test_sketches_give_the_record(q, rounds):
    observed, true = seen_by_a_client(DBCL(q, seed=3), rounds)
    assert torch.allclose(record(observed), true, atol=1e-6)


def test_the_attacker_s_own_part_must_be_taken_off():
    observed, true = seen_by_a_client(DBCL(2, seed=3), 5)
    own = observed.rounds[0].upload
    zero = dataclasses.replace(own, gradients={name: 0 * value for name, value in own.gradients.items()})
    blind = tuple(dataclasses.replace(seen, upload=seen.upload and zero) for seen in observed.rounds)
    found = record(dataclasses.replace(observed, rounds=blind))
    floor = quality(observed.inputs.mean(0), true, 1.0)
    assert quality(found.clamp(0, 1), true, 1.0) < floor + 3


def test_many_records_in_a_batch_hide_one_another():
    observed, true = seen_by_a_client(DBCL(2, seed=3), 5, victim=64)
    assert quality(record(observed).clamp(0, 1), true, 1.0) < quality(observed.inputs.mean(0), true, 1.0) + 3


def test_too_few_sketches_and_other_broadcasts_are_refused():
    with pytest.raises(DoesNotApply, match="64 equations per unit for 64 inputs"):
        record(seen_by_a_client(DBCL(2, seed=3), 2)[0])
    with pytest.raises(DoesNotApply, match="not sketched"):
        record(seen_by_a_client(Plain(), 2)[0])


def broken(observed):
    """A rebuilder with a bug."""
    raise ValueError("no such layer")


def test_each_rebuilder_applies_or_says_why_not(monkeypatch):
    own = {
        "broken": f"{__name__}:broken",
        "sketches": "fedveil.attacks.dbcl:record",
        "rows": "fedveil.attacks.ppdl:stacked",
    }
    mine = dataclasses.replace(registry.find("plain"), rebuilders=own, rebuild_rounds=3)
    monkeypatch.setattr(registry, "_KNOWN", {**registry._KNOWN, "plain": mine})
    found = rebuild(lambda share, what: None, config_of(data="digits", defence="plain"), DATA, 1)
    assert set(found.psnr) == {"as published", "rows", "floor"}
    assert found.left_out == {
        "broken": "failed: ValueError: no such layer",
        "sketches": "the first layer is not sketched",
    }
    bare = config_of(data="digits", defence="plain", bias=False)
    found = rebuild(lambda share, what: None, bare, DATA, 1)
    assert not found.psnr
    assert found.left_out["as published"].startswith("the network does not begin with a Linear with a bias")
