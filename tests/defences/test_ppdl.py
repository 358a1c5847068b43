"""PPDL: what clients do to their gradients before they upload them."""

import math
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.defences.runs import federation, records, same, values
from tests.oracle import plain
from torch import nn

from fedveil import errors
from fedveil.defences import Plain
from fedveil.defences.plain import PlainUpdate
from fedveil.defences.ppdl import MEDIAN_ROUNDS, PPDL, PPDLClient, PPDLRound
from fedveil.federation.checkpoint import read, save
from fedveil.models import mlp
from fedveil.scheme import SquaredError

T = 30.0  # statistical bounds below fail by chance with probability at most 2 exp(-T) = 2e-13
EPS = {torch.float32: 2.0**-23, torch.float64: 2.0**-52}


def update(*tensors):
    return PlainUpdate({str(number): torch.as_tensor(t) for number, t in enumerate(tensors)}, {})


def flat(sent):
    return torch.cat([g.flatten() for g in sent.gradients.values()])


class use:
    """A client of PPDL and a round, for updates of any shape."""

    def __init__(self, *settings, make=PPDL, **named):
        self.client = PPDLClient(make(*settings, **named), nn.Linear(1, 1), SquaredError())
        self.upload, self.recover = self.client.upload, PPDLRound(nn.Linear(1, 1), {}).recover


use_setting = partial(use, make=PPDL.from_setting)


def noise(defence, count=100_000, client=0):
    """What a client adds to a gradient of zeros."""
    return flat(defence.upload(update(torch.zeros(count, dtype=torch.float64)), client))


def selected(values, count):
    """The slow, obvious selection."""
    order = sorted(range(len(values)), key=lambda place: (-abs(values[place]), place))[:count]
    found = np.zeros_like(values)
    found[order] = values[order]
    return found


# Selection


@given(
    st.lists(st.lists(st.integers(-3, 3), min_size=1, max_size=12), min_size=1, max_size=4),
    st.floats(0.001, 1.0),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_selection_keeps_exactly_the_largest_of_all_and_the_first_of_equals(rows, fraction, dtype):
    gradient = update(*[torch.tensor(row, dtype=dtype) for row in rows])
    numbers = flat(gradient).numpy()
    sent = flat(use(fraction).upload(gradient))
    assert sent.dtype == dtype
    np.testing.assert_array_equal(sent.numpy(), selected(numbers, max(1, round(fraction * len(numbers)))))


def test_a_round_is_a_step_along_the_weighted_mean_of_what_each_client_selects():
    run = federation("mlp", PPDL(0.2), records((6,), classes=False))
    start = nn.utils.parameters_to_vector(run.model.parameters()).detach().clone()
    expected = np.zeros(len(start))
    for client, size in enumerate(run.shards.sizes):
        rows = run.shards.rows(client, 0)
        own = flat(PlainUpdate(*plain(run.model, run.shards.inputs[rows], run.shards.targets[rows]))).numpy()
        expected += size / 60 * selected(own, round(0.2 * len(own)))
    assert 0.2 * len(expected) < np.count_nonzero(expected) < 0.6 * len(expected)
    run.step()
    found = nn.utils.parameters_to_vector(run.model.parameters()).detach()
    torch.testing.assert_close(found, start - 0.1 * torch.from_numpy(expected))


# Clipping


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30])
def test_clipping_bounds_the_norm_of_the_whole_gradient_and_keeps_its_direction(dtype, scale):
    generator = torch.Generator().manual_seed(0)
    pieces = [torch.randn(size, generator=generator, dtype=dtype) * scale for size in (300, 7, 200)]
    before = flat(update(*pieces)).tolist()
    bound = 0.3 * math.hypot(*before)
    after = flat(use(1.0, clip=bound).upload(update(*pieces))).tolist()
    # the factor and each product are rounded once in dtype; the norm in float64 sums 507 squares
    slack = 2 * EPS[dtype] + (len(before) + 4) * EPS[torch.float64]
    assert abs(math.hypot(*after) / bound - 1) <= slack
    assert flat(use(1.0, clip=bound / 0.299).upload(update(*pieces))).tolist() == before  # within the bound
    assert all(abs(a - 0.3 * b) <= slack * abs(0.3 * b) for a, b in zip(after, before, strict=True))


def test_a_clients_bound_is_the_median_of_its_first_hundred_norms():
    chance = np.random.Generator(np.random.PCG64(0))
    norms = chance.lognormal(size=(2, MEDIAN_ROUNDS + 50)) * [[1.0], [1000.0]]
    defence, shortened = use(1.0, clip="median"), 0
    for number in range(norms.shape[1]):
        for client in range(2):
            (sent,) = flat(defence.upload(update(torch.tensor([norms[client, number]])), client)).tolist()
            bound = np.median(norms[client, : min(number + 1, MEDIAN_ROUNDS)])
            assert sent == pytest.approx(min(norms[client, number], bound), rel=4 * EPS[torch.float64])
            shortened += norms[client, number] > bound
    assert shortened > 100


def test_norms_of_zero_and_of_no_number_do_not_count_for_the_median():
    defence = use(1.0, clip="median")
    for value in (0.0, math.nan, math.inf, 2.0, 0.0):
        (sent,) = flat(defence.upload(update(torch.tensor([value])))).tolist()
        assert sent == value or math.isnan(value)
    assert defence.client.state(0)["norms"] == [2.0]


def test_a_finite_gradient_whose_norm_overflows_is_not_clipped_to_nothing():
    gradient = update(torch.tensor([1e200, -1e200], dtype=torch.float64))
    for bound in (1.0, "median"):
        assert same(use(1.0, clip=bound).upload(gradient).gradients, gradient.gradients)


# Noise


def test_noise_is_new_for_every_client_round_and_seed():
    first, second = use(1.0, 1.0, seed=0), use(1.0, 1.0, seed=2**32)
    draws = [noise(first), noise(first), noise(first, client=1), noise(first, client=2**32), noise(second)]
    draws += [noise(use(1.0, 1.0)), noise(use(1.0, 1.0))]
    for number, a in enumerate(draws):
        for b in draws[:number]:
            assert abs(float(a @ b / b.norm())) <= math.sqrt(2 * T)  # standard normal if they are independent
    again = use(1.0, 1.0, seed=0)
    assert torch.equal(noise(again, client=1), draws[2])  # whatever other clients drew before
    assert torch.equal(noise(again), draws[0])


@pytest.mark.parametrize(("seed", "sigma"), [(None, 1.0), (0, 1e-4), (0, 3.0)])
def test_noise_is_normal_of_the_stated_deviation_from_a_source_of_full_width(seed, sigma):
    defence = use(1.0, sigma, seed=seed)
    first, second = noise(defence), noise(defence)
    key = bytes(defence.client.state(0)["key"].tolist())
    assert len(key) == 16
    assert key not in {bytes(use(1.0, 1.0, seed=s).client._find_state(c).key) for s, c in ((None, 0), (0, 1), (1, 0))}
    words = np.frombuffer(key, dtype="<u8")
    for number, drawn in enumerate((first, second), 1):  # numpy reads the key as we wrote it, with a counter per draw
        source = np.random.Generator(np.random.Philox(key=words, counter=[0, 0, 0, number]))
        np.testing.assert_array_equal(drawn.numpy(), sigma * source.standard_normal(len(drawn)))


def test_clipping_comes_first_then_selection_then_noise_on_what_was_selected():
    gradient = torch.randn(200, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    bound = 0.5 * float(gradient.norm())
    clipped = flat(use(1.0, clip=bound).upload(update(gradient)))
    expected = selected(clipped.numpy(), 50)
    expected[expected != 0] += noise(use(1.0, 0.1, seed=0), 50).numpy()
    sent = flat(use(0.25, 0.1, bound, seed=0).upload(update(gradient)))
    np.testing.assert_array_equal(sent.numpy(), expected)
    assert int(sent.count_nonzero()) == 50


# Whole runs


def test_batch_norm_statistics_are_sent_unchanged():
    runs = [federation("resnet, batch", d) for d in (PPDL.from_setting("both", sigma=1.0), Plain())]
    for run in runs:
        run.step()
    assert same(*[dict(run.model.named_buffers()) for run in runs])


@pytest.mark.parametrize("others", [1.0, torch.finfo(torch.float32).max])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_not_finite_is_never_thinned_away(bad, others):
    gradient = torch.full((50,), others)
    gradient[17] = bad
    for defence in (use(0.02), use(0.02, clip=0.1), use_setting("both")):
        sent = defence.upload(update(gradient))
        with pytest.raises(errors.NonFiniteUpdate, match="client 0"):
            defence.recover([sent], [1.0])
    fine = defence.recover([defence.upload(update(torch.ones(50)))], [1.0])  # nothing is left of the round before
    assert math.isfinite(fine.error)


# Records


def test_a_rounds_record_says_how_large_noise_and_change_are():
    run = federation("mlp", PPDL(0.5, 0.1, 0.5, seed=0), records((6,), (20,), classes=False))
    rows = run.shards.rows(0, 0)
    true = flat(PlainUpdate(*plain(run.model, run.shards.inputs[rows], run.shards.targets[rows])))
    assert true.norm() > 0.5
    kept = true.abs().sort(descending=True).values[: round(0.5 * len(true))] * 0.5 / true.norm()
    result = run.step()
    sent = flat(PlainUpdate(result.gradients, {}))
    slack = 2 * len(true) * EPS[torch.float64]  # two sums of squares
    assert result.figures["noise_over_rms"] == pytest.approx(float(0.1 / kept.square().mean().sqrt()), rel=slack)
    assert result.error == pytest.approx(float((sent - true).norm() / true.norm()), rel=slack)
    assert result.figures["clipped"] == 1.0


def test_a_rounds_error_is_the_clients_mean_by_weight():
    defence = use(0.5, clip=4.0)
    sent = [defence.upload(update(torch.tensor(g)), k) for k, g in enumerate([[3.0, 1.0], [0.0, 8.0], [0.0, 2.0]])]
    result = defence.recover(sent, [5.0, 2.0, 3.0])
    expected = (5 * 1 + 2 * 4 + 3 * 0) / (5 * math.sqrt(10) + 2 * 8 + 3 * 2)
    assert result.error == pytest.approx(expected, rel=4 * EPS[torch.float64])
    assert result.figures["clipped"] == pytest.approx(1 / 3)
    assert result.figures["bytes_up"] == 5  # one float32, and a byte that says which


def test_the_record_claims_nothing_where_others_made_the_uploads_and_is_finite_for_zeros():
    defence, sent = use_setting("both", seed=0), use_setting("both").upload(update(torch.ones(20)))
    result = defence.recover([PlainUpdate(sent.gradients, sent.buffers)], [1.0])  # as it comes from a message
    assert (result.error, result.figures) == (0.0, {})
    result = defence.recover([defence.upload(update(torch.zeros(20)))], [1.0])
    assert (result.error, result.figures["clipped"]) == (0.0, 0.0)
    assert "noise_over_rms" not in result.figures


def test_what_a_client_measured_is_neither_printed_nor_pickled():
    sent = use_setting("both", seed=0).upload(update(torch.ones(20)))
    assert sent.measurement is not None
    assert "measurement" not in repr(sent)
    assert pickle.loads(pickle.dumps(sent)).measurement is None


# Resuming

LAST = MEDIAN_ROUNDS + 10


def resumable(seed, **options):
    net = (lambda: mlp(6, 4, layers=1, hidden=5), (6,))
    return federation(net, PPDL.from_setting("both", sigma=0.01, seed=seed), optimizer=torch.optim.Adam, **options)


def lines(history):
    return [{key: value for key, value in record.items() if key != "seconds"} for record in history.records]


@pytest.mark.parametrize(
    ("stop", "lost"), [(60, None), (MEDIAN_ROUNDS + 3, None), (60, "key"), (60, "draws"), (60, "norms")]
)
def test_a_resumed_run_is_the_uninterrupted_run_bit_for_bit_and_needs_all_that_clients_keep(tmp_path, stop, lost):
    whole = resumable(seed=0)
    whole.fit(rounds=LAST)
    resumable(seed=0).fit(rounds=stop, folder=tmp_path)
    fresh = {"key": torch.zeros(16, dtype=torch.uint8), "draws": 0, "norms": []}
    for path in tmp_path.glob(f"clients/*/{stop}.pt"):
        belongs, state = read(path)
        save(path, {key: fresh[key] if key == lost else state[key] for key in fresh}, belongs)
    again = resumable(seed=None)  # so that noise can only continue from what was kept
    again.resume(tmp_path)
    again.fit(rounds=LAST)
    assert same(values(again.model), values(whole.model)) == (lost is None)
    assert (lines(again.history) == lines(whole.history)) == (lost is None)


def test_clients_that_had_not_yet_taken_part_start_again_in_the_same_object(tmp_path):
    run = resumable(seed=0, participation=0.3)  # one client a round
    run.fit(rounds=2, folder=tmp_path)
    assert len(list(tmp_path.glob("clients/*/2.pt"))) < 3
    run.fit(rounds=12)
    first = values(run.model)
    assert all(run.clients.client.state(client) for client in range(3))
    run.resume(tmp_path)
    run.fit(rounds=12)
    assert same(values(run.model), first)


def test_the_server_keeps_nothing_and_neither_does_a_client_that_only_selects(tmp_path):
    noisy = resumable(seed=0)
    noisy.fit(rounds=1, folder=tmp_path)
    assert noisy.state()["defence"] == {"name": "ppdl-both"}
    assert {path.parent.name for path in tmp_path.glob("clients/*/1.pt")} == {"0", "1", "2"}
    run = federation("mlp", PPDL())
    run.step()
    assert run.clients.client.state(0) == {}


# Arguments


def test_three_settings_have_names():
    found = {s: PPDL.from_setting(s) for s in ("sel", "noise", "both")}
    assert {s: (d.name, d.fraction, d.sigma, d.clip) for s, d in found.items()} == {
        "sel": ("ppdl-sel", 0.1, 0.0, None),
        "noise": ("ppdl-noise", 1.0, 1e-2, "median"),
        "both": ("ppdl-both", 0.1, 1e-2, "median"),
    }
    swept = PPDL.from_setting("both", fraction=0.5, sigma=0.0)
    assert (swept.fraction, swept.sigma, swept.clip) == (0.5, 0.0, "median")
    assert PPDL().name == "ppdl"


@pytest.mark.parametrize("setting", [("all", {}), ("sel", {"sigma": 0.1}), ("noise", {"fraction": 0.5})])
def test_settings_that_do_not_exist_are_refused(setting):
    with pytest.raises(errors.BadArgument, match=r"PPDL.from_setting: (there is no setting|setting '\w+' has no)"):
        PPDL.from_setting(setting[0], **setting[1])
