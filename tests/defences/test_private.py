"""Differential privacy on top: what a client can move, what noise covers it, what is counted, and what is refused."""

import json
import math
import sys
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from tests.configs import config_of
from tests.defences.runs import DEFENCES, NETS, records, sgd, values
from tests.oracle import batch, built, flat, worst
from tests.sessions import Session
from torch import nn

from fedveil import Entropy, cli, errors
from fedveil.defences import DBCL, PPDL, Plain, Private, Samples, Veil
from fedveil.defences.plain import PlainRound, PlainUpdate, average
from fedveil.defences.private import ClientPrivateRound, find_mutated_tensors
from fedveil.federation import Federation
from fedveil.models import cnn, resnet
from fedveil.privacy.accounting import epsilon
from fedveil.privacy.mechanism import clip_vector
from fedveil.records.shards import generator
from fedveil.runs.build import build_defence
from fedveil.runs.settings import configure
from fedveil.scheme.losses import CrossEntropy, SquaredError
from fedveil.scheme.result import Aggregate

EPS = torch.finfo(torch.float64).eps
RARE = 1e-9  # the chance that a sound source of noise fails a test
every_defence = pytest.mark.parametrize("make", DEFENCES.values(), ids=DEFENCES)


def private(inner=None, clip=1.0, noise=1.0, *, seed=0, **options):
    return Private(inner or Plain(), clip, noise, entropy=Entropy.for_tests(seed), **options)


def net():
    return built(NETS["mlp"][0])


def federation(defence, clients=3, **options):
    """Classes that a small network can learn."""
    parts = records((6,), range(9, 9 + clients))
    return Federation(net(), parts, defence, sgd, batch_size=4, **{"loss": "cross_entropy", **options})


def round_of(defence, members=None):
    """A round of plain updates of any shape."""
    return defence.wrap(PlainRound(nn.Linear(1, 1), {}), None, members)


def updates_of(*gradients):
    return [PlainUpdate({"w": g}, {}) for g in gradients]


# What a client can move


numbers = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(numbers, min_size=1, max_size=30), st.floats(1e-30, 1e30))
def test_no_contribution_is_longer_than_clip(values, clip):
    own = torch.tensor(values, dtype=torch.float64)
    short, size, cut = clip_vector(own, clip)
    length = sum(Fraction(x) ** 2 for x in short.tolist())
    assert length <= Fraction(clip) ** 2  # in exact arithmetic
    assert size <= clip
    if cut:
        slack = 2 * (len(values) + 8) * EPS
        assert math.sqrt(length) >= clip * (1 - 2 * slack)
        assert ((short / clip - own / own.abs().max() / (own / own.abs().max()).norm()).abs() <= 2 * slack).all()
    else:
        assert torch.equal(short, own)


def test_the_whole_gradient_is_clipped_not_each_tensor():
    run = federation(private(clip=0.01, noise=0.0), clients=1)
    plain = federation(Plain(), clients=1, fuse=False)
    found, true = flat(run.step().gradients), flat(plain.step().gradients)
    assert true.norm() > 0.01
    assert abs(float(found.norm()) / 0.01 - 1) < 2 * len(found) * EPS
    torch.testing.assert_close(found / found.norm(), true / true.norm())


def test_without_noise_and_with_a_huge_clip_it_is_plain_with_equal_weights():
    found = [torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(k)) for k in range(5)]
    ours = round_of(private(clip=1e30, noise=0.0)).recover(updates_of(*found), [1.0, 2.0, 3.0, 4.0, 5.0])
    plain = average(updates_of(*found), [1.0] * 5, {})
    size = torch.stack(found).abs().mean(0)
    assert ((ours.gradients["w"] - plain.gradients["w"]).abs() <= (5 + 2) * EPS * size).all()
    assert ours.figures == {"dp_clipped": 0.0}  # no noise, no epsilon


def test_weights_play_no_part_and_the_clipped_fraction_is_recorded():
    found = updates_of(*[torch.full((4,), size, dtype=torch.float64) for size in (0.1, 1.0, 10.0, 0.2)])
    one, other = (round_of(private(noise=2.0)).recover(found, weights) for weights in ([1.0] * 4, [9.0, 1.0, 1.0, 0.0]))
    assert torch.equal(one.gradients["w"], other.gradients["w"])
    assert one.figures["dp_clipped"] == 0.5


# What noise covers it


def noise_of(defence, count, clients=1, dtype=torch.float64):
    """What a round adds to the sum of clients that send zeros."""
    defence_round = defence if isinstance(defence, ClientPrivateRound) else round_of(defence)
    result = defence_round.recover(updates_of(*[torch.zeros(count, dtype=dtype)] * clients), [1.0] * clients)
    assert result.gradients["w"].dtype == dtype
    return result.gradients["w"].double() * clients


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("clip", "noise", "clients"), [(1.0, 1.0, 1), (0.5, 4.0, 10), (20.0, 0.01, 3)])
def test_noise_is_normal_and_has_the_stated_scale(clip, noise, clients, dtype):
    count = 20_000
    drawn = noise_of(Private(Plain(), clip, noise), count, clients, dtype) / (noise * clip)  # the system's entropy
    total = float(drawn.pow(2).sum())  # of N(0, 1): chi-square with `count` degrees of freedom
    assert stats.chi2.ppf(RARE / 2, count) < total < stats.chi2.isf(RARE / 2, count)
    assert abs(float(drawn.sum())) < stats.norm.isf(RARE / 2) * math.sqrt(count)
    steps = stats.norm.cdf(drawn.sort().values.numpy())
    apart = max((abs(steps - torch.arange(k, count + k).numpy() / count)).max() for k in (0, 1))
    assert apart < math.sqrt(math.log(2 / RARE) / (2 * count))  # Dvoretzky, Kiefer, Wolfowitz; Massart


def test_noise_is_new_in_every_round_and_repeats_only_from_a_seed_for_tests():
    defence = Private(Plain(), 1.0, 1.0)
    first, second = noise_of(defence, 5000), noise_of(defence, 5000)
    assert abs(float(first @ second / second.norm())) < stats.norm.isf(RARE / 2)  # N(0, 1), given the second
    assert not defence.repeatable
    assert private().repeatable
    assert torch.equal(noise_of(private(seed=3), 10), noise_of(private(seed=3), 10))
    assert not torch.equal(noise_of(private(seed=3), 10), noise_of(private(seed=4), 10))


def test_the_most_extreme_words_give_finite_noise():
    class Extreme(Entropy):
        def __init__(self, byte):
            super().__init__()
            self._bytes = lambda count: byte * count

    low, high = (float(Extreme(byte).normal(1)[0]) for byte in (b"\x00", b"\xff"))
    assert low == pytest.approx(stats.norm.ppf(2.0**-53))
    assert high == pytest.approx(-low, rel=1e-2)  # 1 - 2^-53 is the last number below 1


# What is counted


def test_records_have_what_is_spent_so_far():
    run = federation(private(noise=3.0, delta=1e-4))
    history = run.fit(rounds=4)
    assert [value for _, value in history.curve("epsilon")] == [epsilon(n, 3.0, 1e-4) for n in range(1, 5)]
    assert all(0 <= share <= 1 for _, share in history.curve("dp_clipped"))


def test_with_few_participants_the_client_that_took_part_most_counts():
    run = federation(private(), clients=8, participation=0.25)
    run.fit(rounds=12)
    drawn = [torch.randperm(8, generator=generator("clients", 0, number))[:2].tolist() for number in range(12)]
    counts = [sum(client in chosen for chosen in drawn) for client in range(8)]
    assert run.defence_server.accountant.rounds == max(counts) < 12
    assert run.defence_server.accountant.epsilon() == epsilon(max(counts), 1.0, 1e-5)


def test_where_nobody_says_who_took_part_a_round_counts_for_all():
    defence, counts = private(), []
    for members in (None, None, None, [5, 6, 7], [5, 6], [7, 8]):  # from elsewhere, one refused, known
        noise_of(round_of(defence, members), 4, clients=2)
        counts.append(defence.accountant.rounds)
    assert counts == [1, 2, 3, 4, 5, 5]


def test_the_error_is_the_inner_defences():
    results = [Aggregate({"w": torch.full((4,), size).double()}, {}, 0.5) for size in (0.1, 9.0)]
    assert round_of(private()).combine(results).error == pytest.approx(0.5)  # noise does not count


@every_defence
def test_every_defence_trains_with_it_and_a_resumed_run_has_spent_the_same(tmp_path, make):
    whole = federation(private(make(), noise=0.5))
    whole.fit(rounds=6)
    federation(private(make(), noise=0.5)).fit(rounds=2, folder=tmp_path)
    again = federation(private(make(), noise=0.5))
    again.resume(tmp_path)
    assert again.defence_server.accountant.rounds == 2
    history = again.fit(rounds=6)
    assert again.defence.name == f"{make().name}+dp"
    assert not again.clients.fused
    assert history.curve("epsilon") == whole.history.curve("epsilon")
    assert all(torch.isfinite(p).all() for p in again.model.parameters())
    with pytest.raises(errors.BadArgument, match=r"the checkpoint was written with the defence '.*\+dp', not"):
        federation(make()).resume(tmp_path)


@pytest.mark.parametrize("changed", [{"clip": 2.0}, {"noise": 2.0}])
def test_a_run_is_not_resumed_with_other_settings(tmp_path, changed):
    federation(private()).fit(rounds=1, folder=tmp_path)
    with pytest.raises(errors.BadArgument, match=r"previous rounds used (clip|noise) = 1\.0, not 2\.0"):
        federation(private(**changed)).resume(tmp_path)


# It is the same on top of a veil


@pytest.mark.parametrize("whole_shard", [False, True])
@pytest.mark.parametrize("loss", ["squared_error", "cross_entropy"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_private_veiled_run_is_the_private_plain_run(loss, dtype, whole_shard):
    runs = []
    for inner in (Plain(), Veil(additive=100.0, entropy=Entropy.for_tests(1))):
        model, defence = built(NETS["mlp"][0], dtype=dtype), private(inner, 1.0, 0.1, seed=7)
        run = Federation(model, records((6,)), defence, sgd, batch_size=8, loss=loss, whole_shard=whole_shard)
        runs.append((run.fit(rounds=20), values(model)))
    (truth, plain), (found, veiled) = runs
    assert worst(veiled, plain) < (1e-12 if dtype == torch.float64 else 1e-5)
    assert found.curve("epsilon") == truth.curve("epsilon")
    assert found.curve("dp_clipped") == truth.curve("dp_clipped")
    assert all(0 < error < 1e-4 for _, error in found.curve("error"))


@every_defence
@pytest.mark.parametrize("loss", [SquaredError(), CrossEntropy()], ids=lambda loss: loss.name)
@pytest.mark.parametrize("name", ["mlp", "resnet, batch"])
def test_each_is_what_recovery_says_of_one_client(make, loss, name):
    build, shape = NETS[name]
    model, data = built(build), [(x, nn.functional.one_hot(y, 4).double()) for x, y in records(shape, (5, 6, 7))]

    def answered(clients):
        defence = Session(make(), model, data[0][0], loss)
        sent = defence.broadcast()
        return defence, [defence.upload(defence.step(sent, Samples(*data[k]), k), k) for k in clients]

    defence, updates = answered(range(3))
    for client, found in enumerate(defence.recover_each(updates)):
        alone, own = answered([client])
        truth = alone.recover(own, [1.0])
        assert worst(found.gradients, truth.gradients) < 1e-9
        assert found.figures == pytest.approx(truth.figures)
        assert set(found.buffers) == set(truth.buffers)


@pytest.mark.parametrize("make", [Plain, lambda: Veil(), PPDL, DBCL])
def test_a_gradient_that_is_not_finite_is_refused_with_the_position_of_its_client(make):
    x, y = batch((6,), 4)
    run = Session(private(make()), net(), x, "cross_entropy")
    sent = run.broadcast()
    steps = [run.upload(run.step(sent, Samples(x, y.softmax(1)), k), k) for k in range(3)]
    bad = run.upload(run.step(sent, Samples(x * math.inf, y.softmax(1)), 1), 1)
    with pytest.raises(errors.NonFiniteUpdate, match=r"client 1: .* contains NaN or infinity"):
        run.recover([steps[0], bad, steps[2]])
    assert run.server.accountant.rounds == 0  # nothing was given away
    with pytest.raises(errors.NonFiniteUpdate, match="client 4: its gradient contains NaN or infinity"):
        clip_vector(torch.tensor([1.0, math.nan]), 1.0, "client 4")


def test_a_secure_sum_is_not_rounded_before_the_noise_is_added(monkeypatch):
    """In float32, the rounding error grows with the number of clients, and with the sum of hostile ones."""
    seen = []
    monkeypatch.setattr("fedveil.defences.private.quantise", lambda total, grid: seen.append(total) or total)
    model = built(lambda: nn.Linear(6, 10)).float()
    clients = [tuple(own.float() for own in batch((6,), seed=k)) for k in range(4)]
    Federation(model, clients, private(Plain()), sgd, secure_aggregation=True, loss="squared_error").step()
    assert not torch.equal(seen[0], seen[0].float().double())  # four times a number in float32 is one


# What is refused


def test_models_whose_buffers_follow_the_data_are_refused():
    images = [batch((1, 8, 8), 4, seed=k) for k in range(2)]
    normed = built(lambda: resnet(8, 1, 4, width=4))
    text = r"(?s)privacy: buffer \S+running_mean depends on the clients' data.*Fix: use GroupNorm"
    with pytest.raises(errors.BadArgument, match=text):
        Federation(normed, images, private(), sgd)
    tracked = built(lambda: nn.Sequential(nn.InstanceNorm2d(1, track_running_stats=True), cnn(1, 4, width=4, size=8)))
    with pytest.raises(errors.BadArgument, match="depends on the clients' data"):
        Federation(tracked, images, private(), sgd)
    Federation(normed.eval(), images, private(), sgd).fit(rounds=1)  # stored statistics stay as they are
    Federation(built(lambda: resnet(8, 1, 4, width=4, norm="none")), images, private(), sgd).fit(rounds=1)


def test_the_search_for_moving_buffers_changes_neither_the_model_nor_the_random_state():
    model = built(lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout()))
    before, state = {name: b.clone() for name, b in model.named_buffers()}, torch.get_rng_state()
    moving = ["buffer 1.running_mean", "buffer 1.running_var", "buffer 1.num_batches_tracked"]
    assert find_mutated_tensors(model, batch((6,))[0]) == moving
    assert all(torch.equal(before[name], b) for name, b in model.named_buffers())
    assert torch.equal(state, torch.get_rng_state())


def test_single_gradients_empty_rounds_and_privacy_twice_are_refused():
    with pytest.raises(errors.BadArgument, match=r"plain\+dp is already private"):
        Private(Private(Plain(), 1.0, 1.0), 1.0, 1.0)
    with pytest.raises(errors.BadArgument, match="not individual updates"):
        round_of(private()).recover_each([])
    with pytest.raises(errors.BadArgument, match="a round needs at least one update"):
        round_of(private()).recover([], [])


def test_a_missing_library_is_named_with_its_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(errors.BadArgument, match=r"(?s)dp-accounting.*Fix: pip install 'fedveil\[dp\]'"):
        Private(Plain(), 1.0, 1.0)
    Private(Plain(), 1.0, 0.0)  # nothing to account


# From the command line


def test_settings_without_noise_are_refused():
    for build in (lambda: configure({"clip": 2.0}), lambda: build_defence(config_of(unit="client"))):
        with pytest.raises(errors.BadArgument, match=r"(?s)without epsilon or noise.*--epsilon 3"):
            build()


def test_train_prints_what_was_spent_and_resumes(tmp_path, capsys):
    flags = "--defence veil --loss cross_entropy --hidden 8 --batch-size 256 --unit client --noise 2 --delta 1e-6"
    command = ["train", *flags.split(), "--clients", "4", "--out", str(tmp_path), "--json"]
    assert cli.main([*command, "--epochs", "1"]) == 0
    assert cli.main([*command, "--epochs", "2", "--resume"]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    for summary in (first, second):
        assert summary["epsilon"] == epsilon(summary["rounds"], 2.0, 1e-6)
        assert summary["epsilon_replace"] == epsilon(summary["rounds"], 2.0, 1e-6, replace=True)
        assert summary["delta"] == 1e-6
    assert second["rounds"] == 2 * first["rounds"]
    assert "--noise 2.0 --delta 1e-06 --unit client" in second["repeat"]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["epsilon"] == second["epsilon"]
