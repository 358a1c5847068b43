"""Training as users expect it: optimizers, schedules, early stopping, callbacks, divergence, mistakes."""

import copy
import logging
import math

import pytest
import torch
from sklearn.metrics import roc_auc_score
from tests.oracle import built
from tests.small import Records
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from fedveil import Federation, Limits, errors
from fedveil.defences import Plain, Private, Veil
from fedveil.errors import BadArgument, Diverged
from fedveil.federation.evaluate import metrics
from fedveil.models import mlp
from fedveil.scheme import find_loss


def data(classes=None, size=24):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64)
    if classes:
        return inputs, torch.randint(0, classes, (size,), generator=generator)
    return inputs, torch.randn(size, 4, generator=generator, dtype=torch.float64)


def net(outputs=4):
    return built(lambda: mlp(6, outputs, hidden=8))


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1)


def frozen(parameters):
    return torch.optim.SGD(parameters, 1e-30)  # nothing improves


def test_an_optimizer_and_a_schedule_train_as_their_factories_do():
    one, other = net(), net()
    optimizer = sgd(one.parameters())
    Federation(one, [data()], "plain", optimizer, schedule=StepLR(optimizer, 1, 0.5)).fit(3)
    Federation(other, [data()], "plain", sgd, schedule=lambda o: StepLR(o, 1, 0.5)).fit(3)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(("every", "rates"), [("round", [0.1, 0.05, 0.025]), ("epoch", [0.1, 0.1, 0.1])])
def test_a_schedule_steps_every_round_or_epoch_and_records_have_the_rate(every, rates):
    how = {"schedule": lambda o: StepLR(o, 1, 0.5), "schedule_every": every, "batch_size": 8}
    federation = Federation(net(), [data()], "plain", sgd, **how)
    assert [record["lr"] for record in federation.fit(1).records] == rates
    assert federation.optimizer.param_groups[0]["lr"] == 0.1 / (8 if every == "round" else 2)


def test_a_clipped_step_is_that_of_the_clipped_gradient():
    model = net()
    start = copy.deepcopy(model)
    federation = Federation(model, [data()], "veil", sgd, clip_norm=0.01)
    federation.step()
    plain = Federation(start, [data()], "plain", sgd)
    gradients = plain.exchange().gradients
    norm = torch.cat([g.flatten() for g in gradients.values()]).norm()
    assert norm > 0.1  # so that it is clipped
    for name, parameter in start.named_parameters():
        expected = parameter - 0.1 * gradients[name] * (0.01 / (norm + 1e-6))  # torch's own guard against 0
        torch.testing.assert_close(dict(model.named_parameters())[name], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_plateau_lowers_the_rate_whichever_way_the_metric_goes(mode):
    schedule = lambda o: ReduceLROnPlateau(o, mode, 0.1, patience=1)  # noqa: E731
    history = Federation(net(), [data(4)], "plain", frozen, schedule=schedule).fit(4, test=data(4))
    assert [record["lr"] for record in history.records] == pytest.approx([1e-30, 1e-30, 1e-30, 1e-31])


def test_a_plateau_of_a_rising_metric_is_refused_for_numbers():
    federation = Federation(net(), [data()], "plain", sgd, schedule=lambda o: ReduceLROnPlateau(o, "max"))
    with pytest.raises(errors.BadArgument, match="accuracy is not defined for this task"):
        federation.fit(1, test=data())


@pytest.mark.parametrize("options", [{"patience": 2}, {}])
def test_waiting_for_progress_needs_test_data(options):
    schedule = None if options else (lambda o: ReduceLROnPlateau(o))
    federation = Federation(net(), [data()], "plain", sgd, schedule=schedule)
    with pytest.raises(errors.BadArgument, match=r"(?s)needs a metric, but there are no held-out data.*test=test"):
        federation.fit(1, **options)


def test_training_stops_early_and_a_resumed_run_stays_stopped(tmp_path):
    first, second = [Federation(net(), [data()], "plain", frozen) for _ in range(2)]
    history = first.fit(50, test=data(), patience=3, folder=tmp_path)
    assert len(history.records) == 4  # the first evaluation, and three that are no better
    second.resume(tmp_path)
    assert len(second.fit(50, test=data(), patience=3).records) == 4
    assert len(second.fit(50, test=data(), patience=6).records) == 7


def test_training_that_improves_is_not_stopped():
    history = Federation(net(), [data()], "plain", sgd).fit(8, test=data(), patience=1)
    values = [value for _, value in history.curve("mse")]
    assert values == sorted(values, reverse=True)
    assert len(values) == 8


def test_every_callback_gets_every_record():
    first, second = [], []
    history = Federation(net(), [data()], "plain", sgd).fit(3, on_round=[first.append, second.append])
    assert first == second == history.records


@pytest.mark.parametrize("ties", [False, True])
def test_auc_is_scikit_learns(ties):
    generator = torch.Generator().manual_seed(1)
    outputs = torch.randn(200, 2, generator=generator, dtype=torch.float64)
    outputs = outputs.round() if ties else outputs
    targets = torch.randint(0, 2, (200,), generator=generator)
    expected = roc_auc_score(targets, outputs[:, 1] - outputs[:, 0])
    assert metrics(outputs, targets)["auc"] == pytest.approx(expected, abs=1e-12)
    single = metrics(outputs[:, :1], targets, find_loss("binary_cross_entropy"))
    assert single["auc"] == pytest.approx(roc_auc_score(targets, outputs[:, 0]), abs=1e-12)
    assert "auc" not in metrics(outputs, torch.zeros(200, dtype=torch.int64))  # one class only
    assert "auc" not in metrics(torch.randn(9, 3), torch.arange(9) % 3)


def test_binary_targets_count_as_right_or_wrong():
    outputs, targets = torch.tensor([[1.0], [-2.0], [3.0], [-1.0]]), torch.tensor([1.0, 0, 0, 0])
    found = metrics(outputs, targets, find_loss("binary_cross_entropy"))
    expected = nn.functional.binary_cross_entropy_with_logits(outputs[:, 0].double(), targets.double())
    assert (found["accuracy"], found["loss"]) == (0.75, pytest.approx(float(expected), rel=1e-12))


DEFENCES = {"plain": Plain, "veil": Veil, "private": lambda: Private(Plain(), 1.0, 0.0)}


def small(dtype=torch.float32):
    return built(lambda: mlp(6, 4, hidden=8)).to(dtype)


def parts(clients=4, size=1.0):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 6, generator=generator), size * torch.randn(8, 4, generator=generator)) for _ in range(clients)
    ]


def changed(place, client, record, value, dtype=torch.float32):
    """Records of four clients, one of them with another number."""
    data = [[tensor.to(dtype) for tensor in own] for own in parts()]
    data[client][place].view(8, -1)[record, -1] = value
    return [tuple(own) for own in data]


PLACES = {"inputs": 0, "targets": 1}
BAD = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("place", PLACES)
def test_records_that_are_not_finite_are_refused_with_their_client_and_number(place, value):
    with pytest.raises(BadArgument, match=f"client 2, record 5: found NaN or infinity in {place}"):
        Federation(small(), changed(PLACES[place], 2, 5, value), "plain")


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_records_of_streams_are_refused_when_they_are_read_and_by_the_number_of_their_client(place, fuse):
    streams = [Records(*own) for own in changed(PLACES[place], 2, 5, math.nan)]
    run = Federation(small(), streams, "plain", batch_size=3, fuse=fuse)
    with pytest.raises(BadArgument, match=f"client 2, record 5: found NaN or infinity in {place}"):
        run.fit(1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_numbers_that_are_infinite_in_the_dtype_of_the_model_are_refused(place, stream):
    data = changed(PLACES[place], 2, 5, 1e300, torch.float64)
    text = rf"(?s)client 2, record 5: found a number that is infinite in torch.float32 in {place}.*Fix: scale"
    with pytest.raises(BadArgument, match=text):
        Federation(small(), [Records(*own) for own in data] if stream else data, "plain").fit(1)
    Federation(small(torch.float64), data, "plain")
    text = text.replace("client 2", "test data")
    with pytest.raises(BadArgument, match=text):
        Federation(small(), parts(), "plain").fit(1, test=Records(*data[2]) if stream else data[2])


def huge(clients, which):
    """Finite records, of one client so large that its gradient is infinite."""
    return [(inputs * 1e30 if client == which else inputs, y) for client, (inputs, y) in enumerate(parts(clients))]


@pytest.mark.parametrize("defence", DEFENCES)
def test_a_client_that_diverges_is_named_by_its_number_not_by_its_place_in_the_round(defence):
    run = Federation(small(), huge(4, 3), DEFENCES[defence](), fuse=False, participation=0.5)
    with pytest.raises(Diverged, match=r"training diverged: client 3: .* although the records are finite"):
        run.fit(rounds=20)


@pytest.mark.parametrize("options", [{"limits": Limits()}, {"secure_aggregation": True}], ids=["limits", "secure"])
def test_so_it_is_under_limits_and_secure_aggregation(options):
    clients, taking_part = (3, 0.3) if "limits" in options else (8, 0.5)
    run = Federation(small(), huge(clients, clients - 1), "plain", participation=taking_part, **options)
    with pytest.raises(Diverged, match=r"training diverged: (all clients|client .): "):
        run.fit(rounds=20)


def test_where_clients_share_a_pass_none_of_them_is_named():
    run = Federation(small(), huge(4, 3), "plain")
    text = r"(?s)^round 0: training diverged: the pass shared by all clients: .*Fix: scale inputs and targets"
    with pytest.raises(Diverged, match=text):  # before the first step, the learning rate is not the cause
        run.fit(rounds=20)


@pytest.mark.parametrize("defence", ["plain", "veil"])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
@pytest.mark.parametrize("rate", [1e38, 1e200])
def test_any_learning_rate_that_is_too_high_is_a_divergence(kind, rate, defence):
    run = Federation(small(), parts(), defence, lambda p: kind(p, lr=rate))
    with pytest.raises(Diverged, match=r"(?s)round \d: training diverged: .*Fix: lower the learning rate"):
        run.fit(rounds=5)


@pytest.mark.parametrize("value", BAD)
def test_a_model_that_is_not_finite_is_refused_before_the_first_round(value):
    model = small()
    with torch.no_grad():
        model[0].weight[1, 2] = value
    with pytest.raises(BadArgument, match=r"the model's 0\.weight contains NaN or infinity"):
        Federation(model, parts(), "plain")
    masked = nn.Sequential(small())
    masked.register_buffer("mask", torch.tensor([0.0, value]))
    with pytest.raises(BadArgument, match=r"(?s)the model's mask contains NaN or infinity.*bool tensor"):
        Federation(masked, parts(), "plain")


X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
CLIENTS, PAIRS = [(X[:20], Y[:20]), (X[20:], Y[20:])], TensorDataset(X, Y)


def federation(clients=CLIENTS, defence="plain", model=None, **options):
    return Federation(model or seeded(), clients, defence, **options)


REFUSED = {
    "a loader for all clients": (
        lambda: federation(DataLoader(PAIRS, 8, shuffle=True)),
        "must be a list of clients, got DataLoader",
    ),
    "a dataset for all clients": (lambda: federation(PAIRS), r"got TensorDataset(?s:.*)\[client\] for one client"),
    "an array for all clients": (lambda: federation(X.numpy()), "clients must be a list of clients, got ndarray"),
    "clients by name": (lambda: federation(dict(enumerate(CLIENTS))), r"got dict(?s:.*)list\(clients.values\(\)\)"),
    "a list of clients to test": (lambda: federation().fit(1, test=CLIENTS), "^test data: .*(?s:.*)torch.cat"),
    "two clients in one": (lambda: federation([CLIENTS]), "^client 0: .*records of several clients"),
    "a class for a defence": (
        lambda: federation(defence=Veil),
        r"(?s)defence must be .* got <class.*fedveil.defences.Veil\(\)",
    ),
    "a dict of limits": (
        lambda: federation(limits={"hostile": 1}),
        r"(?s)limits must be a fedveil.Limits, got dict.*fedveil.Limits\(",
    ),
    "a text for a seed": (lambda: federation(seed="42"), "seed must be an integer, got '42'"),
    "a word for whole_shard": (lambda: federation(whole_shard="no"), "whole_shard must be True or False, got 'no'"),
    "a number for fuse": (lambda: federation(fuse=0), "(?s)fuse must be True or False, got 0.*Fix: use fuse=True"),
    "a rate below 0": (
        lambda: federation(optimizer=lambda p: torch.optim.SGD(p, lr=-1.0)),
        r"(?s)optimizer cannot be created: Invalid learning rate: -1.0.*Adam\(parameters, lr=1e-3\)",
    ),
    "a bare schedule": (lambda: federation(schedule=StepLR), r"(?s)schedule cannot be created: .*step_size.*T_max=20"),
    "a word for rounds": (lambda: federation().fit(1, evaluate_every="epoch"), "evaluate_every must be an integer"),
    "a text for rounds": (lambda: federation().fit(1, checkpoint_every="1"), "checkpoint_every must be"),
    "a name for an optimizer": (lambda: federation(optimizer="adam"), "optimizer must be .*, got 'adam'"),
    "no optimizer": (lambda: federation(optimizer=lambda p: None), "optimizer created a NoneType"),
    "a foreign optimizer": (lambda: federation(optimizer=sgd(seeded().parameters())), "do not belong to this model"),
    "a name for a schedule": (lambda: federation(schedule="cosine"), "schedule must be .*, got 'cosine'"),
    "no schedule": (lambda: federation(schedule=lambda o: 0.1), "schedule created a float"),
    "a foreign schedule": (lambda: federation(schedule=StepLR(sgd(seeded().parameters()), 1)), "for another optimizer"),
    "an unknown interval": (lambda: federation(schedule_every="batch"), "there is no schedule_every 'batch'"),
    "a norm of 0": (lambda: federation(clip_norm=0.0), "clip_norm must be a finite number above 0"),
    "an empty batch": (lambda: federation(batch_size=0), "batch_size must be an integer of at least 1, got 0"),
    "nobody": (lambda: federation(participation=0.0), "participation must be above 0"),
    "an unknown defence": (lambda: federation(defence="moat"), "there is no defence 'moat'"),
    "a callback by name": (lambda: federation().fit(1, on_round="print"), "on_round must be callable, got 'print'"),
    "callbacks by name": (lambda: federation().fit(1, on_round=["print"]), "on_round must be callable, got 'print'"),
    "one-hot integers": (
        lambda: federation([(X, torch.eye(2).long()[Y])]),
        r"(?s)shape \(40,\).*argmax of one-hot",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_is_refused_with_its_fix(name):
    call, text = REFUSED[name]
    with pytest.raises(errors.BadArgument, match=text) as caught:
        call()
    assert caught.value.fix or "must be" in str(caught.value)


def test_a_second_fit_that_trains_nothing_says_so(caplog):
    run = federation()
    run.fit(2)
    with caplog.at_level(logging.WARNING):
        run.fit(2)
    assert run.round == 2 * run.rounds_per_epoch
    assert "fit trains nothing" in caplog.text
    assert "use fit(epochs=3) to continue training" in caplog.text
    caplog.clear()
    run.fit(3)
    assert run.round == 3 * run.rounds_per_epoch
    assert not caplog.text


@pytest.mark.parametrize(
    ("layer", "outputs", "loss", "text"),
    [
        (nn.Softmax(dim=1), 2, "cross_entropy", "cross_entropy expects logits.*softmax"),
        (nn.Sigmoid(), 1, "binary_cross_entropy", "binary_cross_entropy expects logits.*sigmoid"),
    ],
)
def test_probabilities_for_a_loss_that_takes_logits_are_warned_of(layer, outputs, loss, text):
    with pytest.warns(UserWarning, match=text):
        federation(model=nn.Sequential(mlp(4, outputs, hidden=8), layer), loss=loss)


def seeded():
    torch.manual_seed(0)
    return mlp(4, 2, hidden=8)


def test_one_hot_test_targets_give_an_accuracy_where_the_loss_compares_classes():
    rows = nn.functional.one_hot(Y, 2).float()
    one, other = (federation(model=seeded()).fit(1, test=(X, held)).last for held in (Y, rows))
    assert "mse" not in other
    assert other["accuracy"] == one["accuracy"]
