"""NaN and infinity: refused in records, told apart from a learning rate that is too high, and never written to disk."""

import logging
import math

import pytest
import torch
from safetensors.torch import load_file
from tests.oracle import built
from tests.small import Records
from torch import nn

from fedveil import Limits
from fedveil.defences import Plain, Private, Veil
from fedveil.errors import BadArgument, Diverged
from fedveil.federation import Federation, checkpoint
from fedveil.models import mlp

LAST, PREVIOUS = checkpoint.LAST, checkpoint.PREVIOUS
DEFENCES = {"plain": Plain, "veil": Veil, "private": lambda: Private(Plain(), 1.0, 0.0)}


def net(dtype=torch.float32):
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
def test_targets_that_are_not_finite_are_refused_with_their_client_and_record(value):
    with pytest.raises(BadArgument, match="client 2, record 5: targets hold NaN or infinity"):
        Federation(net(), changed(1, 2, 5, value), "plain")
    one_column = [(inputs, targets[:, 3]) for inputs, targets in changed(1, 2, 5, value)]
    with pytest.raises(BadArgument, match="client 2, record 5: targets hold NaN or infinity"):
        Federation(net(), one_column, "plain", loss=lambda y, t: (y[:, 0] - t) ** 2)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_records_of_streams_are_refused_when_they_are_read_and_by_the_number_of_their_client(place, fuse):
    streams = [Records(*own) for own in changed(PLACES[place], 2, 5, math.nan)]
    run = Federation(net(), streams, "plain", batch_size=3, fuse=fuse)
    with pytest.raises(BadArgument, match=f"client 2, record 5: {place} hold NaN or infinity"):
        run.fit(1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_numbers_that_are_infinite_in_the_dtype_of_the_model_are_refused(place, stream):
    data = changed(PLACES[place], 2, 5, 1e300, torch.float64)
    text = rf"(?s)client 2, record 5: {place} hold a number that is infinite in torch.float32.*Fix: scale"
    with pytest.raises(BadArgument, match=text):
        Federation(net(), [Records(*own) for own in data] if stream else data, "plain").fit(1)
    Federation(net(torch.float64), data, "plain")
    text = text.replace("client 2", "test data")
    with pytest.raises(BadArgument, match=text):
        Federation(net(), parts(), "plain").fit(1, test=Records(*data[2]) if stream else data[2])


@pytest.mark.parametrize("place", PLACES)
def test_test_data_that_are_not_finite_are_refused_as_test_data(place):
    data, text = changed(PLACES[place], 2, 5, math.inf)[2], f"test data, record 5: {place} hold NaN or infinity"
    run = Federation(net(), parts(), "plain")
    with pytest.raises(BadArgument, match=text):
        run.fit(1, test=data)
    assert run.round == 0
    with pytest.raises(BadArgument, match=text):
        run.fit(1, test=Records(*data))


def huge(clients, which):
    """Finite records, of one client so large that its gradient is infinite."""
    return [(inputs * 1e30 if client == which else inputs, y) for client, (inputs, y) in enumerate(parts(clients))]


@pytest.mark.parametrize("defence", DEFENCES)
def test_a_client_that_diverges_is_named_by_its_number_not_by_its_place_in_the_round(defence):
    run = Federation(net(), huge(4, 3), DEFENCES[defence](), fuse=False, participation=0.5)
    with pytest.raises(Diverged, match=r"training diverged: client 3: .* although the records are finite"):
        run.fit(rounds=20)


@pytest.mark.parametrize("options", [{"limits": Limits()}, {"secure_aggregation": True}], ids=["limits", "secure"])
def test_so_it_is_under_limits_and_secure_aggregation(options):
    clients, taking_part = (3, 0.3) if "limits" in options else (8, 0.5)
    run = Federation(net(), huge(clients, clients - 1), "plain", participation=taking_part, **options)
    with pytest.raises(Diverged, match=r"training diverged: (all clients|client .): "):
        run.fit(rounds=20)


def test_where_clients_share_a_pass_none_of_them_is_named():
    run = Federation(net(), huge(4, 3), "plain")
    with pytest.raises(Diverged, match="training diverged: the pass that all clients share: ") as caught:
        run.fit(rounds=20)
    assert "client 0" not in str(caught.value)


def test_before_the_first_step_it_is_not_the_learning_rate():
    with pytest.raises(Diverged, match=r"(?s)round 0: .*Fix: scale inputs and targets, or change the loss"):
        Federation(net(), huge(4, 3), "plain").fit(rounds=20)


@pytest.mark.parametrize("defence", ["plain", "veil"])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
@pytest.mark.parametrize("rate", [1e38, 1e200])
def test_any_learning_rate_that_is_too_high_is_a_divergence(kind, rate, defence):
    run = Federation(net(), parts(), defence, lambda p: kind(p, lr=rate))
    with pytest.raises(Diverged, match=r"(?s)round \d: training diverged: .*Fix: lower the learning rate"):
        run.fit(rounds=5)


def leaping():
    """Three steps of a usual size, and one that makes the model infinite."""
    return Federation(
        net(),
        parts(size=1e3),
        "plain",
        lambda p: torch.optim.SGD(p, 1e-6),
        schedule=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda r: 1.0 if r < 3 else 1e44),
        schedule_every="round",
    )


def finite(tensors):
    return all(bool(tensor.isfinite().all()) for tensor in tensors.values())


@pytest.mark.parametrize("rounds", [4, 9])
def test_no_model_that_is_not_finite_is_written(tmp_path, rounds):
    run = leaping()
    with pytest.raises(Diverged, match=r"round 3: training diverged: after the step \S+ holds NaN or infinity; "):
        run.fit(rounds=rounds, folder=tmp_path, checkpoint_every=1)
    assert [checkpoint.load(tmp_path / name)["round"] for name in (LAST, PREVIOUS)] == [3, 2]
    assert all(finite(checkpoint.load(tmp_path / name)["model"]) for name in (LAST, PREVIOUS))
    assert not list(tmp_path.glob("*.safetensors"))
    again = leaping()
    again.resume(tmp_path)
    assert again.round == 3
    assert finite(again.model.state_dict())


@pytest.mark.parametrize("spoil", ["parameter", "buffer"])
def test_a_model_that_was_made_infinite_elsewhere_is_not_saved_and_the_old_checkpoint_stays(tmp_path, spoil):
    model = built(lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))
    run = Federation(model, parts(), "plain")
    run.fit(rounds=2, folder=tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with torch.no_grad():
        (run.model[0].weight if spoil == "parameter" else run.model[1].running_var)[0] = math.inf
    for attempt in (lambda: run.save(tmp_path), lambda: run.fit(rounds=2, folder=tmp_path)):
        with pytest.raises(Diverged, match="holds NaN or infinity, and such a model is not saved"):
            attempt()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def with_infinity(path):
    """A checkpoint as earlier versions wrote it for a model that had diverged."""
    belongs, state = checkpoint.read(path)
    next(iter(state["model"].values())).view(-1)[0] = math.inf
    checkpoint.save(path, {name: value for name, value in state.items() if name != "format"}, belongs)


def steady():
    return Federation(net(), parts(), "plain", lambda p: torch.optim.SGD(p, 1e-2))


def test_a_checkpoint_of_a_model_that_diverged_is_skipped_for_the_one_before(tmp_path, caplog):
    steady().fit(rounds=3, folder=tmp_path, checkpoint_every=1)
    with_infinity(tmp_path / LAST)
    run = steady()
    with caplog.at_level(logging.WARNING, logger="fedveil"):
        run.resume(tmp_path)
    assert run.round == 2
    assert finite(run.model.state_dict())
    assert "the checkpoint is of a run that diverged: 0.weight holds NaN or infinity" in caplog.text
    assert "checkpoint.previous.pt, round 2" in run.history.records[-1]["went_back"]
    run.fit(rounds=4, folder=tmp_path, checkpoint_every=1, on_round=lambda record: both_finite(tmp_path))
    both_finite(tmp_path)
    assert finite(load_file(tmp_path / checkpoint.MODEL))


def both_finite(folder):
    assert all(finite(checkpoint.load(path)["model"]) for path in checkpoint.found_in(folder))


def test_a_run_all_of_whose_checkpoints_diverged_is_not_resumed(tmp_path):
    steady().fit(rounds=3, folder=tmp_path, checkpoint_every=1)
    with_infinity(tmp_path / LAST)
    with_infinity(tmp_path / PREVIOUS)
    with pytest.raises(BadArgument, match=r"(?s)of a run that diverged.*Fix: start the run again with a lower"):
        steady().resume(tmp_path)


@pytest.mark.parametrize("value", BAD)
def test_a_model_that_is_not_finite_is_refused_before_the_first_round(value):
    model = net()
    with torch.no_grad():
        model[0].weight[1, 2] = value
    with pytest.raises(BadArgument, match=r"the model's 0\.weight holds NaN or infinity"):
        Federation(model, parts(), "plain")
    masked = nn.Sequential(net())
    masked.register_buffer("mask", torch.tensor([0.0, value]))
    with pytest.raises(BadArgument, match=r"(?s)the model's mask holds NaN or infinity.*bool tensor"):
        Federation(masked, parts(), "plain")
