"""A run's description: what an audit needs and no secret; defences are built again from it."""

import json

import pytest
import torch
from tests.small import federation

from fedveil.defences import DBCL, PPDL, SPN, Plain, Private, Veil
from fedveil.defences.description import build_from_description, copy_defence, describe_defence
from fedveil.errors import BadArgument
from fedveil.federation.description import DESCRIPTION, read_description
from fedveil.privacy import Privacy
from fedveil.scheme import Entropy

DEFENCES = {
    "plain": lambda: Plain(),
    "veil": lambda: Veil(groups=2, additive=3.0, multiplicative=1.5, decoys=3, min_coverage=0.1),
    "ppdl": lambda: PPDL(0.5, 0.01, "median"),
    "dbcl": lambda: DBCL(3, skip_last=False),
    "spn": lambda: SPN(0.2, bits=16),
    "private": lambda: Private(Veil(groups=2), 2.0, 1.5, budget=4.0),
}


@pytest.mark.parametrize("name", DEFENCES)
def test_a_defence_is_built_again_from_its_description(name):
    defence = DEFENCES[name]()
    described = json.loads(json.dumps(describe_defence(defence)))
    again = build_from_description(described, "audit.json")
    assert type(again) is type(defence)
    assert describe_defence(again) == describe_defence(defence)
    assert described["base"] == ("veil" if name == "private" else name)


def test_secrets_are_not_described():
    found = json.dumps([describe_defence(Veil(entropy=Entropy.for_tests(7))), describe_defence(PPDL(seed=7))])
    assert "entropy" not in found
    assert "seed" not in found


def test_a_description_builds_only_defences_and_imports_other_packages_only_if_trusted():
    with pytest.raises(BadArgument, match="runs code from another package"):
        build_from_description({"class": "os:system", "arguments": {"command": "true"}}, "audit.json")
    for spec in ("os:system", "fedveil.models:mlp", "fedveil.federation:Limits"):
        with pytest.raises(BadArgument, match="neither a defence nor privacy settings"):
            build_from_description({"class": spec, "arguments": {}}, "audit.json", trust_code=True)
    with pytest.raises(BadArgument, match="cannot be built"):
        build_from_description({"class": "fedveil.defences.veil:Veil", "arguments": {"moat": 1}}, "audit.json")
    with pytest.raises(BadArgument, match="expected a defence, got Privacy"):
        build_from_description({"class": "fedveil.privacy.settings:Privacy", "arguments": {"noise": 1.0}}, "audit.json")


def test_a_copy_spends_no_budget_and_has_the_same_noise():
    defence = Private(Plain(), 2.0, 1.5, budget=4.0)
    copied = copy_defence(defence)
    assert (copied.noise, copied.clip, copied.accountant.budget) == (1.5, 2.0, None)
    assert copied.accountant is not defence.accountant


def test_a_folder_has_the_description_and_another_schema_or_a_damaged_file_is_refused(tmp_path):
    run = federation("veil", privacy=Privacy(noise=1.0, clip=0.5, rate=0.5))
    run.fit(rounds=2, folder=tmp_path)
    found = read_description(tmp_path)
    assert (found.terms.clients, found.terms.remote) == (len(run.shards.sizes), False)
    assert found.defence["base"] == "veil"
    assert found.optimizer == f"{type(run.optimizer).__module__}:{type(run.optimizer).__qualname__}"
    assert found.optimizer_settings["lr"] == run.optimizer.param_groups[0]["lr"]
    path = tmp_path / DESCRIPTION
    text = path.read_text()
    records = torch.cat([run.shards.records(client)[0].flatten() for client in range(found.terms.clients)])
    assert not [value for value in records.tolist() if abs(value) > 1e-3 and repr(value) in text]
    values = json.loads(text)
    for changes in ({"schema": 2}, {"schema": None}, {"clip_norm": "far"}, {"extra": 1}):
        path.write_text(json.dumps(values | changes))
        with pytest.raises(BadArgument, match=r"a schema other than 1|is not valid"):
            read_description(tmp_path)
    path.write_text("[")
    with pytest.raises(BadArgument, match="invalid JSON"):
        read_description(tmp_path)
