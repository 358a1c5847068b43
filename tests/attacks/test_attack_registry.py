"""Every defence has its attackers: those listed here, those that its record names, or the generic ones."""

import dataclasses

import pytest
import torch
from tests.attacks.victims import DIGITS, OUTPUTS
from tests.configs import config_of
from tests.oracle import built

from fedveil.attacks import Observation, Round, dbcl, first_layer, generic
from fedveil.attacks.observation import PUBLISHED
from fedveil.attacks.registry import ATTACKERS, GENERIC_ATTACKERS, Attackers, attacker_views, find_attackers
from fedveil.defences import registry
from fedveil.defences.registry import DEPLOYED, INCLUDED, Record, find
from fedveil.errors import BadArgument
from fedveil.models import mlp
from fedveil.runs.build import build_federation
from fedveil.scheme import SquaredError
from fedveil.studies.audit.run import rebuild
from fedveil.studies.audit.subject import configured_subject
from fedveil.studies.basis import list_specs


def fail(observed):
    """An attacker with a bug."""
    raise ValueError("no such layer")


BUGGY = {"buggy": "failed: ValueError: no such layer"}
OWN = Attackers(models={"buggy": fail})
REBUILDERS = Attackers(
    generic={},
    rebuilders={"buggy": fail, "sketches": dbcl.rebuild_record, "rows": first_layer.rebuild_selected_record},
    rebuild_rounds=3,
)


def test_every_built_in_defence_has_attackers():
    assert list(ATTACKERS) == list(INCLUDED)
    for record in INCLUDED.values():
        own = find_attackers(record)
        assert own == ATTACKERS[record.name]
        assert set(own.strongest) <= set(own.models)
        assert (bool(own.strongest), own.generic) == (bool(own.models), {})
    assert [own.broadcasts_needed for own in (*ATTACKERS.values(), Attackers())] == [
        1,
        6,
        1,
        6,
        1,
        *[1] * len(DEPLOYED),
        6,
    ]
    assert ATTACKERS["veil"].shadows == "plain"


def test_a_record_keeps_its_attackers_or_names_those_of_another_package_or_gets_the_generic_ones(monkeypatch):
    assert find_attackers(dataclasses.replace(find("veil"), name="mine", settings={})) is ATTACKERS["veil"]
    assert find_attackers(Record("mine", "ours", "my_package:Mine")) == Attackers()
    assert Attackers().generic is GENERIC_ATTACKERS
    harder = dataclasses.replace(find("plain"), attackers=f"{__name__}:OWN")
    assert find_attackers(harder) is OWN
    monkeypatch.setitem(registry._RECORDS, "harder", harder)
    assert {f"{__name__}:OWN", __name__} <= set(list_specs(config_of(defence="harder")))
    for name, why in (("fail", "Attackers, got function"), ("NONE", "has no attribute 'NONE'")):
        with pytest.raises(BadArgument, match=why):
            find_attackers(dataclasses.replace(harder, attackers=f"{__name__}:{name}"))


def test_attackers_that_fail_or_do_not_apply_are_listed_and_the_others_run():
    models = [built(lambda: mlp(12, OUTPUTS, hidden=8), seed) for seed in range(3)]
    inputs, seen = torch.randn(30, 12).double(), tuple(Round(model, model) for model in models)
    known = inputs, models[0](inputs).detach(), SquaredError(), 0.1, 0.5
    found, left_out = attacker_views(OWN, Observation("any", models[-1], models[-1], seen, *known))
    assert (set(found), left_out) == ({PUBLISHED, *GENERIC_ATTACKERS}, BUGGY)
    mean = Attackers(models={"mean": generic.average_broadcasts}, generic={})
    found, left_out = attacker_views(mean, Observation("any", models[-1], models[-1], seen[:1], *known))
    assert (set(found), left_out) == ({PUBLISHED}, {"mean": "there is only one broadcast"})


def test_each_rebuilder_applies_or_says_why_not(monkeypatch):
    mine = dataclasses.replace(find("plain"), attackers=f"{__name__}:REBUILDERS")
    monkeypatch.setitem(registry._RECORDS, "plain", mine)

    def run(**values):
        config = config_of(data="digits", defence="plain", **values)
        return rebuild(
            lambda share, what: None, configured_subject(config, build_federation(config, DIGITS), DIGITS), 1
        )

    psnr, left_out = run()
    assert set(psnr) == {PUBLISHED, "rows", "floor"}
    assert left_out == {**BUGGY, "sketches": "the first layer is not sketched"}
    psnr, left_out = run(bias=False)
    assert not psnr
    assert left_out[PUBLISHED].startswith("the first layer of the network is not a Linear with a bias")
