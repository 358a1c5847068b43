"""Privacy for records in a federation: equality with the plain clipped sum, noise, accounting, and what is refused."""

import math

import pytest
import torch
from scipy import stats
from torch import nn

import fedveil
from fedveil import Federation, Privacy
from fedveil.errors import Aborted, BadArgument
from fedveil.models import mlp
from fedveil.privacy.accounting import epsilon
from fedveil.privacy.gradients import RecordGradients, clipped_sums
from fedveil.scheme.losses import find_loss

SIZES = (40, 25, 31, 12)
WAYS = [
    ("plain", False, "server"),
    ("veil", False, "server"),
    ("plain", True, "server"),
    ("veil", True, "server"),
    ("plain", True, "clients"),
    ("veil", True, "clients"),
]


def records(seed=0, sizes=SIZES):
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, 6, generator=draw), torch.randint(0, 3, (n,), generator=draw)) for n in sizes]


def network(dtype=torch.float64):
    torch.manual_seed(3)
    return mlp(6, 3, hidden=5).to(dtype)


def federation(defence="plain", secure=False, clients=None, dtype=torch.float64, sgd=0.0, **privacy):
    settings = Privacy(**{"noise": 1.0, "clip": 0.5, "rate": 1.0, **privacy})
    return Federation(
        network(dtype),
        clients or records(),
        defence,
        lambda parameters: torch.optim.SGD(parameters, sgd),
        privacy=settings,
        secure_aggregation=secure,
    )


def flat(tensors):
    return torch.cat([own.double().reshape(-1) for own in tensors.values()])


@pytest.mark.parametrize(("defence", "secure", "noise_by"), WAYS)
def test_without_noise_the_result_is_the_mean_of_clipped_gradients(defence, secure, noise_by):
    own = federation(defence, secure, noise=0.0, noise_by=noise_by)
    found = flat(own.step().gradients)
    inputs, targets = (torch.cat(parts) for parts in zip(*records(), strict=True))
    task = RecordGradients.from_model(network(), find_loss("cross_entropy"))
    every = torch.ones(len(targets), dtype=torch.bool)
    wanted = flat(clipped_sums(task, inputs.double(), targets, every, 0.5)) / sum(SIZES)
    grid = own.defence.privacy.grid(len(wanted), 3 if defence == "veil" else 1, 4 if secure else None)
    rounding = grid.unit / 2 * len(SIZES) / sum(SIZES)  # half a unit for each client and number
    assert float((found - wanted).abs().max()) <= rounding + 1e-15


def noises(count, defence, secure, noise_by, **more):
    """The noise of rounds of one federation, in units of what the multiplier promises."""
    own = federation(defence, secure, noise_by=noise_by, **more)
    quiet = federation(defence, secure, noise_by=noise_by, **{**more, "noise": 0.0})
    wanted = flat(quiet.step().gradients)
    found = torch.cat([flat(own.step().gradients) - wanted for _ in range(count)])
    members, candidates = (4, 3 if defence == "veil" else 1) if noise_by == "clients" else (None, 1)
    promised = own.defence.privacy.noise * own.defence.privacy.grid(len(wanted), candidates, members).sensitivity
    return found.numpy() * own.defence.privacy.rate * sum(SIZES) / promised


@pytest.mark.parametrize(("defence", "secure", "noise_by"), WAYS)
def test_noise_has_the_promised_deviation(defence, secure, noise_by):
    drawn = noises(60, defence, secure, noise_by)
    expected = math.sqrt(4 / 3) if noise_by == "clients" else 1.0  # one client's share is not relied on
    bound = math.sqrt(math.log(2 / 1e-11) / 2 / len(drawn)) + 1e-6  # Dvoretzky-Kiefer-Wolfowitz, and a unit of the grid
    assert stats.kstest(drawn / expected, "norm").statistic < bound
    assert stats.kstest(drawn / expected / 1.25, "norm").statistic > bound  # a planted error shows


def test_noise_is_drawn_anew_in_every_round_and_never_seeded_by_the_run():
    first, second = (flat(federation().step().gradients) for _ in range(2))
    assert not torch.equal(first, second)


def test_a_sample_is_a_poisson_sample_and_padding_does_not_count():
    own = federation(rate=0.3, noise=0.0)
    sizes = []
    client = own.clients.client
    for _ in range(200):
        rows, included = client.sample(40)
        assert len(rows) == own.defence.privacy.capacity(40)
        assert len(set(rows[included].tolist())) == int(included.sum())
        sizes.append(int(included.sum()))
    total = stats.binom(40 * 200, 0.3)
    assert total.ppf(1e-10) <= sum(sizes) <= total.ppf(1 - 1e-10)


def test_empty_samples_send_noise_alone():
    own = federation(rate=1e-12)
    found = flat(own.step().gradients) * 1e-12 * sum(SIZES)
    grid = own.defence.privacy.grid(len(found), 1, None)
    assert 0 < float(found.abs().max()) < 8 * grid.deviation


def test_epsilon_is_counted_and_training_stops_at_the_budget(caplog):
    own = federation(noise=2.0, epsilon=4.0)
    history = own.fit(rounds=100)
    rounds = len(history.records)
    assert epsilon(rounds, 2.0, 1e-5) <= 4.0 < epsilon(rounds + 1, 2.0, 1e-5)
    assert history.last["epsilon"] == pytest.approx(epsilon(rounds, 2.0, 1e-5))
    assert "exceed the budget" in caplog.text
    with pytest.raises(BadArgument, match="exceed the budget"):
        own.step()


def test_a_resumed_run_counts_every_round(tmp_path):
    first = federation(noise=2.0)
    first.fit(rounds=3, folder=tmp_path)
    second = federation(noise=2.0)
    second.fit(rounds=5, folder=tmp_path, resume=True)
    assert second.defence_server.accountant.rounds == 5
    other = federation(noise=1.0)
    with pytest.raises(BadArgument, match="the rounds so far had noise = 2"):
        other.fit(rounds=6, folder=tmp_path, resume=True)


def test_epsilon_differs_by_client_where_they_take_part_in_different_rounds():
    own = Federation(network(), records(), "plain", privacy=Privacy(noise=1.0, rate=0.2), participation=0.5)
    own.fit(rounds=5)
    accountant = own.defence_server.accountant
    counts = accountant.state()["own"].values()
    assert len(set(counts)) > 1
    assert accountant.epsilon() == epsilon(max(counts), 1.0, 1e-5, 0.2)


class Recorder:
    """Everything that passes between clients and server, apart from the noisy sums."""

    def __init__(self):
        self.seen = []

    def __call__(self, broadcast, updates):
        shapes = [{name: (tuple(own.shape), own.dtype) for name, own in update.sums.items()} for update in updates]
        self.seen.append((type(broadcast), shapes))


@pytest.mark.parametrize("secure", [False, True])
def test_neighbouring_data_give_the_same_messages_but_for_the_sum(secure, monkeypatch):
    """One record has a gradient a million times as large: ranges, counts and weights must not show it."""
    seen = []
    for scale in (1.0, 1e6):
        clients = records()
        clients[0][0][0] *= scale
        terms = []
        own = federation(secure=secure, clients=clients, rate=0.5)
        recorder = Recorder()
        if secure:
            ask = own.clients.ask_masked
            monkeypatch.setattr(
                own.clients,
                "ask_masked",
                lambda number, r, m, t, c, ask=ask, terms=terms: (terms.append(public(t)), ask(number, r, m, t, c))[1],
            )
        for _ in range(3):
            own.step(None if secure else recorder)
        seen.append((terms, recorder.seen))
    assert seen[0] == seen[1]
    assert seen[0][0] or seen[0][1]


def public(terms):
    """The terms of an attempt without keys, which are random."""
    opening = terms.opening
    return opening.round, opening.exponents, opening.rows, opening.checks, terms.clip


def test_a_record_that_is_not_finite_is_dropped_without_a_word():
    clients = records()
    clients[0][1][0] = 2
    broken = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        broken[0].weight.fill_(1e200)  # outputs overflow
    own = Federation(broken, clients, "plain", privacy=Privacy(noise=1.0, rate=1.0))
    assert all(bool(g.isfinite().all()) for g in own.step().gradients.values())


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            lambda: Federation(
                nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)),
                records(),
                "plain",
                privacy=Privacy(noise=1.0),
            ),
            "with_group_norm",
        ),
        (lambda: Federation(network(), records(), fedveil.Veil(), privacy=Privacy(noise=1.0)), r"multiplicative=1\.0"),
        (
            lambda: Federation(network(), records(), "ppdl", privacy=Privacy(noise=1.0)),
            "only without a defence, or with a veil",
        ),
        (
            lambda: Federation(
                network(), records(), "plain", privacy=Privacy(noise=1.0), limits=fedveil.Limits(aggregator="median")
            ),
            "Limits",
        ),
        (
            lambda: Federation(
                network(), records(), "plain", loss=fedveil.BatchLoss(nn.CrossEntropyLoss()), privacy=Privacy(noise=1.0)
            ),
            "no record has a gradient of its own",
        ),
        (lambda: federation(noise_by="clients").step(), "secure_aggregation=True"),
        (lambda: federation(noise_by="clients", secure=True, colluding=3, vanishing=1).step(), "no noise is left"),
    ],
)
def test_what_cannot_be_private_is_refused_with_its_fix(build, text):
    with pytest.raises(BadArgument, match=text):
        build().step()


def test_factors_are_accepted_when_asked_for():
    own = Federation(network(), records(), fedveil.Veil(decoys=2), privacy=Privacy(noise=1.0, allow_factors=True))
    assert own.step().figures["epsilon"] > 0


def test_a_client_unit_has_its_budget_too():
    own = Federation(network(), records(), "plain", privacy=Privacy(unit="client", epsilon=5.0, rounds=10))
    assert len(own.fit(rounds=20).records) == 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_dtypes_have_the_same_noise(dtype):
    drawn = []
    quiet = flat(federation(noise=0.0, dtype=dtype).step().gradients)
    for _ in range(40):
        drawn.append(flat(federation(dtype=dtype).step().gradients) - quiet)
    own = federation(dtype=dtype)
    promised = own.defence.privacy.grid(len(quiet), 1, None).deviation / sum(SIZES)
    scaled = torch.cat(drawn).numpy() / promised
    assert stats.kstest(scaled, "norm").statistic < math.sqrt(math.log(2 / 1e-11) / 2 / len(scaled))


def test_settings_of_the_noise_stay_when_a_run_is_resumed(tmp_path):
    federation(secure=True, noise_by="clients").fit(rounds=1, folder=tmp_path)
    with pytest.raises(BadArgument, match="vanishing = 0"):
        federation(secure=True, noise_by="clients", vanishing=1).fit(rounds=2, folder=tmp_path, resume=True)


def test_a_sum_without_enough_shares_of_noise_is_not_used():
    own = federation(secure=True, noise_by="clients", vanishing=1).defence_server.start_round(network())
    total = {name: torch.zeros(like.shape, dtype=torch.float64) for name, like in own.template.items()}
    own.recover_total(total, 10, 4, 3)
    with pytest.raises(Aborted, match="2 of 4 clients"):
        own.recover_total(total, 10, 4, 2)


def test_dropout_does_not_follow_from_a_seed():
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.Linear(50, 3)).double()
        own = Federation(model, records(), "plain", privacy=Privacy(noise=0.0, rate=1.0, epsilon=None))
        torch.manual_seed(0)
        found.append(flat(own.step().gradients))
    assert not torch.equal(*found)


class Counting(nn.Module):
    """Has a buffer that changes in forward."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x):
        self.seen += x.mean(0).detach()
        return self.head(x)


def test_buffers_that_depend_on_records_are_refused():
    with pytest.raises(BadArgument, match="buffer seen depends on the clients' data"):
        Federation(Counting(), records(), "plain", privacy=Privacy(noise=1.0))


def test_instance_norm_keeps_records_apart_and_is_accepted():
    model = nn.Sequential(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2), nn.Flatten(), nn.Linear(6, 3))
    assert Federation(model, records(), "plain", privacy=Privacy(noise=1.0)).step().gradients
