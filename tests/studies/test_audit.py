"""The audit: the model as received is near chance, adaptive attackers are near the truth; what hardens the veil."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.configs import config_of
from torch import nn

from fedveil import cli
from fedveil.attacks.membership import halves
from fedveil.attacks.scores import Estimate
from fedveil.attacks.whitebox import Recipe
from fedveil.cli.studies import AuditCommand
from fedveil.data import Data, DataPart
from fedveil.errors import BadArgument
from fedveil.federation.evaluate import predict
from fedveil.privacy.accounting import epsilon
from fedveil.runs.build import build_federation, load_data
from fedveil.runs.settings import configure
from fedveil.studies.audit import harden
from fedveil.studies.audit import results as page
from fedveil.studies.audit.harden import HARDEN, Hardening, MeasureRow, base_values, measure_row, measures, verdict
from fedveil.studies.audit.results import (
    UNDEFENDED,
    AuditResult,
    Guessing,
    MembershipResults,
    ModelFigures,
    average_members,
    show,
)
from fedveil.studies.audit.run import AuditOptions, constant_answer, infer_members
from fedveil.studies.federations import observe
from fedveil.studies.gradients.server import ServerResults
from fedveil.studies.jobs import Failure
from fedveil.studies.membership.attacks import AttackScores, RecordAttacks, ShadowAttacks, divide_records, shadow_file
from fedveil.studies.study import gather, publish

MAX_MODULES = 125  # lower it with every import that becomes unnecessary


@pytest.mark.slow
def test_adaptive_attackers_have_the_model_its_members_and_records_and_published_ones_have_nothing(tmp_path):
    words = ["--data", "digits", "--train-size", "300", "--clients", "2", "--loss", "squared_error", "--groups", "10"]
    words += ["--epochs", "60", "--workers", "1", "--trials", "2", "--no-server", "--defence", "plain,veil,dbcl"]
    assert cli.main(["audit", *words, "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    attackers = {name: found["attackers"] for name, found in results.items()}
    agreement = {name: {who: one["agreement"]["value"] for who, one in own.items()} for name, own in attackers.items()}
    assert agreement["veil"]["as published"] < 0.35  # one in ten on average over secrets
    for attacker, least in (("offset removed", 0.9), ("two broadcasts, no data", 0.98), ("own labels", 0.95)):
        assert agreement["veil"][attacker] >= least
    assert agreement["plain"]["as published"] == 1.0
    assert agreement["dbcl"]["sketches stacked"] > agreement["dbcl"]["as published"]
    undefended, fitted = (
        attackers[defence][attacker]["membership"]["attacks"]["loss by class"]["auc"]
        for defence, attacker in (("plain", "as published"), ("veil", "own labels"))
    )
    assert abs(fitted["value"] - undefended["value"]) < 0.05
    assert undefended["low"] > 0.5
    for defence, own in attackers.items():
        every, few = (10, page.NETWORK_BROADCASTS) if defence == "veil" else (1, 1)
        for figures in own.values():
            counts = {name: attack["broadcasts"] for name, attack in figures["membership"]["attacks"].items()}
            assert counts == {"white-box network": few, "loss": every, "loss by class": every, "RMIA": every}
    built = {name: one["value"] for name, one in results["veil"]["rebuilt"].items()}
    assert built["two broadcasts, own records"] > max(built["floor"], built["as published"])
    assert results["plain"]["rebuilt"]["as published"]["value"] > 40


def point(value):
    return Estimate(value, value, value)


def member_attack(known, auc, tpr=0.1):
    return AttackScores(point(auc - 0.01), point(auc), {"0.01": point(tpr), "0.001": None}, known=point(known))


def audit(agreement=1.0, psnr=40.0, test=1.0, members=None, **others):
    """The audit of a federation in which attackers reach these figures; `members` has their AUCs of membership."""
    views = {
        name: ModelFigures(point(agreement), membership=MembershipResults({"loss": member_attack(0.5, auc)}))
        for name, auc in (members or {"adaptive": 0.7}).items()
    }
    built = {next(iter(views)): point(psnr), "floor": point(11.0)} if psnr else {}
    return AuditResult("accuracy", 1.0, test, 1.0 - test, "a", 1, 20, views, built, Guessing(0.1, 0.1), **others)


def sections(shown):
    return {section.title: section for section in (*shown.top_sections, *shown.sections)}


def test_verdicts_are_beside_the_undefended_federation_and_guessing():
    plain = audit()
    shown = show({"veil": audit(1.0, 11.0, members={"adaptive": 0.6}), "spn": audit(0.1), UNDEFENDED: plain})
    assert sections(shown)["Verdict"].rows == [
        ["veil", "LEAK", "PARTIAL LEAK", "PROTECTED"],
        ["spn", "PROTECTED", "LEAK", "LEAK"],
    ]
    assert "The model: LEAK (veil 100 %), PROTECTED (spn 10 %); guessing 10 %." in shown.verdict
    guessing = dict(zip(shown.header, shown.rows[-1], strict=True))
    assert (guessing["defence"], guessing["agreement, %"], guessing["accuracy, %"]) == ("guessing", "10.0", "10.0")
    assert show({"veil": plain}).verdict.startswith("No verdict")
    assert show({"plain": plain}).verdict.startswith("By the strongest attacker: The model: LEAK (no defence 100 %)")
    unmeasured = show({"veil": plain, UNDEFENDED: audit(psnr=None)})
    assert sections(unmeasured)["Verdict"].rows[0][3] == "not measured"


def test_the_attack_is_chosen_on_known_records_and_averaged_over_the_broadcasts_on_which_it_ran():
    found = MembershipResults({"loss": member_attack(known=0.7, auc=0.6), "RMIA": member_attack(known=0.6, auc=0.9)})
    assert (found.attack, found.best.auc.value) == ("loss", 0.6)
    few = replace(member_attack(known=0.75, auc=0.5), known=Estimate(0.75, 0.45, 0.9))  # tried on a few known records
    assert MembershipResults({**found.attacks, "white-box network": few}).attack == "loss"
    both = {"loss": member_attack(0.5, 0.5), "white-box network": member_attack(0.9, 0.8)}
    found = average_members(
        [MembershipResults(both, {"RMIA": "no classes"}), MembershipResults({"loss": member_attack(0.7, 0.6)})]
    )
    assert found.attacks["loss"].known.value == pytest.approx(0.6)
    assert found.attacks["loss"].auc.value == pytest.approx(0.55)
    assert [one.broadcasts for one in found.attacks.values()] == [2, 1]
    assert found.attacks["loss"].tpr["0.001"] is None
    assert found.left_out == {"RMIA": "no classes"}


def test_the_page_names_attackers_that_did_not_run_and_why():
    absent = {"two rounds": "there is one broadcast"}, {"as published": "the first layer is a convolution"}
    curious, members = ServerResults([Failure("no images")]), {"adaptive": 0.5}
    found = audit(psnr=None, members=members, inapplicable=absent[0], not_rebuilt=absent[1], server=curious)
    found.attackers["adaptive"].membership.left_out["RMIA"] = "the targets have no classes"
    shown = sections(show({"plain": found}))
    assert shown["Attackers that did not run"].paragraphs == [
        "plain, two rounds: does not apply: there is one broadcast",
        "plain, as published: cannot rebuild records: the first layer is a convolution",
        "plain, curious server: no images",
    ]
    rows = shown["Membership, attack by attack"].rows
    assert [row[2:4] for row in rows] == [["loss *", "0.500"], ["RMIA", "the targets have no classes"]]


def test_without_classes_all_attacks_but_the_loss_by_class_run(tmp_path):
    config = config_of(data="digits", train_size=120, clients=2, hidden=12, epochs=2, defence="plain")
    whole = load_data(config)
    parts = [DataPart(part.tensor, part.targets.float()[:, None] / 10) for part in (whole.train, whole.test)]
    data = Data("numbers", *parts)
    federation, records = build_federation(config, data), divide_records(config, data, everyone=True)
    inside = halves(len(records.pool.targets), 2, torch.Generator().manual_seed(0))
    for number, rows in enumerate(map(torch.from_numpy, inside)):
        own = build_federation(config.changed(seed=number), Data("half", records.pool.take(rows), data.test))
        own.fit(1)
        outputs, path = predict(own.model, records.pool.tensor).numpy(), shadow_file(tmp_path, "plain", number)
        path.parent.mkdir(exist_ok=True)
        np.savez(path, received=outputs, cleaned=outputs, inside=inside[number])
    shadows = ShadowAttacks(config.defence.name, tmp_path, 2, True)
    found = infer_members(RecordAttacks(records, shadows, Recipe(2)), observe(federation), False)
    assert set(found.attacks) == {"loss", "white-box network", "RMIA", "LiRA"}
    assert found.left_out == {"loss by class": "the targets have no classes"}
    missing = infer_members(RecordAttacks(records, replace(shadows, count=4), None), observe(federation), False)
    assert set(missing.attacks) == {"loss"}
    assert "plain-2.npz" in missing.left_out["RMIA"]


@pytest.mark.parametrize("threshold", [2.5, 6.5, 99.0])
def test_guessing_is_the_best_constant_answer(threshold):
    inputs, classes = torch.arange(10.0)[:, None], torch.tensor([0, 0, 0, 0, 0, 0, 0, 1, 1, 1])
    data = Data("x", DataPart(inputs, classes), DataPart(inputs, classes), classes=("no", "yes"))
    model = nn.Linear(1, 2)  # answers class 1 where the input is above the threshold
    model.load_state_dict({"weight": torch.tensor([[0.0], [1.0]]), "bias": torch.tensor([threshold, 0.0])})
    answers = model(inputs).argmax(1)
    best = [max(float((truth == constant).double().mean()) for constant in (0, 1)) for truth in (answers, classes)]
    assert constant_answer(model, data) == Guessing(*best)


START_AUDIT = """
import sys
from fedveil import cli
from fedveil.studies import jobs
jobs._schedule = lambda *arguments: sys.exit(print(*(name for name in sys.modules if name.startswith("fedveil"))))
cli.main(["audit", "--data", "digits", "--workers", "1", "--out", sys.argv[1]])
"""


def test_an_audit_of_all_defences_reaches_its_first_job_with_few_modules(tmp_path):
    """Counted by the command itself, after it has parsed, loaded the data, planned its jobs and hashed their basis."""
    command = [sys.executable, "-c", START_AUDIT, str(tmp_path)]
    modules = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    foreign = ("fedveil.studies.paper", "fedveil.flower", "fedveil.nvflare", "fedveil.secagg")
    assert not [name for name in modules if name.startswith(foreign)]
    assert 20 < len(modules) <= MAX_MODULES


TINY = {"train_size": 40, "test_size": 40, "epochs": 1, "hidden": 8}
SOME = ("noise kept across rounds", "no veil")


def row(name, membership, cost):
    figures = {harden.MEMBERSHIP: membership, harden.COST: cost if isinstance(cost, Estimate) else point(cost)}
    return MeasureRow(name, "own labels", figures)


def test_the_study_runs_and_shows_every_measure(tmp_path):
    asked = Hardening(base_values(TINY), 2, AuditOptions(1, 1, network=False, shadows=2), SOME)
    results = gather(HARDEN, asked, tmp_path, workers=1)
    assert not [one for found in results.values() for one in found if isinstance(one, Failure)]
    shown = publish(HARDEN, asked, results, tmp_path, "again")
    lines = {line[0]: dict(zip(shown.header, line, strict=True)) for line in shown.rows}
    assert list(lines) == list(SOME)
    assert all("[" in line["accuracy, %"] for line in lines.values())
    assert lines["no veil"]["cost, points"] == "0.0"
    kept = json.loads((tmp_path / "results.json").read_text())["results"]["noise kept across rounds"]
    assert "RMIA" in kept[0]["attackers"]["own labels"]["membership"]["attacks"]  # its shadows were found


@pytest.mark.slow
def test_every_measure_can_be_audited(tmp_path):
    asked = Hardening(base_values(TINY), 1, AuditOptions(1, 1, network=False, shadows=0))
    results = gather(HARDEN, asked, tmp_path, workers=1)
    assert not [one for found in results.values() for one in found if isinstance(one, Failure)]


@pytest.mark.parametrize("data", ["digits", "cifar10", "bank"])
def test_every_measure_is_a_configuration_that_changes_something(data):
    base = base_values({"data": data})
    configs = [configure({"defence": "veil", **base, **changes}) for changes in measures(base).values()]
    assert len(set(map(repr, configs))) == len(configs)
    assert {config.training.loss for config in configs} == set(harden.UNDEFENDED)


def test_measures_that_differ_by_the_veil_only_share_their_shadows(tmp_path):
    shadows = {key: job.predecessors for key, job in HARDEN.audits(Hardening(seeds=2), tmp_path).items()}
    assert shadows["noise kept across rounds", 1] == shadows["no veil", 1] != shadows["no veil", 0]
    assert shadows["weight decay 0.01", 0] != shadows["no veil", 0]
    assert shadows["cross-entropy, 7 decoys", 0] == shadows["no veil, cross-entropy", 0]
    names = [job.name for job in HARDEN.graph(Hardening(seeds=2), tmp_path).jobs]
    assert len(names) == len(set(names))


def test_noise_spends_the_budget_that_the_measure_names_and_hardly_less():
    for budget in harden.UNIT_NOISE:
        values = harden.private_clients(budget)
        assert 0.999 * budget < epsilon(values["epochs"], values["noise"], values["delta"]) <= budget
    for budget in harden.RECORD_NOISE:
        values = harden.private_records(budget)
        rounds = values["epochs"] / values["rate"]
        assert 0.99 * budget < epsilon(round(rounds), values["noise"], values["delta"], values["rate"]) <= budget


def test_costs_are_paired_by_seed_and_the_best_attacker_is_that_of_the_mean():
    """Balanced accuracies are 0.01 below the AUCs."""
    seeds = [audit(test=0.80, members={"x": 0.51, "y": 0.55}), audit(test=0.70, members={"x": 0.57, "y": 0.55})]
    found = measure_row("measure", seeds, [audit(test=0.81), audit(test=0.71)])
    cost, membership = found.figures[harden.COST], found.figures[harden.MEMBERSHIP]
    assert cost.value == pytest.approx(0.01)
    assert cost.high - cost.low < 1e-9  # accuracies differ between seeds, their differences do not
    assert (found.attacker, membership.value) == ("y", pytest.approx(0.54))  # the mean of maxima would be 0.55
    assert found.figures["membership AUC"].value == pytest.approx(0.55)
    assert [found.figures[name].value for name in ("rebuilt, dB", "guess, dB")] == [40.0, 11.0]


BARE = row("no veil", point(0.9), 0.0)
DEAR, WEAK = row("dear", point(0.5), 0.1), row("weak", point(0.8), 0.0)


@pytest.mark.parametrize(
    ("rows", "label", "named"),
    [
        ([row("good", Estimate(0.515, 0.511, 0.519), 0.004)], "GOOD ENOUGH", "good (membership 51.5 [51.1"),
        ([row("open", Estimate(0.515, 0.49, 0.54), 0.004)], "TOO FEW SEEDS", "open (membership"),
        ([row("open", Estimate(0.53, 0.51, 0.55), 0.0)], "TOO FEW SEEDS", "open (membership"),
        ([row("open", point(0.5), Estimate(0.004, -0.01, 0.018))], "TOO FEW SEEDS", "open (membership"),
        ([row("better", point(0.53), 0.005)], "NONE GOOD ENOUGH", "best at that cost: better (membership 53.0 %"),
    ],
)
def test_the_verdict_names_the_measures_that_hold_the_attacker_cheaply(rows, label, named):
    said = verdict([BARE, *rows, DEAR, WEAK])
    assert said.startswith(label)
    assert named in said
    assert not {"dear", "weak"} & set(said.split())
    assert verdict([BARE, *rows, row("good", point(0.51), 0.001)]).startswith("GOOD ENOUGH")


def test_there_is_no_verdict_where_nothing_could_be_found():
    assert "within the limit" in verdict([row("no veil", point(0.51), 0.0), row("a", point(0.5), 0.0)])
    assert "was not measured" in verdict([row("no veil", None, 0.0), row("a", None, 0.0)])
    assert "was not measured" in verdict([BARE])


def test_flags_choose_the_federation_and_those_that_are_measured_are_refused():
    found = base_values({"data": "cifar10", "epochs": 3})
    assert (base_values({})["data"], found["epochs"], found["train_size"]) == ("digits", 3, 1000)
    assert "train_size" not in base_values({"data": "bank"})
    with pytest.raises(BadArgument, match="the measures set --weight-decay"):
        AuditCommand.parse("fedveil audit", ["--harden", "--weight-decay", "0.1"]).run()
