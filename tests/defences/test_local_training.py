"""Local training: Flower's FedAvg on the same data, every engine and setting, and what is refused."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.engines import Loopback, LoopbackServer, member
from tests.federation.secured import server_of
from tests.forms import records
from tests.oracle import built, plain, worst
from torch import nn

from fedveil import Federation, Limits, Privacy
from fedveil.attacks.poisoning import HostileEngine, HostileStrategy, scale
from fedveil.defences import PPDL, Plain, Private, Veil
from fedveil.defences.interface import MAX_LOCAL_EPOCHS, LocalTraining
from fedveil.errors import BadArgument, Diverged
from fedveil.federation.client import ClientSession
from fedveil.federation.protocol import Request, read, write
from fedveil.models import mlp
from fedveil.records.shards import generator

EPOCHS, RATE, BATCH, MOMENTUM = 3, 0.05, 8, 0.5
SETTINGS = {"local_epochs": EPOCHS, "local_lr": RATE, "local_batch": BATCH, "local_momentum": MOMENTUM}


def net():
    return built(lambda: mlp(6, 4, hidden=10))


def normed():
    return built(lambda: nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 4)))


def fedavg(**changes):
    return Plain(**SETTINGS | changes)


def average(parameters):
    """The server's optimizer, with which the new model is the mean of the clients' models."""
    return torch.optim.SGD(parameters, 1.0)


def federation(defence=None, build=net, optimizer=average, data=None, **options):
    return Federation(build(), data or records(), defence or fedavg(), optimizer, **options)


def floats(model):
    return {name: own.clone() for name, own in model.state_dict().items() if own.is_floating_point()}


def visits(client, number, size, epochs=EPOCHS, batch=BATCH):
    """The batches of a client in a round; a last batch of one record joins the one before it."""
    for epoch in range(number * epochs, (number + 1) * epochs):
        order = torch.randperm(size, generator=generator("order", 0, client, epoch)).tolist()
        chunks = [order[start : start + batch] for start in range(0, size, batch)]
        if len(chunks) > 1 and len(chunks[-1]) == 1:
            chunks[-2:] = [chunks[-2] + chunks[-1]]
        yield from chunks


def locally(model, data, client, number, epochs=EPOCHS, batch=BATCH, momentum=MOMENTUM):
    """A client of McMahan et al., written out: the model after SGD on the client's records."""
    model, speed = copy.deepcopy(model), {}
    for rows in visits(client, number, len(data[0]), epochs, batch):
        gradients, buffers = plain(model, data[0][rows], data[1][rows])
        with torch.no_grad():
            for name, own in model.named_parameters():
                speed[name] = momentum * speed.get(name, 0.0) + gradients[name]
                own -= RATE * speed[name]
            for name, own in model.named_buffers():
                own.copy_(buffers[name])
    return model


def mean_of(models, weights):
    """The weighted mean of the models' floating-point values."""
    total, found = sum(weights), [floats(model) for model in models]
    return {name: sum(w / total * own[name] for w, own in zip(weights, found, strict=True)) for name in found[0]}


@given(st.integers(1, 40), st.floats(1e-3, 10.0), st.floats(0.0, 0.99))
def test_the_reach_is_the_way_of_sgd_along_a_constant_gradient(steps, lr, momentum):
    place = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([place], lr, momentum=momentum)
    for _ in range(steps):
        place.grad = -torch.ones_like(place)
        optimizer.step()
    assert math.isclose(LocalTraining(1, lr, None, momentum).reach(steps), place.item(), rel_tol=1e-9)


@pytest.mark.parametrize("build", [net, normed])
def test_five_rounds_are_flowers_fedavg_over_clients_written_out_also_with_secure_aggregation(build):
    pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedveil[flower]'")
    from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
    from flwr.server.strategy import FedAvg

    strategy, model, data = FedAvg(fit_metrics_aggregation_fn=lambda found: {}), build(), records()
    for number in range(5):
        results = []
        for client, own in enumerate(data):
            sent = ndarrays_to_parameters([v.numpy() for v in floats(locally(model, own, client, number)).values()])
            results.append((None, FitRes(Status(Code.OK, ""), sent, len(own[0]), {})))
        mean, _ = strategy.aggregate_fit(number + 1, results, [])
        values = map(torch.from_numpy, parameters_to_ndarrays(mean))
        model.load_state_dict(dict(zip(floats(model), values, strict=True)), strict=False)
    for secure in (False, True):
        run = federation(build=build, secure_aggregation=secure)
        run.fit(rounds=5)
        promise = 5 * max(record.figures["fixed_point_error"] for record in run.history.records) if secure else 0
        assert worst(floats(run.model), floats(model)) < 1e-9 + promise < 1e-6


@pytest.mark.parametrize("change", [{"local_epochs": 2}, {"local_lr": 0.06}, {"local_batch": 7}, {"local_momentum": 0}])
def test_every_setting_matters(change):
    one, other = federation(), federation(fedavg(**change))
    one.step(), other.step()
    assert worst(floats(other.model), floats(one.model)) > 1e-6


@pytest.mark.parametrize("epochs", [1, 3])
def test_one_client_trains_as_without_a_federation(epochs):
    data = records((21,))
    run = federation(fedavg(local_epochs=epochs, local_momentum=None), data=data, batch_size=5)
    run.fit(rounds=2)
    steps = 2 * epochs * len(list(visits(0, 0, 21, 1)))
    same = federation("plain", optimizer=lambda p: torch.optim.SGD(p, RATE), data=data, batch_size=BATCH)
    same.fit(rounds=steps)
    assert worst(floats(run.model), floats(same.model)) < 1e-9


def test_one_local_step_of_one_client_is_a_step_of_plain_training_up_to_one_subtraction():
    data, start = records((20,)), floats(net())
    run = federation(fedavg(local_epochs=1, local_batch=20), data=data)
    same = federation("plain", optimizer=lambda p: torch.optim.SGD(p, RATE), data=data, batch_size=20)
    run.step(), same.step()
    eps = torch.finfo(torch.float64).eps
    for name, value in floats(same.model).items():
        bound = eps * (start[name].abs() + value.abs())  # w - (w - v) is rounded twice
        assert ((floats(run.model)[name] - value).abs() <= bound).all(), name


def test_another_optimizer_takes_the_mean_difference_as_its_gradient():
    def adam(parameters):
        return torch.optim.Adam(parameters, 0.01)

    run, model, data = federation(optimizer=adam), net(), records()
    optimizer = adam(model.parameters())
    for number in range(3):
        after = mean_of([locally(model, own, k, number) for k, own in enumerate(data)], [20, 33, 7])
        for name, parameter in model.named_parameters():
            parameter.grad = parameter.detach() - after[name]
        optimizer.step()
    run.fit(rounds=3)
    assert worst(floats(run.model), floats(model)) < 1e-9


def test_the_model_that_is_broadcast_does_not_change_on_a_client():
    run, sent = federation(build=normed), []
    before = floats(run.model)
    run.step(lambda broadcast, updates: sent.append(floats(broadcast)))
    assert all(torch.equal(sent[0][name], own) for name, own in before.items())


@pytest.mark.parametrize("build", [net, normed])
def test_a_secure_sum_is_the_mean_up_to_the_bound_of_its_fixed_point(build):
    summed, clear = federation(build=build, secure_aggregation=True), federation(build=build)
    found, true = summed.step(), clear.step()
    size = math.hypot(*[float(own.norm()) for own in true.gradients.values()])
    apart = math.hypot(*[float((found.gradients[name] - own).norm()) for name, own in true.gradients.items()])
    rounding = 1e-13 * size  # of the mean in float64, over three clients
    assert 0 < found.figures["fixed_point_error"] < 1e-9
    assert apart <= found.figures["fixed_point_error"] * size + rounding


@pytest.mark.parametrize("lr", [1e-6, 0.05, 0.5])
def test_no_secure_sum_of_differences_wraps_around_from_the_first_round(lr):
    run = federation(fedavg(local_lr=lr), secure_aggregation=True)
    run.fit(rounds=6)
    assert not any("faults" in record.notes or "skipped" in record.notes for record in run.history.records)
    assert all(record.figures["fixed_point_error"] < 1e-9 for record in run.history.records)


def test_masked_rounds_over_messages_train_the_model_of_one_process():
    from tests.federation.secured import net as build
    from tests.federation.secured import parts

    server = server_of(defence=fedavg())
    server.fit(rounds=3)
    run = federation(build=build, data=parts(), optimizer=lambda p: torch.optim.Adam(p, 1e-2), loss="squared_error")
    run.fit(rounds=3)
    assert worst(floats(server.model), floats(run.model)) < 1e-6
    assert not any("faults" in record.notes for record in server.history.records)


def remote(defence=None, own=None, **options):
    """A server whose clients answer bytes; `own` are settings that clients require."""
    data = records()
    answers = {f"site-{k}": ClientSession(net(), part, client=k, defence=own).reply for k, part in enumerate(data)}
    options = {"loss": "squared_error", "timeout": 1.0, "pause": 0.0, "attempts": 1, "limits": None, **options}
    return LoopbackServer(Loopback(answers), net(), data[0][0][:2], defence or fedavg(), average, **options)


@pytest.mark.parametrize("options", [{}, {"whole_shard": False, "batch_size": 3}])
def test_rounds_over_messages_are_those_of_one_process(options):
    server, run = remote(**options), federation()
    server.fit(rounds=3)
    run.fit(rounds=3)
    assert worst(floats(server.model), floats(run.model)) < 1e-9


def test_without_a_local_batch_size_a_step_has_the_batch_size_of_the_federation():
    server, run = remote(fedavg(local_batch=None), batch_size=BATCH), federation()
    server.fit(rounds=1)
    run.fit(rounds=1)
    assert worst(floats(server.model), floats(run.model)) < 1e-9


def test_a_client_refuses_other_settings_than_its_own():
    for asked, own in ((fedavg(), Plain()), (Plain(), fedavg()), (fedavg(), fedavg(local_epochs=2))):
        server = remote(asked, own)
        with pytest.raises(Exception, match="the server's settings for local training differ"):
            server.step()
    remote(fedavg(), fedavg()).step()


def test_a_server_cannot_occupy_a_client_forever_or_make_a_subclass_train():
    kept = []
    data = records((8,))
    answer = member(net, data[0], 0)
    engine = Loopback({"site": lambda common, own: kept.append(common) or answer(common, own)})
    LoopbackServer(engine, net(), data[0][0][:2], fedavg(), average, loss="squared_error").step()
    ask = read(kept[0], Request, 1000)
    for change in (
        {"local_epochs": MAX_LOCAL_EPOCHS + 1},
        {"local_lr": math.inf},
        {"local_momentum": 1.0},
        {"rounding": 1},
    ):
        spoilt = Request(**{**vars(ask), "settings": {**ask.settings, **change}})
        with pytest.raises(BadArgument, match=next(iter(change))):
            member(net, data[0], 0)(write(spoilt), b"")


def times(factor):
    return HostileStrategy("its own update, scaled", lambda view: scale(factor, view.own_update))


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "centred-clipping", "krum"])
def test_a_robust_rule_withstands_a_hostile_difference(rule):
    data = records((20, 20, 20, 20, 20))
    honest = federation(data=data, limits=Limits(rule))
    run = federation(data=data, limits=Limits(rule))
    run.use_engine(HostileEngine(run.clients, times(-1000.0), 1, run.limits))
    start = floats(run.model)
    run.step(), honest.step()
    moved, usual = ({n: own - start[n] for n, own in floats(each.model).items()} for each in (run, honest))
    size = [math.hypot(*[float(own.norm()) for own in each.values()]) for each in (moved, usual)]
    assert size[0] < 2 * size[1]


def test_a_difference_beyond_the_norm_of_the_others_is_refused_and_the_round_goes_on():
    data = records((20, 20, 20, 20))
    run = federation(data=data, limits=Limits())
    run.use_engine(HostileEngine(run.clients, times(1000.0), 1, run.limits))
    start = run.model
    expected = mean_of([locally(start, data[k], k, 0) for k in (0, 1, 2)], [1, 1, 1])
    run.fit(rounds=1)
    assert "above the bound" in str(run.history.records[0].notes["faults"])
    assert worst(floats(run.model), expected) < 1e-9


def test_local_training_that_diverges_is_reported_with_the_client():
    with pytest.raises(Diverged, match="client"):
        federation(fedavg(local_lr=1e4, local_epochs=50)).fit(rounds=5)


def test_a_resumed_run_ends_as_one_without_interruption(tmp_path):
    def adam(parameters):
        return torch.optim.Adam(parameters, 0.01)

    whole = federation(build=normed, optimizer=adam)
    whole.fit(rounds=5)
    federation(build=normed, optimizer=adam).fit(rounds=2, folder=tmp_path)
    resumed = federation(build=normed, optimizer=adam)
    resumed.fit(rounds=5, folder=tmp_path, resume=True)
    assert resumed.changed == []
    assert all(torch.equal(own, floats(resumed.model)[name]) for name, own in floats(whole.model).items())
    other = federation(fedavg(local_lr=0.01), build=normed, optimizer=adam)
    other.fit(rounds=5, folder=tmp_path, resume=True)
    assert other.changed == ["local training"]


def test_privacy_for_clients_clips_every_difference():
    run, data, start = federation(Private(fedavg(), 0.05, 0.0)), records(), net()
    total = {name: torch.zeros_like(own) for name, own in start.named_parameters()}
    for client, own in enumerate(data):
        after = dict(locally(start, own, client, 0).named_parameters())
        change = {name: p.detach() - after[name].detach() for name, p in start.named_parameters()}
        size = math.hypot(*[float(one.norm()) for one in change.values()])
        assert size > 0.05  # or nothing is clipped
        total = {name: own + change[name] * 0.05 / size / 3 for name, own in total.items()}
    found = run.step()
    assert found.figures["dp_clipped"] == 1.0
    assert worst(found.gradients, total) < 1e-9
    summed = federation(Private(fedavg(), 0.05, 0.0), secure_aggregation=True).step()
    assert worst(summed.gradients, total) < 1e-6


def test_privacy_for_records_is_refused_with_the_way_out():
    with pytest.raises(BadArgument, match=r'(?s)depend on all records.*unit="client"'):
        federation(privacy=Privacy(epsilon=3.0, rounds=10, rate=0.5))


def test_ppdl_selects_the_largest_entries_of_the_difference():
    everything, start = federation(PPDL(1.0, **SETTINGS)), records((20,))
    run = federation(fedavg())
    everything.step(), run.step()
    assert worst(floats(everything.model), floats(run.model)) < 1e-9
    found = federation(PPDL(0.1, **SETTINGS), data=start).step().gradients
    model = net()
    after = dict(locally(model, start[0], 0, 0).named_parameters())
    true = torch.cat([(p - after[name]).detach().reshape(-1) for name, p in model.named_parameters()])
    flat = torch.cat([own.reshape(-1) for own in found.values()])
    chosen = true.abs().topk(round(0.1 * len(true))).indices
    assert set(flat.nonzero()[:, 0].tolist()) == set(chosen.tolist())
    torch.testing.assert_close(flat[chosen], true[chosen], rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"local_epochs": 0}, "local_epochs must be an integer of at least 1"),
        ({"local_epochs": MAX_LOCAL_EPOCHS + 1}, "local_epochs must be at most"),
        ({"local_epochs": 1, "local_lr": 0.0}, "local_lr must be a number from"),
        ({"local_epochs": 1, "local_batch": 0}, "local_batch must be an integer"),
        ({"local_epochs": 1, "local_momentum": 1.0}, "local_momentum must be a number from"),
        ({"local_lr": 0.1}, "local_lr has no effect without local epochs"),
    ],
)
@pytest.mark.parametrize("kind", [Plain, PPDL])
def test_settings_that_cannot_be_meant_are_refused(kind, settings, text):
    with pytest.raises(BadArgument, match=text):
        kind(**settings)


def test_the_traits_say_what_an_update_contains():
    assert (Plain().update_kind, Veil().update_kind, fedavg().update_kind) == ("gradient", "gradient", "difference")
    private = Private(fedavg(), 1.0, 0.0)
    assert private.local_training == fedavg().local_training == LocalTraining(EPOCHS, RATE, BATCH, MOMENTUM)
    assert (private.update_kind, private.fusable, fedavg().fusable) == ("difference", False, False)
    assert federation().rounds_per_epoch == 1


def test_a_defence_that_computes_gradients_only_says_so():
    class Wishful(Veil):
        local_training = LocalTraining(1)

    with pytest.raises(BadArgument, match="computes gradients, but does not train locally"):
        federation(Wishful()).step()


def test_batches_of_one_record_are_refused_for_a_batch_norm():
    with pytest.raises(BadArgument, match="with batch_size=1, batches have a single record"):
        federation(fedavg(local_batch=1), build=normed)
