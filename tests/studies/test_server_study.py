"""A curious server: single updates and differences of sums show a planted record, sums over many clients do not."""

import dataclasses
import json

import pytest
import torch
from tests.configs import config_of
from tests.oracle import flat
from torch import nn

from fedveil import cli
from fedveil.attacks.first_layer import first_linear, record_from_gradient
from fedveil.attacks.gradients import Search
from fedveil.attacks.leaked_gradients import mean_gradients
from fedveil.attacks.observation import DoesNotApply
from fedveil.data import Data, DataPart, load
from fedveil.defences import Plain, Private, Veil
from fedveil.errors import BadArgument
from fedveil.federation import Federation
from fedveil.models import mlp
from fedveil.records.shards import generator
from fedveil.report import NOTHING
from fedveil.runs.build import load_data
from fedveil.runs.folder import resume_federation, train
from fedveil.scheme import Entropy
from fedveil.studies.attack import AttackRequest
from fedveil.studies.audit import run as audit
from fedveil.studies.gradients import server
from fedveil.studies.gradients.run import guesses
from fedveil.studies.gradients.server import (
    SERVER,
    SINGLE_UPDATE,
    ServerOptions,
    ServerResults,
    difference_view,
    sum_view,
)
from fedveil.studies.jobs import Failure, JobResults
from fedveil.studies.study import gather, publish
from fedveil.studies.verdicts import RECOGNITION_DB

UNIT = 2.0**-24  # half a unit in the last place of a float32
EPS = torch.finfo(torch.float64).eps
DIGITS = load("digits", flat=False)
QUICK = ServerOptions(rounds=2, sums="2", difference=4, steps=2, restarts=1, batches="")
ASKED = AttackRequest(config_of(), ("plain",), QUICK)
SAME_MODEL, NEXT_ROUND = (difference_view(4, models) for models in ("same model", "next round"))


def federation_of(defence, clients=10, dtype=torch.float64, data=DIGITS, sizes=None):
    """Clients with one record each, or with these numbers of records."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), mlp(64, 10)).to(dtype)
    sizes = sizes or [1] * clients
    inputs, targets = data.train.tensor[: sum(sizes)].to(dtype), data.train.targets[: sum(sizes)]
    parts = list(zip(inputs.split(sizes), targets.split(sizes), strict=True))
    return Federation(model, parts, defence, lambda p: torch.optim.SGD(p, 0.1), batch_size=max(sizes), fuse=False)


def relative(found, wanted):
    own, true = (flat({name: one[name].double() for name in wanted}) for one in (found, wanted))
    return float((own - true).norm() / true.norm())


def digit_gradients(leak, rows, model=None):
    """The mean gradient of some digits, by plain autograd."""
    inputs, targets = DIGITS.train.tensor[rows].double(), DIGITS.train.targets[rows]
    return mean_gradients(model or leak.model, leak.loss, inputs, targets)


def attack_round(config, options, number=0):
    return server.AttackRound(config, options, None, number)(lambda fraction, what: None, JobResults({}))


def test_two_sums_of_the_same_model_that_differ_by_one_client_give_its_record_away():
    """Products and sums of one record round once, the difference and the bias once more: below 4 units of a pixel."""
    found = server.server_views(federation_of(Plain(), dtype=torch.float32), [10], 4)
    record = DIGITS.train.tensor[0].flatten().double()
    for view, far in ((SAME_MODEL, False), (SINGLE_UPDATE, False), (sum_view(10), True)):
        leak = found[view][0]
        gap = (record_from_gradient(leak, first_linear(leak.model)) - record).abs().max()
        assert (gap > 0.1) if far else (gap <= 4 * UNIT), view
    assert relative(found[SAME_MODEL][0].gradients, found[SINGLE_UPDATE][0].gradients) <= 2 * UNIT


def test_sums_are_weighted_by_records():
    sizes = [3, 1, 2]
    found = server.server_views(federation_of(Plain(), sizes=sizes), [2, 3], 3)
    for view, records in ((sum_view(2), 4), (sum_view(3), 6), (difference_view(3, "same model"), 3)):
        leak = found[view][0]
        assert relative(leak.gradients, digit_gradients(leak, slice(records))) < 1e3 * EPS, view


def test_the_next_round_adds_what_the_step_changed_in_the_others_gradients():
    federation = federation_of(Plain(), clients=4)
    found = server.server_views(federation, [4], 4)
    leak, single = found[NEXT_ROUND][0], found[SINGLE_UPDATE][0]
    before, later = (digit_gradients(leak, slice(1, 4), model) for model in (leak.model, federation.model))
    wanted = {name: own + 3 * (before[name] - later[name]) for name, own in single.gradients.items()}
    assert relative(leak.gradients, wanted) < 1e3 * EPS
    assert relative(leak.gradients, single.gradients) > 1e-3


@pytest.mark.parametrize("private", [False, True])
def test_a_veil_does_not_change_what_the_server_sees(private):
    veil = Veil(groups=10, entropy=Entropy.for_tests(0))
    veil = Private(veil, 1.0, 0.0) if private else veil  # the server clips what it has seen
    plain, veiled = (server.server_views(federation_of(one), [2, 10], 4) for one in (Plain(), veil))
    assert list(plain) == list(veiled) == [SINGLE_UPDATE, sum_view(2), sum_view(10), SAME_MODEL, NEXT_ROUND]
    for view in plain:
        assert relative(veiled[view][0].gradients, plain[view][0].gradients) < 1e4 * EPS, view
    leak = plain[SINGLE_UPDATE][0]
    assert relative(veiled[SINGLE_UPDATE][0].gradients, digit_gradients(leak, slice(1))) < 1e4 * EPS


def test_differences_after_local_training_are_attacked_as_gradients():
    """The first layer's gradient of one record always has the record's direction, however many steps there are."""
    one = server.server_views(federation_of(Plain(local_epochs=1, local_lr=0.5)), [2], 4)
    for view, records in ((SINGLE_UPDATE, 1), (sum_view(2), 2)):
        assert relative(one[view][0].gradients, digit_gradients(one[view][0], slice(records))) < 1e-9, view
    leak = server.server_views(federation_of(Plain(local_epochs=5, local_lr=0.5)), [2], 4)[SINGLE_UPDATE][0]
    assert relative(leak.gradients, digit_gradients(leak, slice(1))) > 1e-3
    record = DIGITS.train.tensor[0].flatten().double()
    assert (record_from_gradient(leak, first_linear(leak.model)) - record).abs().max() < 1e-9


def test_a_sum_over_many_clients_shows_no_record_and_a_single_update_does():
    """Random images of random classes: whatever a sum shows of one of them is a leak, not a likeness of digits."""
    clients, chance = 64, torch.Generator().manual_seed(1)
    images = torch.rand(clients, 1, 8, 8, generator=chance)
    part = DataPart(images, torch.randint(10, (clients,), generator=chance))
    data = Data("noise", part, part, classes=tuple("0123456789"), scale=((0.0,), (1.0,)))
    mean, search = server.nearest(images.mean(0, keepdim=True), images).psnr, Search(steps=50, restarts=1)
    best = {}
    views = server.server_views(federation_of(Plain(), clients, torch.float32, data), [clients], 4)
    for name, (leak, count) in views.items():
        own, draws = DIGITS.test.tensor[:64], generator("test", name)
        found = server.attack_view(leak, search, data, own, count, draws, lambda fraction: None)
        best[name] = max(server.nearest(one, images[:count]).psnr for one in found.values())
    assert best[sum_view(clients)] < mean + RECOGNITION_DB
    assert min(best[SINGLE_UPDATE], best[SAME_MODEL]) >= mean + RECOGNITION_DB


def test_the_nearest_image_is_found_among_all_pairs_and_a_guess_is_never_a_record_of_the_round():
    true = torch.stack([torch.full((1, 8, 8), value) for value in (0.0, 0.5, 1.0)])
    found = server.nearest(torch.stack([torch.full((1, 8, 8), value) for value in (0.25, 0.9)]), true)
    assert (found.record, found.psnr) == (2, pytest.approx(20.0, abs=1e-4))
    rows = torch.arange(200)
    for taken, near in ((rows, False), (None, True)):
        images = guesses(DIGITS, rows, generator("test"), excluded=taken)["another of its class"]
        assert (server.nearest(images, DIGITS.train.tensor[rows]).psnr == 120) is near


def test_the_study_has_a_row_per_view_pictures_and_a_verdict(tmp_path):
    config = config_of(**{**SERVER.defaults, "train_size": 200, "defence": "plain"})
    asked = AttackRequest(config, ("plain", "veil"), QUICK)
    shown = publish(SERVER, asked, gather(SERVER, asked, tmp_path, workers=1), tmp_path, "again")
    views = [SINGLE_UPDATE, sum_view(2), SAME_MODEL, NEXT_ROUND]
    assert [tuple(row[:2]) for row in shown.rows] == [(name, view) for name in ("plain", "veil") for view in views]
    assert [row[2] for row in shown.rows[:4]] == ["1", "2", "1", "1"]
    single = dict(zip(shown.header, shown.rows[0], strict=True))
    assert (single["first layer, dB"], single["recognised"]) == ("120.0", "2/2")
    assert "veil: LEAK: a record is revealed by single update (2 of 2 rounds)" in shown.verdict
    assert (tmp_path / "report.html").read_text().count("data:image/png") == 2 * 2 * (1 + len(views) + 1)


def test_a_trained_run_is_attacked_where_it_stopped(tmp_path):
    config = config_of(data="digits", train_size=200, clients=2, epochs=1, defence="plain")
    train(config, tmp_path)
    data, model = server.images_and_model(config, tmp_path)
    kept = resume_federation(config, tmp_path, load_data(config)).model
    assert torch.equal(model(data.test.tensor), kept(data.test.tensor.flatten(1)))


def test_only_the_search_attacks_a_convolution():
    found = attack_round(config_of(data="digits", train_size=200, model="lenet"), QUICK)
    assert all(set(view.attacks) == {"search"} for view in found.views.values())
    assert [row[5:7] for row in SERVER.present(ASKED, {"plain": ServerResults([found])}).rows] == [
        [NOTHING, NOTHING]
    ] * 4


def planted(*figures):
    """A round in which the best attack and the mean image have these PSNRs, view by view."""
    code, views = "/////w==", {}
    for name, records, best, guess in figures:
        near = [server.NearestImage(psnr, 0.5, records - 1, code) for psnr in (best, 1.0, guess, 0.0)]
        attacks, floors = zip(server.ATTACKS, near[:2], strict=False), zip(server.FLOORS, near[2:], strict=True)
        views[name] = server.ServerView(records, dict(attacks), dict(floors))
    return server.ServerRound([0, 1], Search(), views, [code, code], (1, 2, 2))


def test_the_verdict_follows_the_figures():
    rounds = [planted((SINGLE_UPDATE, 1, psnr, 12.0), (sum_view(2), 2, 21.9, 12.0)) for psnr in (40.0, 60.0)]
    leak = "LEAK: a record is revealed by single update (2 of 2 rounds); no record is revealed by sum of 2."
    assert server.verdict(ServerResults(rounds)) == leak
    assert server.verdict(ServerResults([planted((SINGLE_UPDATE, 1, 20.0, 12.0))])).startswith("NOTHING FOUND")
    [pictures] = server.gallery("", ServerResults(rounds))
    assert [label for label, _ in pictures.rows] == [
        "victim's record",
        SINGLE_UPDATE,
        sum_view(2),
        "its nearest record",
    ]
    broken = ServerResults([rounds[0], Failure("it broke")])
    assert server.verdict(broken) == "not measured (it broke)."
    assert not server.gallery("", broken)
    assert SERVER.present(ASKED, {"plain": broken}).rows[0][:4] == ["plain", "", "", "failed: it broke"]


def test_records_that_are_not_images_and_too_few_records_are_refused():
    with pytest.raises(DoesNotApply, match="the records are not images"):
        server.images_and_model(config_of(data="diabetes"), None)
    with pytest.raises(BadArgument, match="--batches: expected distinct positive integers, got '4,4'"):
        ServerOptions(batches="4,4").counts()
    with pytest.raises(BadArgument, match="5 training records, but 100 clients need 100"):
        attack_round(config_of(data="digits", train_size=5), ServerOptions())


def test_the_audit_has_the_curious_server_once_beside_the_undefended_federation(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(audit, "CURIOUS_SERVER", dataclasses.replace(QUICK, rounds=1))
    words = ["--data", "digits", "--train-size", "200", "--clients", "2", "--epochs", "1", "--defence", "veil"]
    words += ["--trials", "1", "--broadcasts", "1", "--shadows", "0", "--no-network", "--workers", "1"]
    assert cli.main(["audit", *words, "--out", str(tmp_path)]) == 0, capsys.readouterr().err
    audits = json.loads((tmp_path / "results.json").read_text())["results"]
    assert audits["veil"]["server"] is None
    [found] = audits["undefended"]["server"]["rounds"]
    assert found["views"][SAME_MODEL]["attacks"]["first layer"]["psnr"] == 120.0
    said = " ".join(capsys.readouterr().out.split())
    assert "curious server: LEAK: a record is revealed by single update (1 of 1 rounds)" in said
    without = AttackRequest(config_of(), ("plain",), audit.AuditOptions(server=False))
    assert not audit.AUDIT.server_rounds(without)
