"""Privacy for records in a federation: equality with the plain clipped sum, noise, accounting, and what is refused."""

import math

import pytest
import torch
from scipy import stats
from tests.oracle import Network, flat
from tests.seeding import seed_all
from torch import nn
from torch.utils.data import DataLoader

import fedveil
from fedveil import Federation, Privacy
from fedveil.defences.record_private import SumUpdate
from fedveil.errors import Aborted, BadArgument, TooLittleCovered, UpdateRefused
from fedveil.models import mlp
from fedveil.privacy.accounting import epsilon
from fedveil.privacy.gradients import RecordGradients, clipped_sums
from fedveil.privacy.mechanism import add_noise, sum_integers
from fedveil.privacy.samplers import SCALE
from fedveil.scheme import Entropy
from fedveil.scheme.losses import find_loss

SIZES = (40, 25, 31, 12)
PLACES = [(False, "server"), (True, "server"), (True, "clients")]
WAYS = [(defence, *place) for defence in ("plain", "veil") for place in PLACES]


def records(seed=0, sizes=SIZES):
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, 6, generator=draw), torch.randint(0, 3, (n,), generator=draw)) for n in sizes]


def network(dtype=torch.float64):
    torch.manual_seed(3)
    return mlp(6, 3, hidden=5).to(dtype)


def private(model=None, defence="plain", clients=None, **options):
    options = {"privacy": Privacy(noise=1.0), **options}
    return Federation(network() if model is None else model, clients or records(), defence, **options)


def federation(defence="plain", secure=False, clients=None, dtype=torch.float64, sgd=0.0, **privacy):
    settings = Privacy(**{"noise": 1.0, "clip": 0.5, "rate": 1.0, **privacy})
    options = {"optimizer": lambda parameters: torch.optim.SGD(parameters, sgd), "secure_aggregation": secure}
    return private(network(dtype), defence, clients, privacy=settings, **options)


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


def noises(count, defence, secure, noise_by, folder=None, **more):
    """The noise of rounds of one federation, resumed if there is a folder, in units of what the multiplier promises."""
    own = federation(defence, secure, noise_by=noise_by, **more)
    if folder is not None:
        own.fit(rounds=own.round + 1, folder=folder, resume=True)
    quiet = federation(defence, secure, noise_by=noise_by, **{**more, "noise": 0.0})
    wanted = flat(quiet.step().gradients)
    found = torch.cat([flat(own.step().gradients) - wanted for _ in range(count)])
    members, candidates = (4, 3 if defence == "veil" else 1) if noise_by == "clients" else (None, 1)
    promised = own.defence.privacy.noise * own.defence.privacy.grid(len(wanted), candidates, members).sensitivity
    return found.numpy() * own.defence.privacy.rate * sum(SIZES) / promised


@pytest.mark.parametrize(
    ("defence", "secure", "noise_by", "dtype"),
    [*[(*way, torch.float64) for way in WAYS], ("plain", False, "server", torch.float32)],
)
def test_noise_has_the_promised_deviation(defence, secure, noise_by, dtype):
    drawn = noises(60, defence, secure, noise_by, dtype=dtype)
    expected = math.sqrt(4 / 3) if noise_by == "clients" else 1.0  # one client's share is not relied on
    assert has_deviation(drawn, expected)
    assert not has_deviation(drawn, 1.25 * expected)  # a planted error shows


def has_deviation(drawn, expected):
    """Whether normal values have this deviation: by Dvoretzky-Kiefer-Wolfowitz, and up to a unit of the grid."""
    return stats.kstest(drawn / expected, "norm").statistic < math.sqrt(math.log(2 / 1e-11) / 2 / len(drawn)) + 1e-6


@pytest.mark.parametrize("place", PLACES)
def test_noise_of_a_resumed_run_is_as_promised_and_not_that_of_the_first(place, tmp_path):
    """Learning rate 0, so every round has the same sum. Noise that is used twice cancels in the difference."""
    first, second = (noises(40, "plain", *place, tmp_path / "run") for _ in range(2))
    expected = math.sqrt(4 / 3) if place[1] == "clients" else 1.0
    assert has_deviation(first, expected)
    assert has_deviation(second, expected)
    assert has_deviation(first - second, math.sqrt(2) * expected)
    assert not has_deviation(first - second, expected)  # the sample is large enough


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


def test_a_record_has_any_position_in_a_sample_with_equal_probability():
    """Otherwise a record in the sample would move others, and rounding depends on the position."""
    client, found = federation(rate=0.5, noise=0.0).clients.client, []
    while len(found) < 600:
        rows, included = client.sample(8)
        if included[rows == 0].any():
            found.append(int((included & (rows == 0)).nonzero()[0]) / len(rows))
    assert stats.kstest(found, stats.uniform(0, 1).cdf).statistic < 1 / len(rows) + math.sqrt(math.log(2e10) / 2 / 600)


def test_noise_is_added_to_exact_integers():
    """A huge sum, most of which a hostile client could subtract again, leaves the others' sums exact."""
    small = torch.tensor([3, -(2**40), 0])
    noisy = []
    for total in (small, small + 2**62):
        seed_all("noise")
        noisy.append(add_noise(total, Entropy()))
    assert torch.equal(noisy[1] - 2**62, noisy[0])
    assert not torch.equal(noisy[0], small)
    parts = [torch.tensor([2.0**53 - number], dtype=torch.float64) for number in (1, 2)]
    assert sum_integers(parts).tolist() == [2**54 - 3]  # which float64 cannot represent


def test_empty_samples_send_noise_alone():
    own = federation(rate=1e-12)
    found = flat(own.step().gradients) * 1e-12 * sum(SIZES)
    grid = own.defence.privacy.grid(len(found), 1, None)
    assert 0 < float(found.abs().max()) < 8 * SCALE * grid.unit


def test_epsilon_is_counted_and_training_stops_at_the_budget(caplog):
    own = federation(noise=2.0, epsilon=4.0)
    history = own.fit(rounds=100)
    rounds = len(history.records)
    assert epsilon(rounds, 2.0, 1e-5) <= 4.0 < epsilon(rounds + 1, 2.0, 1e-5)
    assert history.last["epsilon"] == pytest.approx(epsilon(rounds, 2.0, 1e-5))
    assert "exceed the epsilon budget" in caplog.text
    with pytest.raises(BadArgument, match="exceed the epsilon budget"):
        own.step()


def test_a_resumed_run_counts_every_round_and_keeps_its_settings(tmp_path):
    options = {"secure": True, "noise_by": "clients", "noise": 2.0}
    federation(**options).fit(rounds=3, folder=tmp_path)
    second = federation(**options)
    second.fit(rounds=5, folder=tmp_path, resume=True)
    assert second.defence_server.accountant.rounds == 5
    for changed, text in (({"noise": 1.0}, "previous rounds used noise = 2"), ({"vanishing": 1}, "vanishing = 0")):
        with pytest.raises(BadArgument, match=text):
            federation(**options | changed).fit(rounds=6, folder=tmp_path, resume=True)


def test_epsilon_differs_by_client_where_they_take_part_in_different_rounds():
    own = private(privacy=Privacy(noise=1.0, rate=0.2), participation=0.5)
    own.fit(rounds=5)
    accountant = own.defence_server.accountant
    counts = accountant.state()["own"].values()
    assert len(set(counts)) > 1
    assert accountant.epsilon() == epsilon(max(counts), 1.0, 1e-5, 0.2)


@pytest.mark.parametrize("secure", [False, True])
def test_neighbouring_data_give_the_same_messages_but_for_the_sum(secure, monkeypatch):
    """One record has a gradient a million times as large: ranges, counts and weights must not show it."""
    seen = []
    for scale in (1.0, 1e6):
        clients = records()
        clients[0][0][0] *= scale
        terms, shapes = [], []

        def record(broadcast, updates, shapes=shapes):
            shapes.append([{name: (own.shape, own.dtype) for name, own in update.sums.items()} for update in updates])

        own = federation(secure=secure, clients=clients, rate=0.5)
        if secure:
            ask = own.clients.ask_masked
            monkeypatch.setattr(
                own.clients,
                "ask_masked",
                lambda number, r, m, t, c, ask=ask, terms=terms: (terms.append(public(t)), ask(number, r, m, t, c))[1],
            )
        for _ in range(3):
            own.step(None if secure else record)
        seen.append((terms, shapes))
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
    own = private(broken, clients=clients, privacy=Privacy(noise=1.0, rate=1.0))
    assert all(bool(g.isfinite().all()) for g in own.step().gradients.values())


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: private(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))), "with_group_norm"),
        (lambda: private(defence=fedveil.Veil()), r"multiplicative=1\.0"),
        (lambda: private(defence="ppdl"), "only without a defence or with a veil"),
        (lambda: private(limits=fedveil.Limits(aggregator="median")), "Limits"),
        (lambda: private(loss=fedveil.BatchLoss(nn.CrossEntropyLoss())), "single records have no gradient"),
        (lambda: federation(noise_by="clients").step(), "secure_aggregation=True"),
        (lambda: federation(noise_by="clients", secure=True, colluding=3, vanishing=1).step(), "leaves no noise"),
    ],
)
def test_what_cannot_be_private_is_refused_with_its_fix(build, text):
    with pytest.raises(BadArgument, match=text):
        build().step()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_in_small_dtypes_are_refused(dtype):
    with pytest.raises(BadArgument, match=r"model\.float\(\)"):
        Federation(network().to(dtype), records(), "plain", privacy=Privacy(noise=1.0, rate=0.5))


def test_factors_are_accepted_when_asked_for():
    own = private(defence=fedveil.Veil(decoys=2), privacy=Privacy(noise=1.0, allow_factors=True))
    assert own.step().figures["epsilon"] > 0


def test_a_veil_for_records_has_no_factors_and_keeps_all_other_settings():
    own = fedveil.Veil(3, min_coverage=0.9, keep_noise=True).for_records()
    assert own.noise == fedveil.Veil(3, multiplicative=1.0, decoys=2, keep_noise=True).noise
    model = nn.Sequential(nn.Linear(6, 5), Network(lambda _, x: torch.special.i0(x)), nn.Linear(5, 3))
    with pytest.raises(TooLittleCovered):
        private(model, own)


def test_a_client_unit_has_its_budget_too():
    own = private(privacy=Privacy(unit="client", epsilon=5.0, rounds=10))
    assert len(own.fit(rounds=20).records) == 10


def test_a_sum_without_enough_shares_of_noise_is_not_used():
    own = federation(secure=True, noise_by="clients", vanishing=1).defence_server.start_round(network())
    total = {name: torch.zeros(like.shape, dtype=torch.float64) for name, like in own.template.items()}
    own.recover_total(total, 10, 4, 3)
    with pytest.raises(Aborted, match="2 of 4 clients"):
        own.recover_total(total, 10, 4, 2)


BAD_SUMS = [
    (lambda sums: sums | {"0.weight": sums["0.weight"] * math.nan}, "sum 0.weight is not finite"),
    (lambda sums: sums | {"0.weight": sums["0.weight"] + 2.0**53}, "sum 0.weight is not finite or too large"),
    (
        lambda sums: sums | {"0.weight": sums["0.weight"][0]},
        r"sum 0.weight must have shape.*got shape \(5, 6\)",
    ),
    (lambda sums: {"0.weight": sums["0.weight"]}, "sum 0.bias is missing"),
]


@pytest.mark.parametrize(("change", "text"), BAD_SUMS)
def test_sums_that_do_not_fit_are_refused_and_cost_nothing(change, text):
    server = federation().defence_server
    own = server.start_round(network())
    sums = {name: torch.zeros(like.shape, dtype=torch.float64) for name, like in own.template.items()}
    with pytest.raises(UpdateRefused, match=f"client 1: {text}"):
        own.recover([SumUpdate(sums), SumUpdate(change(sums))], [1.0, 1.0])
    assert server.accountant.rounds == 0


def test_dropout_does_not_follow_from_a_seed():
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.Linear(50, 3)).double()
        own = private(model, privacy=Privacy(noise=0.0, rate=1.0))
        torch.manual_seed(0)
        found.append(flat(own.step().gradients))
    assert not torch.equal(*found)


def count_inputs(model, x):
    """Change a buffer in forward."""
    model.seen += x.mean(0).detach()
    return model.head(x)


def test_buffers_that_depend_on_records_are_refused():
    model = Network(count_inputs, head=nn.Linear(6, 3))
    model.register_buffer("seen", torch.zeros(6))
    with pytest.raises(BadArgument, match="buffer seen depends on the clients' data"):
        private(model)


def embed_tokens(model, x):
    """Look up embeddings, which max_norm rescales in place."""
    return model.head(model.embed(x.long() % 7).mean(1))


def average_inputs(model, x):
    """Keep a running mean in a frozen parameter."""
    model.mean.data.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return model.head(x - model.mean)


@pytest.mark.parametrize("unit", ["record", "client"])
@pytest.mark.parametrize(
    ("forward", "name"), [(embed_tokens, "embed.weight"), (average_inputs, "mean")], ids=["max_norm", "average"]
)
def test_parameters_that_forward_changes_are_refused(forward, name, unit):
    """They would reveal which tokens occur in the records, or their mean, without noise."""
    layers = {"embed": nn.Embedding(7, 4, max_norm=0.1), "head": nn.Linear(4 if name != "mean" else 6, 3)}
    model = Network(forward, **layers)
    model.mean = nn.Parameter(torch.zeros(6), requires_grad=False)
    with pytest.raises(BadArgument, match=f"parameter {name} depends on the clients' data"):
        private(model, privacy=Privacy(noise=1.0, unit=unit, rounds=1))


def test_instance_norm_keeps_records_apart_and_is_accepted():
    model = nn.Sequential(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2), nn.Flatten(), nn.Linear(6, 3))
    assert private(model).step().gradients


def pad_to_longest(items):
    return nn.utils.rnn.pad_sequence([x for x, _ in items], batch_first=True), torch.tensor([y for _, y in items])


@pytest.mark.parametrize("length", [4, 9])
def test_a_collate_fn_that_pads_to_the_longest_record_is_refused(length):
    """The padding of a record would depend on the others; records of one length are accepted."""
    items = [(torch.ones(length if k == 3 else 4, 2), k % 2) for k in range(12)]
    loader = DataLoader(items, batch_size=4, collate_fn=pad_to_longest)
    model = Network(lambda model, x: model.head(x.mean(1)), head=nn.Linear(2, 2)).double()
    own = private(model, clients=[loader], privacy=Privacy(noise=1.0, rate=1.0))
    if length == 4:
        assert own.step().figures["epsilon"] > 0
        return
    with pytest.raises(BadArgument, match="pad all records to the same length"):
        own.step()
