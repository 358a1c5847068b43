"""The audit says what holds: the model as received near chance, adaptive attackers near the truth."""

import json
import re
import subprocess
import sys
from collections import Counter

import pytest
import torch
from tests.configs import config_of
from torch import nn

from fedveil import cli
from fedveil.data import Data, Part
from fedveil.federation.evaluate import predict
from fedveil.runs.build import federation_of, load_data
from fedveil.runs.folder import open_run
from fedveil.studies.audit.members import MAX_LOOKS, MemberAttacks, average_members
from fedveil.studies.audit.page import UNDEFENDED, show
from fedveil.studies.audit.results import AuditResult, Guessing, MemberAttack, Members, ModelFigures
from fedveil.studies.audit.run import constant_answer
from fedveil.studies.estimates import Estimate
from fedveil.studies.gradients.results import Curious
from fedveil.studies.jobs import Failed
from fedveil.studies.membership.attacks import ShadowAttacks
from fedveil.studies.membership.records import divide_records
from fedveil.studies.observation import observe

FEDERATION = ["--data", "digits", "--train-size", "300", "--clients", "2"]
MAX_MODULES = 196  # lower it with every import that becomes unnecessary
SMALL = [*FEDERATION, "--epochs", "60", "--workers", "1", "--trials", "2", "--no-server"]


@pytest.fixture(scope="module")
def audited(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audit")
    arguments = ["audit", *SMALL, "--groups", "10", "--defence", "plain,veil,dbcl", "--out", str(folder)]
    assert cli.main(arguments) == 0
    return folder, json.loads((folder / "results.json").read_text())["results"]


def value(results, defence, attacker, name):
    return results[defence]["attackers"][attacker][name]["value"]


def test_an_adaptive_attacker_has_the_model_and_a_published_one_has_nothing(audited):
    _, results = audited
    assert value(results, "veil", "as published", "agreement") < 0.35  # one in ten on average over secrets
    assert results["veil"]["broadcasts"] == 10
    assert value(results, "veil", "offset removed", "agreement") >= 0.9
    assert value(results, "veil", "two broadcasts, no data", "agreement") >= 0.98
    assert value(results, "veil", "six broadcasts, no data", "agreement") >= 0.98
    assert value(results, "veil", "own labels", "agreement") >= 0.95
    assert value(results, "plain", "as published", "agreement") == 1.0
    assert value(results, "dbcl", "sketches stacked", "agreement") > value(results, "dbcl", "as published", "agreement")


def test_membership_follows_the_model_that_the_attacker_has(audited):
    _, results = audited
    undefended, fitted = (
        results[defence]["attackers"][attacker]["membership"]["attacks"]["loss by class"]["auc"]
        for defence, attacker in (("plain", "as published"), ("veil", "own labels"))
    )
    assert abs(fitted["value"] - undefended["value"]) < 0.05
    assert undefended["low"] > 0.5


def test_every_membership_attack_is_measured_and_the_headline_is_chosen_on_known_records(audited):
    folder, results = audited
    names = ["loss", "loss by class", "white-box network", "RMIA"]
    for defence, found in results.items():
        for figures in found["attackers"].values():
            attacks = figures["membership"]["attacks"]
            assert sorted(attacks) == sorted(names)
            assert attacks["loss"]["broadcasts"] == (10 if defence == "veil" else 1)
            assert attacks["white-box network"]["broadcasts"] == (MAX_LOOKS if defence == "veil" else 1)
    page = (folder / "report.html").read_text()
    for words in ("Membership, attack by attack", "Attackers", "rebuilds records", *names):
        assert words in page


def test_records_are_rebuilt_from_veiled_broadcasts_too(audited):
    _, results = audited
    built = results["veil"]["rebuilt"]
    assert built["two broadcasts, own records"]["value"] > built["floor"]["value"]
    assert built["as published"]["value"] < built["two broadcasts, own records"]["value"]
    assert results["plain"]["rebuilt"]["as published"]["value"] > 40


def test_a_run_s_folder_is_audited_beside_an_undefended_one(tmp_path, capsys):
    run = tmp_path / "run"
    assert cli.main(["train", *FEDERATION, "--epochs", "20", "--defence", "veil", "--out", str(run)]) == 0
    own = ["--trials", "2", "--workers", "1", "--shadows", "0", "--no-network", "--no-server"]
    assert cli.main(["audit", str(run), *own]) == 0
    printed = capsys.readouterr().out
    assert "undefended" in printed
    assert (run / "audit" / "report.html").exists()
    assert cli.main(["audit", str(run), "--defence", "veil"]) == 2
    assert "a run has its own defence" in capsys.readouterr().err


def point(value):
    return Estimate(value, value, value)


def member_attack(known, auc, tpr=0.1):
    return MemberAttack(point(0.6), point(auc), {"0.01": point(tpr), "0.001": None}, known)


def audit(agreement=1.0, auc=0.7, psnr=40.0, guess=0.1, name="adaptive", **others):
    """The audit of a federation in which one attacker reaches these figures."""
    view = ModelFigures(point(agreement), membership=Members({"loss": member_attack(0.5, auc)}))
    built = {name: point(psnr), "floor": point(11.0)} if psnr else {}
    figures = {name: view}, built, Guessing(guess, guess)
    return AuditResult("accuracy", 1.0, 1.0, 0.0, "a", 10, 1, 20, *figures, **others)


def sections(shown):
    return {section.title: section for section in (*shown.first, *shown.sections)}


def test_verdicts_are_beside_the_undefended_federation_and_guessing():
    plain = audit()
    shown = show({"veil": audit(1.0, 0.6, 11.0), "spn": audit(0.1, 0.7, 40.0), "ppdl": Failed("x"), UNDEFENDED: plain})
    rows = {row[0]: list(row[1:]) for row in sections(shown)["Verdict"].rows}
    assert rows == {
        "veil": ["LEAK", "PARTIAL LEAK", "PROTECTED"],
        "spn": ["PROTECTED", "LEAK", "LEAK"],
        "ppdl": ["failed", "", ""],
    }
    assert "The model: LEAK (veil 100 %), PROTECTED (spn 10 %); guessing 10 %." in shown.verdict
    assert [shown.rows[-1][column] for column in (0, 2, 8)] == ["guessing", "10.0", "10.0"]
    assert show({"plain": Failed("x"), "veil": plain}).verdict.startswith("No verdict")
    assert show({"plain": plain}).verdict.startswith("By the strongest attacker: The model: LEAK (no defence 100 %)")


def test_what_is_not_measured_without_a_defence_has_no_verdict():
    shown = show({"veil": audit(psnr=40.0), UNDEFENDED: audit(psnr=None)})
    assert sections(shown)["Verdict"].rows[0][3] == "not measured"


def test_the_attack_is_chosen_on_known_records_and_never_on_the_test():
    found = Members({"loss": member_attack(known=0.7, auc=0.6), "RMIA": member_attack(known=0.6, auc=0.9)})
    assert found.attack == "loss"
    assert found.best.auc.value == 0.6


def test_every_attack_is_averaged_over_the_broadcasts_under_which_it_ran():
    both = {"loss": member_attack(0.5, 0.5), "white-box network": member_attack(0.9, 0.8)}
    found = average_members([Members(both, {"RMIA": "no classes"}), Members({"loss": member_attack(0.7, 0.6)})])
    assert found.attacks["loss"].known == pytest.approx(0.6)
    assert found.attacks["loss"].auc.value == pytest.approx(0.55)
    assert [one.broadcasts for one in found.attacks.values()] == [2, 1]
    assert found.attacks["loss"].tpr["0.001"] is None
    assert found.left_out == {"RMIA": "no classes"}


def test_the_page_says_which_attackers_do_not_apply_and_why():
    found = audit(
        *(0.1, 0.5, None),
        inapplicable={"two rounds": "there is one broadcast"},
        not_rebuilt={"as published": "the first layer is a convolution"},
        server=Curious([Failed("no images")]),
    )
    found.attackers["adaptive"].membership.left_out["RMIA"] = "the targets have no classes"
    tables = sections(show({"plain": found, "b": Failed("why")}))
    assert tables["Attackers"].rows == [
        ["plain", "adaptive", "attacks the model"],
        ["plain", "two rounds", "does not apply: there is one broadcast"],
        ["plain", "as published", "rebuilds no records: the first layer is a convolution"],
        ["plain", "curious server", "not run: no images"],
    ]
    rows = tables["Membership, attack by attack"].rows
    assert [row[2:4] for row in rows] == [["loss *", "0.500"], ["RMIA", "the targets have no classes"]]


def test_without_classes_the_network_and_the_loss_still_attack_and_nothing_is_shadowed(tmp_path):
    config = config_of(data="digits", train_size=120, clients=2, hidden=12, epochs=2)
    whole = load_data(config)
    values = {part: getattr(whole, part) for part in ("train", "test")}
    numbers = {name: Part(part.tensor, part.targets.double().float()[:, None] / 10) for name, part in values.items()}
    data = Data("numbers", numbers["train"], numbers["test"])
    federation = federation_of(config, data)
    attacks = MemberAttacks(
        divide_records(config, data, everyone=True), ShadowAttacks(config, tmp_path, 2, False), True, 0
    )
    found = attacks.run(observe(federation), 0, False)
    assert set(found.attacks) == {"loss", "white-box network"}
    assert set(found.left_out) == {"loss by class", "RMIA"}
    assert set(attacks.run(observe(federation), MAX_LOOKS, False).attacks) == {"loss"}


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
    data = Data("x", Part(inputs, classes), Part(inputs, classes), classes=("no", "yes"))
    model = Threshold(threshold)
    answers = model(inputs).argmax(1)
    best = [max(float((truth == constant).double().mean()) for constant in (0, 1)) for truth in (answers, classes)]
    assert constant_answer(model, data) == Guessing(*best)


def test_an_audit_of_an_imbalanced_file_guesses_its_most_frequent_class(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [f"{(7 * number) % 100},{number % 10},{'yes' if number % 10 == 0 else 'no'}" for number in range(100)]
    (tmp_path / "calls.csv").write_text("\n".join(["a,b,answer", *rows]) + "\n")
    words = ["--data", "csv", "--path", "calls.csv", "--target", "answer", "--clients", "2", "--epochs", "2"]
    assert cli.main(["train", *words, "--hidden", "4", "--defence", "plain", "--out", "run"]) == 0
    own = ["--trials", "2", "--shadows", "0", "--no-network", "--no-server", "--workers", "1"]
    capsys.readouterr()
    assert cli.main(["audit", "run", *own]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("guessing"))
    config, federation = open_run("run")
    test = load_data(config).test
    answers = predict(federation.model, test.tensor).argmax(1)
    agreement, accuracy = (max(Counter(truth.tolist()).values()) / len(truth) for truth in (answers, test.targets))
    cells = re.split(r"\s{2,}", line)
    assert accuracy > 0.7
    assert [cells[1], cells[-1]] == [f"{100 * agreement:.1f}", f"{100 * accuracy:.1f}"]


BUILD_AUDIT = """
import sys
from pathlib import Path
from fedveil.cli.studies import Audit
from fedveil.studies.attack import AttackRequest

audit = Audit.read("fedveil audit", ["--data", "digits"], "")
audit.study.graph(AttackRequest(audit.config.changed(defence="veil"), ("veil",), audit.attack), Path("unused"))
print(*(name for name in sys.modules if name.partition(".")[0] == "fedveil"))
"""


def test_an_audit_imports_neither_the_paper_nor_flower_nor_flare():
    done = subprocess.run([sys.executable, "-c", BUILD_AUDIT], capture_output=True, text=True, check=True)
    modules = done.stdout.split()
    foreign = ("fedveil.studies.paper", "fedveil.flower", "fedveil.nvflare")
    assert not [name for name in modules if name.startswith(foreign)]
    assert len(modules) <= MAX_MODULES
