"""The audit: the model as received is near chance, adaptive attackers are near the truth."""

import json
import subprocess
import sys

import pytest
import torch
from tests.configs import config_of
from torch import nn

from fedveil import cli
from fedveil.attacks.scores import Estimate
from fedveil.attacks.whitebox import Recipe
from fedveil.data import Data, DataPart
from fedveil.runs.build import build_federation, load_data
from fedveil.studies.audit.page import NETWORK_BROADCASTS, UNDEFENDED, show
from fedveil.studies.audit.results import AuditResult, Guessing, Members, ModelFigures, average_members
from fedveil.studies.audit.run import constant_answer, infer_members
from fedveil.studies.federations import observe
from fedveil.studies.gradients.server_results import Curious
from fedveil.studies.jobs import Failure
from fedveil.studies.membership.attacks import AttackScores, RecordAttacks, ShadowAttacks, divide_records

MAX_MODULES = 187  # lower it with every import that becomes unnecessary


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audit")
    words = ["--data", "digits", "--train-size", "300", "--clients", "2", "--loss", "squared_error", "--groups", "10"]
    words += ["--epochs", "60", "--workers", "1", "--trials", "2", "--no-server", "--defence", "plain,veil,dbcl"]
    assert cli.main(["audit", *words, "--out", str(folder)]) == 0
    return json.loads((folder / "results.json").read_text())["results"]


def value(results, defence, attacker, name):
    return results[defence]["attackers"][attacker][name]["value"]


def test_an_adaptive_attacker_has_the_model_and_a_published_one_has_nothing(results):
    assert value(results, "veil", "as published", "agreement") < 0.35  # one in ten on average over secrets
    assert results["veil"]["broadcasts"] == 10
    for attacker, least in (("offset removed", 0.9), ("two broadcasts, no data", 0.98), ("own labels", 0.95)):
        assert value(results, "veil", attacker, "agreement") >= least
    assert value(results, "plain", "as published", "agreement") == 1.0
    assert value(results, "dbcl", "sketches stacked", "agreement") > value(results, "dbcl", "as published", "agreement")


def test_membership_follows_the_model_that_the_attacker_has(results):
    undefended, fitted = (
        results[defence]["attackers"][attacker]["membership"]["attacks"]["loss by class"]["auc"]
        for defence, attacker in (("plain", "as published"), ("veil", "own labels"))
    )
    assert abs(fitted["value"] - undefended["value"]) < 0.05
    assert undefended["low"] > 0.5


def test_every_membership_attack_is_run_on_the_broadcasts_that_it_can_afford(results):
    names = ["RMIA", "loss", "loss by class", "white-box network"]
    for defence, found in results.items():
        for figures in found["attackers"].values():
            attacks = figures["membership"]["attacks"]
            assert sorted(attacks) == names
            assert attacks["loss"]["broadcasts"] == (10 if defence == "veil" else 1)
            assert attacks["white-box network"]["broadcasts"] == (NETWORK_BROADCASTS if defence == "veil" else 1)


def test_records_are_rebuilt_from_veiled_broadcasts_too(results):
    built = results["veil"]["rebuilt"]
    assert built["two broadcasts, own records"]["value"] > built["floor"]["value"]
    assert built["as published"]["value"] < built["two broadcasts, own records"]["value"]
    assert results["plain"]["rebuilt"]["as published"]["value"] > 40


def point(value):
    return Estimate(value, value, value)


def member_attack(known, auc, tpr=0.1):
    return AttackScores(point(0.6), point(auc), {"0.01": point(tpr), "0.001": None}, known=known)


def audit(agreement=1.0, auc=0.7, psnr=40.0, guess=0.1, name="adaptive", **others):
    """The audit of a federation in which one attacker reaches these figures."""
    view = ModelFigures(point(agreement), membership=Members({"loss": member_attack(0.5, auc)}))
    built = {name: point(psnr), "floor": point(11.0)} if psnr else {}
    figures = {name: view}, built, Guessing(guess, guess)
    return AuditResult("accuracy", 1.0, 1.0, 0.0, "a", 1, 20, *figures, **others)


def sections(shown):
    return {section.title: section for section in (*shown.first, *shown.sections)}


def test_verdicts_are_beside_the_undefended_federation_and_guessing():
    plain = audit()
    shown = show({"veil": audit(1.0, 0.6, 11.0), "spn": audit(0.1, 0.7, 40.0), "ppdl": Failure("x"), UNDEFENDED: plain})
    assert sections(shown)["Verdict"].rows == [
        ["veil", "LEAK", "PARTIAL LEAK", "PROTECTED"],
        ["spn", "PROTECTED", "LEAK", "LEAK"],
        ["ppdl", "failed", "", ""],
    ]
    assert "The model: LEAK (veil 100 %), PROTECTED (spn 10 %); guessing 10 %." in shown.verdict
    guessing = dict(zip(shown.header, shown.rows[-1], strict=True))
    assert (guessing["defence"], guessing["agreement, %"], guessing["accuracy, %"]) == ("guessing", "10.0", "10.0")
    assert show({"plain": Failure("x"), "veil": plain}).verdict.startswith("No verdict")
    assert show({"plain": plain}).verdict.startswith("By the strongest attacker: The model: LEAK (no defence 100 %)")
    unmeasured = show({"veil": audit(psnr=40.0), UNDEFENDED: audit(psnr=None)})
    assert sections(unmeasured)["Verdict"].rows[0][3] == "not measured"


def test_the_attack_is_chosen_on_known_records_and_never_on_the_test():
    found = Members({"loss": member_attack(known=0.7, auc=0.6), "RMIA": member_attack(known=0.6, auc=0.9)})
    assert (found.attack, found.best.auc.value) == ("loss", 0.6)


def test_every_attack_is_averaged_over_the_broadcasts_on_which_it_ran():
    both = {"loss": member_attack(0.5, 0.5), "white-box network": member_attack(0.9, 0.8)}
    found = average_members([Members(both, {"RMIA": "no classes"}), Members({"loss": member_attack(0.7, 0.6)})])
    assert found.attacks["loss"].known == pytest.approx(0.6)
    assert found.attacks["loss"].auc.value == pytest.approx(0.55)
    assert [one.broadcasts for one in found.attacks.values()] == [2, 1]
    assert found.attacks["loss"].tpr["0.001"] is None
    assert found.left_out == {"RMIA": "no classes"}


def test_the_page_names_attackers_that_did_not_run_and_why():
    found = audit(
        *(0.1, 0.5, None),
        inapplicable={"two rounds": "there is one broadcast"},
        not_rebuilt={"as published": "the first layer is a convolution"},
        server=Curious([Failure("no images")]),
    )
    found.attackers["adaptive"].membership.left_out["RMIA"] = "the targets have no classes"
    shown = sections(show({"plain": found, "b": Failure("why")}))
    assert shown["Attackers that did not run"].paragraphs == [
        "plain, two rounds: does not apply: there is one broadcast",
        "plain, as published: rebuilds no records: the first layer is a convolution",
        "plain, curious server: no images",
    ]
    rows = shown["Membership, attack by attack"].rows
    assert [row[2:4] for row in rows] == [["loss *", "0.500"], ["RMIA", "the targets have no classes"]]


def test_without_classes_the_network_and_the_loss_still_attack_and_there_are_no_shadows(tmp_path):
    config = config_of(data="digits", train_size=120, clients=2, hidden=12, epochs=2)
    whole = load_data(config)
    parts = [DataPart(part.tensor, part.targets.float()[:, None] / 10) for part in (whole.train, whole.test)]
    data = Data("numbers", *parts)
    federation, records = build_federation(config, data), divide_records(config, data, everyone=True)
    shadows = ShadowAttacks(config, tmp_path, 2, False)
    found = infer_members(RecordAttacks(records, shadows, Recipe(2)), observe(federation), False)
    assert set(found.attacks) == {"loss", "white-box network"}
    assert set(found.left_out) == {"loss by class", "RMIA"}
    assert set(infer_members(RecordAttacks(records, shadows, None), observe(federation), False).attacks) == {"loss"}


class Threshold(nn.Module):
    """Answers class 1 where the input is above the threshold."""

    def __init__(self, threshold):
        super().__init__()
        self.threshold = nn.Parameter(torch.tensor(threshold))

    def forward(self, inputs):
        return torch.cat([self.threshold.expand(len(inputs), 1), inputs], 1)


@pytest.mark.parametrize("threshold", [2.5, 6.5, 99.0])
def test_guessing_is_the_best_constant_answer(threshold):
    inputs, classes = torch.arange(10.0)[:, None], torch.tensor([0, 0, 0, 0, 0, 0, 0, 1, 1, 1])
    data = Data("x", DataPart(inputs, classes), DataPart(inputs, classes), classes=("no", "yes"))
    model = Threshold(threshold)
    answers = model(inputs).argmax(1)
    best = [max(float((truth == constant).double().mean()) for constant in (0, 1)) for truth in (answers, classes)]
    assert constant_answer(model, data) == Guessing(*best)


BUILD_AUDIT = """
import sys
from pathlib import Path
from fedveil.cli.studies import AuditCommand
from fedveil.studies.attack import AttackRequest

audit = AuditCommand.parse("fedveil audit", ["--data", "digits"])
audit.study.graph(AttackRequest(audit.config.changed(defence="veil"), ("veil",), audit.attack), Path("unused"))
print(*(name for name in sys.modules if name.partition(".")[0] == "fedveil"))
"""


def test_an_audit_imports_neither_the_paper_nor_flower_nor_flare():
    done = subprocess.run([sys.executable, "-c", BUILD_AUDIT], capture_output=True, text=True, check=True)
    modules = done.stdout.split()
    foreign = ("fedveil.studies.paper", "fedveil.flower", "fedveil.nvflare")
    assert not [name for name in modules if name.startswith(foreign)]
    assert len(modules) <= MAX_MODULES
