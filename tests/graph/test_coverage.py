"""The coverage of a plan, and the values that clients know."""

import re

import pytest
import torch
from tests.oracle import Network, built, perturb
from tests.zoo import ZOO
from torch import nn

import fedveil
from fedveil import errors
from fedveil.defences import Veil
from fedveil.defences.veil import VeilServer


def half_bare():
    return nn.Sequential(nn.Linear(5, 6), Network(lambda _, x: torch.special.i0(x)), nn.Linear(6, 3))


def test_each_value_counts_under_the_strongest():
    layers = (nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, 3))
    plan = fedveil.analyse(nn.Sequential(*layers), torch.zeros(2, 5))
    counts = {"scaled": 64 + 27, "signed": 49, "moved": 36, "bare": 0}  # GELU allows permutations, tanh signs
    assert plan.shares == pytest.approx({name: count / (36 + 49 + 64 + 27) for name, count in counts.items()})
    assert repr(plan) == "<Plan of Sequential: coverage 100.0%, head 6, 15 symmetric units>"


def test_an_operation_without_a_rule_leaves_values_bare_and_the_plan_and_a_warning_say_so():
    model = built(half_bare)
    with pytest.warns(UserWarning, match=r"63\.2% of the parameter values are sent .* because 1 \(special_i0\)"):
        plan = fedveil.analyse(model, torch.zeros(2, 5))
    assert plan.pinned == (("1 (special_i0)", "there is no rule for it"),)
    assert "1 (special_i0): there is no rule for it" in str(plan)
    sent = perturb(model, plan).broadcast.parameters
    same = sum(int((sent[name] == p).sum()) for name, p in model.named_parameters())  # bit for bit
    assert same / sum(p.numel() for p in model.parameters()) == pytest.approx(plan.shares["bare"])
    assert plan.coverage == 1 - plan.shares["bare"]


@pytest.mark.parametrize(
    ("settings", "counts"),
    [
        ({"multiplicative": 1.0}, {"scaled": 27, "signed": 49 + 56, "moved": 36 + 8, "bare": 0}),
        ({"multiplicative": 1.0, "permute": False}, {"scaled": 27, "signed": 49 + 56, "moved": 0, "bare": 36 + 8}),
        ({"permute": False}, {"scaled": 64 + 27, "signed": 49, "moved": 0, "bare": 36}),
    ],
)
def test_a_run_counts_only_the_noise_that_its_veil_draws(tmp_path, settings, counts):
    layers = (nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, 3))
    records = torch.randn(8, 5), torch.randint(3, (8,))
    federation = fedveil.Federation(nn.Sequential(*layers), [records], Veil(**settings))
    federation.fit(1, folder=tmp_path, verbose=False)
    shares = {name: count / (36 + 49 + 64 + 27) for name, count in counts.items()}
    assert {kind: federation.summary.coverage[kind] for kind in shares} == pytest.approx(shares)
    page = (tmp_path / "report.html").read_text()
    for kind, share in shares.items():
        assert re.search(rf">{kind}</th><td[^>]*>{100 * share:.1f} %<", page)


def test_factors_of_1_have_no_sizes_that_known_values_could_reveal():
    plan = fedveil.analyse(normed(), torch.zeros(2, 3, 2, 2))
    with_factors, without = (Veil(multiplicative=bound).start(plan) for bound in (4.0, 1.0))
    assert VeilServer(with_factors).plan.known.share > VeilServer(without).plan.known.share


def test_a_bound_on_the_coverage_refuses():
    with pytest.raises(errors.TooLittleCovered, match=r"the coverage is 36\.8%, less than min_coverage \(90\.0%\)"):
        fedveil.analyse(half_bare(), torch.zeros(2, 5), min_coverage=0.9)
    with pytest.raises(errors.TooLittleCovered):
        fedveil.Federation(half_bare(), [(torch.zeros(4, 5), torch.zeros(4, 3))], Veil(min_coverage=0.9))
    with pytest.raises(errors.BadArgument, match="min_coverage must be between 0 and 1, got 2"):
        fedveil.analyse(half_bare(), torch.zeros(2, 5), min_coverage=2)


def normed(weight=None):
    layers = [nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 1), nn.ReLU(), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(5 * 4, 3))
    if weight is not None:
        nn.init.uniform_(model[1].weight, *weight)
    return model


def test_a_new_norm_shows_its_factors_and_the_plan_says_what_they_were_to_protect():
    model = normed()
    plan = fedveil.analyse(model, torch.zeros(2, 3, 2, 2))
    assert plan.known.names == ("1.weight",)
    # its own 4 weights and 4 biases, and the signs of the 12 weights before; the next layer keeps its rows' factors
    assert plan.known.share == pytest.approx((8 + 12) / plan.layout.parameters)
    sent = perturb(model, plan).broadcast.parameters
    shown = sent["1.weight"].abs()  # what a client divides out: |r| o 1
    rows = sent["3.weight"][:, :, 0, 0] * shown
    true = model[3].weight[:, :, 0, 0]
    ratio = rows.sort(1).values / rows.abs().sum(1, keepdim=True)
    wanted = (true / true.abs().sum(1, keepdim=True)).sort(1).values
    assert all(any(torch.allclose(r, w, rtol=1e-4) for w in wanted) for r in ratio)  # rows up to their own factor
    before = sent["0.weight"] * sent["1.weight"].sign().view(-1, 1, 1, 1)
    assert all(any(torch.equal(row, true) for true in model[0].weight) for row in before)  # rows up to their order
    assert "Values that clients know (1.weight) reveal the factors" in str(plan)


def test_trained_norms_are_not_known_but_public_ones_are():
    model = normed((0.5, 2.0))
    assert fedveil.analyse(model, torch.zeros(2, 3, 2, 2)).known.share == 0
    plan = fedveil.analyse(model, torch.zeros(2, 3, 2, 2), public=["1", "3.weight"])
    assert plan.known.names == ("1.bias", "1.weight", "3.weight")
    assert plan.known.share == pytest.approx((8 + 12 + 25) / plan.layout.parameters)  # with all of "3", bias included


def test_a_channels_last_model_is_covered_as_any_other():
    build, shape = ZOO["CNN"]
    model = built(build).to(memory_format=torch.channels_last)
    plans = [fedveil.analyse(one, torch.zeros(2, *shape)) for one in (model, built(build))]
    assert plans[0].shares == plans[1].shares
