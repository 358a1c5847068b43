"""All veiled versions of a network have the same canonical form."""

import pytest
import torch
from tests.attacks.victims import NETWORKS, build_victim, observe_broadcasts

from fedveil.attacks.canonical import canonical_form, flat_values, match_units
from fedveil.attacks.observation import copy_with_values
from fedveil.attacks.veil import analyse_architecture, calibrate
from fedveil.defences import Veil
from fedveil.federation.evaluate import predict
from fedveil.graph.plan import unflatten
from fedveil.scheme import Entropy, SquaredError


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("permute", [True, False])
def test_two_veils_of_one_model_have_the_same_form(name, permute):
    model, inputs, outputs = build_victim(name)
    veil = Veil(entropy=Entropy.for_tests(3), permute=permute)
    observed = observe_broadcasts(veil, model, inputs, outputs, SquaredError())
    plan = analyse_architecture(observed)
    flats = [flat_values(plan, calibrate(observed, seen.broadcast)) for seen in observed.rounds]
    assert not torch.allclose(flats[0], flats[1], rtol=0.1)
    first, *others = (canonical_form(plan, flat).flat for flat in (*flats, flat_values(plan, model)))
    for other in others:
        assert torch.allclose(match_units(plan, other, first), first, rtol=1e-6, atol=1e-6)
    found = copy_with_values(observed.architecture, unflatten(first, plan.layout.entries))
    assert (predict(found, inputs) - outputs).norm() < 1e-6 * outputs.norm()  # it computes the same
