"""Federations with losses other than squared error."""

import pytest
import torch
from tests.configs import config_of
from tests.federation.test_engine import net, normed, parts, sgd, trained, veil
from tests.oracle import built, worst
from tests.sessions import Session

from fedveil import BatchLoss, CrossEntropy, errors
from fedveil.defences import Plain, Samples
from fedveil.federation import Federation
from fedveil.federation.evaluate import metrics
from fedveil.models import mlp
from fedveil.runs.folder import train
from fedveil.scheme.losses import BinaryCrossEntropy

TENTH = 1e-6  # ten rounds whose gradients are off by at most 1e-6 each, steps of 0.1


@pytest.mark.parametrize("build", [net, normed], ids=["MLP", "BatchNorm"])
@pytest.mark.parametrize("loss", ["cross_entropy", CrossEntropy(label_smoothing=0.1, weight=(1, 2, 1, 3))])
def test_a_veiled_run_with_cross_entropy_is_the_plain_one(build, loss):
    data = parts(classes=4)
    runs = [trained(build, defence, data, loss=loss) for defence in (Plain(), veil())]
    assert worst(runs[1], runs[0]) < TENTH


@pytest.mark.parametrize("settings", [{}, {"decoys": 1, "groups": 4}], ids=str)
def test_fused_clients_are_clients_apart(settings):
    data = parts(classes=4)
    runs = [
        trained(net, veil(seed, **settings), data, loss="cross_entropy", fuse=fuse)
        for seed, fuse in ((0, True), (1, False))
    ]
    assert worst(runs[1], runs[0]) < TENTH


def ranked(outputs, targets):
    """A number for the batch: each pair of samples in the order of their targets, by a margin."""
    ahead = (targets.unsqueeze(0) > targets.unsqueeze(1)).to(outputs.dtype)
    behind = (1 - outputs[:, 0].unsqueeze(0) + outputs[:, 0].unsqueeze(1)).relu()
    return (ahead * behind).sum() / ahead.sum().clamp(min=1)


@pytest.mark.parametrize("whole_shard", [False, True])
def test_a_loss_of_the_whole_batch_is_plain_federated_training(whole_shard):
    data = parts(classes=4)
    runs = [
        trained(net, defence, data, loss=BatchLoss(ranked), whole_shard=whole_shard) for defence in (Plain(), veil())
    ]
    assert worst(runs[1], runs[0]) < TENTH


def test_a_loss_of_the_whole_batch_never_fuses_clients():
    data = parts(classes=4)
    run = Federation(net(), data, veil(), sgd, batch_size=8, loss=BatchLoss(ranked))
    assert not run.clients.fused
    assert Federation(net(), data, veil(), sgd, batch_size=8, loss="cross_entropy").clients.fused
    inputs, targets = data[0][0][:4], data[0][1][:4]
    weights = torch.tensor([0.3, 0.3, 0.2, 0.2]).double()
    for defence in (Plain(), veil()):
        session = Session(defence, run.model, inputs, run.loss)
        with pytest.raises(errors.BadArgument, match="ranked compares samples of a batch with one another"):
            session.step(session.broadcast(), Samples(inputs, targets, weights))


def test_whole_shards_go_through_one_veil():
    data = parts(classes=4)
    runs = [trained(net, d, data, loss="cross_entropy", whole_shard=True) for d in (Plain(), veil())]
    assert worst(runs[1], runs[0]) < TENTH


def test_a_users_function_gets_targets_as_they_are():
    def loss(outputs, targets):
        assert targets.dtype == torch.int64
        return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")

    data = parts(classes=4)
    own = trained(net, veil(), data, loss=loss)
    assert worst(own, trained(net, Plain(), data, loss="cross_entropy")) < TENTH


def test_yes_or_no_targets_count_as_right_or_wrong():
    outputs, targets = torch.tensor([[1.0], [-2.0], [3.0], [-1.0]]), torch.tensor([1.0, 0, 0, 0])
    found = metrics(outputs, targets, BinaryCrossEntropy())
    assert found["accuracy"] == 0.75
    expected = torch.nn.functional.binary_cross_entropy_with_logits(outputs[:, 0], targets)
    assert abs(found["loss"] - float(expected)) < 1e-6


def test_binary_cross_entropy_takes_classes_and_numbers():
    inputs = parts()[0][0]
    yes = (inputs[:, 0] > 0).long()
    for targets in (yes, yes.double(), yes.double().unsqueeze(1)):
        model = built(lambda: mlp(6, 1, hidden=10))
        federation = Federation(model, [(inputs, targets)], veil(), sgd, loss="binary_cross_entropy")
        assert federation.fit(20, test=(inputs, targets)).last["accuracy"] > 0.5


def test_smoothing_is_cross_entropys(tmp_path):
    with pytest.raises(errors.BadArgument, match="is a regression"):
        train(config_of(data="diabetes", epochs=1, label_smoothing=0.1), tmp_path)
