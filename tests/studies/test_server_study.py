"""A curious server: single updates and differences of sums show a planted record, sums over many clients do not."""

import dataclasses
import json

import pytest
import torch
from tests.configs import config_of
from torch import nn

from fedveil import cli
from fedveil.attacks.first_layer import first_linear, record_from_gradient
from fedveil.attacks.gradients import Search
from fedveil.attacks.leaked_gradients import mean_gradients
from fedveil.attacks.observation import DoesNotApply
from fedveil.cli.studies import AuditCommand
from fedveil.data import Data, Part, load
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
from fedveil.studies.gradients.results import Curious, Nearest, ServerRound, ServerView
from fedveil.studies.gradients.run import guesses
from fedveil.studies.gradients.server import (
    SERVER,
    AttackRound,
    ServerOptions,
    attack_view,
    images_and_model,
    nearest,
    read_updates,
    server_views,
)
from fedveil.studies.gradients.server_page import SINGLE, difference_view, gallery, sum_view, verdict
from fedveil.studies.jobs import Done, Failed
from fedveil.studies.study import gather, publish
from fedveil.studies.verdicts import RECOGNISED

UNIT = 2.0**-24  # half a unit in the last place of a float32
EPS = torch.finfo(torch.float64).eps
DIGITS = load("digits", flat=False)
QUICK = ServerOptions(rounds=2, sums="2", difference=4, steps=2, restarts=1)
SAME_MODEL, NEXT_ROUND = (difference_view(4, models) for models in ("same model", "next round"))


def federation_of(defence, clients=10, dtype=torch.float32, lr=0.1, data=DIGITS, sizes=None):
    """Clients with one record each, or as many as `sizes` says."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), mlp(64, 10)).to(dtype)
    sizes = sizes or [1] * clients
    inputs, targets = data.train.tensor[: sum(sizes)].to(dtype), data.train.targets[: sum(sizes)]
    parts = list(zip(inputs.split(sizes), targets.split(sizes), strict=True))
    optimizer = lambda p: torch.optim.SGD(p, lr)  # noqa: E731
    return Federation(model, parts, defence, optimizer, batch_size=max(sizes), fuse=False)


def relative(found, wanted):
    both = [torch.cat([some[name].double().flatten() for name in wanted]) for some in (found, wanted)]
    return float((both[0] - both[1]).norm() / both[1].norm())


def attack_round(config, options, number=0):
    return AttackRound(config, options, None, number)(lambda share, what: None, Done({}))


def test_a_sum_over_one_client_gives_what_the_single_update_gives():
    options = ServerOptions(rounds=1, sums="1", difference=2, steps=20, restarts=1)
    found = attack_round(config_of(data="digits", train_size=200, defence="plain"), options).views
    assert found[sum_view(1)] == found[SINGLE]
    assert set(found[SINGLE].attacks) == {"search", "first layer", "rows that agree"}


def test_two_sums_of_the_same_model_that_differ_by_one_client_give_its_record_away():
    """Products and sums of one record round once, the difference and the bias once more: below 4 units of a pixel."""
    found = server_views(federation_of(Plain()), [10], 4)
    record = DIGITS.train.tensor[0].flatten().double()
    for view, far in ((SAME_MODEL, False), (SINGLE, False), (sum_view(10), True)):
        leak = found[view].leak
        gap = (record_from_gradient(leak, first_linear(leak.model)) - record).abs().max()
        assert (gap > 0.1) if far else (gap <= 4 * UNIT), view
    assert relative(found[SAME_MODEL].leak.gradients, found[SINGLE].leak.gradients) <= 2 * UNIT


def test_sums_are_weighted_by_records():
    sizes = [3, 1, 2]
    federation = federation_of(Plain(), dtype=torch.float64, sizes=sizes)
    found = server_views(federation, [2, 3], 3)
    for clients in (2, 3):
        leak, records = found[sum_view(clients)].leak, sum(sizes[:clients])
        batch = DIGITS.train.tensor[:records].double(), DIGITS.train.targets[:records]
        assert relative(leak.gradients, mean_gradients(leak.model, leak.loss, *batch)) < 1e3 * EPS
    leak = found[difference_view(3, "same model")].leak
    own = DIGITS.train.tensor[:3].double(), DIGITS.train.targets[:3]
    assert relative(leak.gradients, mean_gradients(leak.model, leak.loss, *own)) < 1e3 * EPS


def test_the_next_round_adds_what_the_step_changed_in_the_others_gradients():
    federation = federation_of(Plain(), clients=4, dtype=torch.float64)
    found = server_views(federation, [4], 4)
    leak, single, after = found[NEXT_ROUND].leak, found[SINGLE].leak, federation.model
    inputs, targets = DIGITS.train.tensor[1:4].double(), DIGITS.train.targets[1:4]
    before, later = (mean_gradients(model, leak.loss, inputs, targets) for model in (leak.model, after))
    wanted = {name: own + 3 * (before[name] - later[name]) for name, own in single.gradients.items()}
    assert relative(leak.gradients, wanted) < 1e3 * EPS
    assert relative(leak.gradients, single.gradients) > 1e-3


@pytest.mark.parametrize("private", [False, True])
def test_a_veil_does_not_change_what_the_server_sees(private):
    veil = Veil(groups=10, entropy=Entropy.for_tests(0))
    veil = Private(veil, 1.0, 0.0) if private else veil  # the server clips what it has seen
    plain, veiled = (server_views(federation_of(one, dtype=torch.float64), [2, 10], 4) for one in (Plain(), veil))
    assert list(plain) == list(veiled) == [SINGLE, sum_view(2), sum_view(10), SAME_MODEL, NEXT_ROUND]
    for view in plain:
        assert relative(veiled[view].leak.gradients, plain[view].leak.gradients) < 1e4 * EPS, view


def noise(clients):
    """Random images of random classes: whatever a sum shows of one of them is a leak, and no likeness of digits."""
    chance = torch.Generator().manual_seed(1)
    images = torch.rand(clients, 1, 8, 8, generator=chance)
    part = Part(images, torch.randint(10, (clients,), generator=chance))
    return Data("noise", part, part, classes=tuple("0123456789"), scale=((0.0,), (1.0,)))


def test_a_sum_over_many_clients_shows_no_record_and_a_single_update_does():
    clients = 64
    data = noise(clients)
    found = server_views(federation_of(Plain(), clients, data=data), [clients], 4)
    mean = nearest(data.train.tensor.mean(0, keepdim=True), data.train.tensor).psnr
    best = {}
    for view, opened in found.items():
        size, search = len(opened.clients), Search(steps=50, restarts=1)
        chance = generator("test", view)
        images = attack_view(opened, search, data, DIGITS.test.tensor[:64], size, chance, lambda share: None)
        best[view] = {name: nearest(one, data.train.tensor[:size]).psnr for name, one in images.items()}
    assert max(best[sum_view(clients)].values()) < mean + RECOGNISED
    for view in (SINGLE, SAME_MODEL):
        assert max(best[view].values()) >= mean + RECOGNISED


def test_the_image_that_comes_nearest_is_found_among_all_pairs():
    true = torch.stack([torch.full((1, 8, 8), value) for value in (0.0, 0.5, 1.0)])
    found = nearest(torch.stack([torch.full((1, 8, 8), value) for value in (0.25, 0.9)]), true)
    assert found.record == 2
    assert found.psnr == pytest.approx(20.0, abs=1e-4)


def test_a_guess_is_never_a_record_of_the_round():
    rows = torch.arange(200)
    found = guesses(DIGITS, rows, generator("test"), taken=rows)["another of its class"]
    assert nearest(found, DIGITS.train.tensor[rows]).psnr < 120
    inside = guesses(DIGITS, rows, generator("test"))["another of its class"]
    assert nearest(inside, DIGITS.train.tensor[rows]).psnr == 120


def test_the_study_has_a_row_per_view_pictures_and_a_verdict(tmp_path):
    asked = AttackRequest(
        config_of(**{**SERVER.defaults, "train_size": 200, "defence": "plain"}), ("plain", "veil"), QUICK
    )
    results = gather(SERVER, asked, tmp_path, workers=1)
    shown = publish(SERVER, asked, results, tmp_path, "again")
    views = [SINGLE, sum_view(2), SAME_MODEL, NEXT_ROUND]
    assert [tuple(row[:2]) for row in shown.rows] == [(name, view) for name in ("plain", "veil") for view in views]
    assert [row[2] for row in shown.rows[:4]] == ["1", "2", "1", "1"]
    single = dict(zip(shown.header, shown.rows[0], strict=True))
    assert (single["first layer, dB"], single["known"]) == ("120.0", "2/2")
    assert "veil: LEAK: a record from single update (2 of 2 rounds)" in shown.verdict
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png") == 2 * 2 * (1 + len(views) + 1)
    json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)


def test_a_trained_run_is_attacked_where_it_stopped(tmp_path):
    config = config_of(data="digits", train_size=200, clients=2, epochs=1, defence="plain")
    train(config, tmp_path)
    data, model = images_and_model(config, tmp_path)
    kept = resume_federation(config, tmp_path, load_data(config)).model
    assert torch.equal(model(data.test.tensor), kept(data.test.tensor.flatten(1)))
    assert not torch.equal(model(data.test.tensor), images_and_model(config, None)[1](data.test.tensor))


def test_a_convolution_leaves_the_search(tmp_path):
    found = attack_round(config_of(data="digits", train_size=200, model="lenet"), QUICK)
    assert all(set(view.attacks) == {"search"} for view in found.views.values())
    shown = SERVER.present(AttackRequest(config_of(), ("plain",), QUICK), {"plain": Curious([found])})
    assert [row[5:7] for row in shown.rows] == [[NOTHING, NOTHING]] * 4


def planted(*figures):
    """Rounds in which the best attack and the mean image have these PSNRs, view by view."""
    code = "/////w=="
    views = {
        name: ServerView(
            records,
            {"search": Nearest(best, 0.5, records - 1, code), "first layer": Nearest(1.0, 0.1, 0, code)},
            {"mean image": Nearest(guess, 0.1, 0, code), "another of its class": Nearest(0.0, 0.0, 0, code)},
        )
        for name, records, best, guess in figures
    }
    return ServerRound([0, 1], Search(), views, [code, code], (1, 2, 2), 0.0)


def test_the_verdict_follows_the_figures():
    one = planted((SINGLE, 1, 40.0, 12.0), (sum_view(2), 2, 21.9, 12.0))
    two = planted((SINGLE, 1, 60.0, 12.0), (sum_view(2), 2, 21.9, 12.0))
    assert verdict(Curious([one, two])) == "LEAK: a record from single update (2 of 2 rounds); no record from sum of 2."
    assert verdict(Curious([planted((SINGLE, 1, 20.0, 12.0))])).startswith("NOTHING FOUND")
    pictures = gallery("", Curious([one, two]))
    assert [label for label, _ in pictures.rows] == ["victim's record", SINGLE, sum_view(2), "its nearest record"]
    broken = Curious([one, Failed("it broke")])
    assert verdict(broken) == "not measured (it broke)."
    assert gallery("", broken) is None
    shown = SERVER.present(AttackRequest(config_of(), ("plain",), QUICK), {"plain": broken})
    assert shown.rows[0][:4] == ["plain", "", "", "failed: it broke"]
    assert SERVER.present(AttackRequest(config_of(), ("plain",), QUICK), {"plain": Failed("x")}).verdict.startswith(
        "No verdict"
    )


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (ServerOptions(sums="2,x"), "sums over '2,x' clients"),
        (ServerOptions(sums="2,2"), "sums over '2,2' clients"),
        (ServerOptions(sums="0"), "sums over '0' clients"),
        (ServerOptions(difference=1), "a sum over 1 clients"),
        (ServerOptions(rounds=0), "0 rounds of 1 records per client"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, options, what):
    with pytest.raises(BadArgument, match=what):
        SERVER.graph(AttackRequest(config_of(data="digits"), ("plain",), options), tmp_path)


def test_records_that_are_no_images_and_too_few_records_are_refused():
    with pytest.raises(DoesNotApply, match="the records are not images"):
        images_and_model(config_of(data="diabetes"), None)
    with pytest.raises(BadArgument, match="5 training records, 100 clients need 100"):
        attack_round(config_of(data="digits", train_size=5), ServerOptions())


def test_the_server_has_gradients_and_no_noise_of_its_own():
    federation = federation_of(Veil(groups=10, entropy=Entropy.for_tests(0)), clients=2, dtype=torch.float64)
    inputs, targets = DIGITS.train.tensor[:1].double(), DIGITS.train.targets[:1]
    wanted = mean_gradients(federation.model, federation.loss, inputs, targets)
    assert relative(read_updates(federation, [0])[0], wanted) < 1e4 * EPS


AUDIT = [
    *("audit", "--data", "digits", "--train-size", "200", "--clients", "2", "--epochs", "1", "--defence", "veil"),
    *("--trials", "1", "--broadcasts", "1", "--shadows", "0", "--no-network", "--workers", "1"),
]


def test_the_audit_has_the_curious_server_once_beside_the_undefended_federation(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(audit, "CURIOUS", dataclasses.replace(QUICK, rounds=1))
    assert cli.main([*AUDIT, "--out", str(tmp_path)]) == 0, capsys.readouterr().err
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert results["veil"]["server"] is None
    [found] = results["undefended"]["server"]["rounds"]
    assert found["views"][SAME_MODEL]["attacks"]["first layer"]["psnr"] == 120.0
    page = (tmp_path / "report.html").read_text()
    assert page.index("Verdict") < page.index("Curious server")
    assert "curious server: LEAK: a record from single update (1 of 1 rounds)" in " ".join(
        capsys.readouterr().out.split()
    )
    words = ["--no-server", *AUDIT[1:]]
    assert not audit.AUDIT.server_rounds(
        AttackRequest(config_of(), ("plain",), AuditCommand.parse("fedveil audit", words).attack)
    )


@pytest.mark.slow
def test_on_digits_a_large_sum_hides_what_small_ones_show():
    options = dataclasses.replace(audit.CURIOUS, sums="2,300")
    rounds = Curious([attack_round(config_of(data="digits"), options, number) for number in range(4)])
    shown, _, hidden = verdict(rounds).partition("; no record from ")
    for view in (SINGLE, sum_view(2), difference_view(10, "same model")):
        assert f"{view} (4 of 4 rounds)" in shown
    assert sum_view(300) in hidden
