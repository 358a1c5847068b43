"""Attacks as studies: a federation or options that cannot be attacked are refused before anything is trained."""

import pytest
from tests.configs import config_of

from fedveil.errors import BadArgument
from fedveil.studies.attack import AttackRequest
from fedveil.studies.audit.run import AUDIT
from fedveil.studies.gradients.run import GRADIENTS
from fedveil.studies.gradients.server import SERVER
from fedveil.studies.inversion.run import INVERSION
from fedveil.studies.jobs import Failure
from fedveil.studies.membership.run import MEMBERSHIP
from fedveil.studies.poisoning import POISONING
from fedveil.studies.study import gather

DIGITS = {"data": "digits", "train_size": 200, "test_size": None, "defence": "plain"}


@pytest.mark.parametrize(
    ("study", "changes", "options", "what"),
    [
        (GRADIENTS, {"model": "mlp"}, {}, "are not images"),
        (GRADIENTS, {"optimizer": "adamw"}, {}, "only with plain SGD or Adam"),
        (GRADIENTS, {"momentum": 0.9}, {}, "only with plain SGD or Adam"),
        (GRADIENTS, {"train_size": 30}, {}, "30 training records, but the attacker and the victim need 40"),
        (GRADIENTS, {}, {"victim_batch": "1,x"}, "of at most 8, got '1,x'"),
        (GRADIENTS, {}, {"victim_batch": "16"}, "of at most 8, got '16'"),
        (INVERSION, {"labels": None}, {}, "so no class is public"),
        (INVERSION, {"labels": "0-9"}, {}, "make 10 of 10 classes private"),
        (INVERSION, {"labels": "3"}, {}, "make 1 of 10 classes private"),
        (INVERSION, {"model": "mlp"}, {}, "an mlp expects vectors"),
        (INVERSION, {}, {"codes": 0}, "must be at least 1, got 0"),
        (INVERSION, {}, {"codes": 5}, "5 cannot be divided evenly among 4 broadcasts"),
        (POISONING, {}, {"attacks": "sign-flop"}, "there is no attack 'sign-flop'"),
        (POISONING, {}, {"seeds": 0}, "--seeds must be an integer of at least 1"),
        (POISONING, {"hostile": 2}, {}, "krum needs 7 clients to resist 2 hostile clients, got 5"),
        (POISONING, {"hostile": 5}, {"rules": "none"}, "5 of 5 clients"),
        (POISONING, {"hostile": 0}, {"rules": "none"}, "0 of 5 clients"),
        (POISONING, {"aggregator": "krum"}, {"rules": "none"}, "the attack compares all rules"),
        (POISONING, {"data": "diabetes", "train_size": None}, {"rules": "none"}, "it has no classes"),
        (SERVER, {}, {"sums": "2,x"}, "got '2,x'"),
        (SERVER, {}, {"sums": "2,2"}, "got '2,2'"),
        (SERVER, {}, {"sums": "0"}, "got '0'"),
        (SERVER, {}, {"difference": 1}, "--difference must be an integer of at least 2"),
        (SERVER, {}, {"rounds": 0}, "--rounds must be an integer of at least 1"),
    ],
)
def test_what_cannot_be_attacked_is_refused_before_anything_is_trained(tmp_path, study, changes, options, what):
    config = config_of(**{**study.defaults, **DIGITS, **changes})
    with pytest.raises(BadArgument, match=what):
        gather(study, AttackRequest(config, ("plain",), study.options(**options)), tmp_path, workers=1)
    assert not (tmp_path / "jobs").exists()


def test_poisoning_refuses_a_trained_run(tmp_path):
    asked = AttackRequest(config_of(**{**POISONING.defaults, **DIGITS}), ("plain",), POISONING.options(), tmp_path)
    with pytest.raises(BadArgument, match="hostile clients take part in training"):
        POISONING.graph(asked, tmp_path)


@pytest.mark.parametrize("study", [AUDIT, GRADIENTS, INVERSION, MEMBERSHIP, POISONING, SERVER])
def test_a_failed_defence_has_a_row_and_its_reason_comes_first(study):
    config = config_of(**{**study.defaults, **DIGITS})
    shown = study.present(AttackRequest(config, ("veil",), study.options()), {"veil": Failure("diverged")})
    assert shown.verdict.startswith("No verdict")
    assert [row[:2] for row in shown.rows if row[0] == "veil"] == [["veil", "failed"]]
    assert shown.top_sections[0].paragraphs == ["veil: diverged"]
