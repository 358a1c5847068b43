"""A local update of several steps reveals records to an attacker that repeats the steps."""

import copy
import dataclasses

import pytest
import torch
from tests.attacks.victims import DIGITS, chance
from tests.oracle import built
from torch import nn

from fedveil.attacks.gradients import Search, reconstruct
from fedveil.attacks.leaked_gradients import batch_labels, mean_gradients
from fedveil.attacks.local_steps import KnownTraining, from_local_training, local_update
from fedveil.attacks.similarity import match, psnr
from fedveil.errors import BadArgument
from fedveil.scheme import find_loss

EPS = torch.finfo(torch.float64).eps
INPUTS, LABELS = DIGITS.train.inputs.double(), DIGITS.train.targets


def network():
    return nn.Sequential(nn.Linear(64, 40), nn.Sigmoid(), nn.Linear(40, 10))


def train_locally(model, loss, inputs, targets, training):
    """The client's own loop with torch's optimizer: what it would send, W_0 - W_T."""
    own = copy.deepcopy(model)
    optimizer = torch.optim.SGD(own.parameters(), training.lr)
    for _ in range(training.epochs):
        for first in range(0, len(inputs), training.batch):
            rows = slice(first, first + training.batch)
            wanted = nn.functional.one_hot(targets[rows], 10).to(inputs)
            optimizer.zero_grad()
            loss.values(own(inputs[rows]), wanted).mean().backward()
            optimizer.step()
    after = dict(own.named_parameters())
    return {name: (value - after[name]).detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("loss", ["cross_entropy", "squared_error"])
@pytest.mark.parametrize(("epochs", "batch"), [(1, 5), (3, 2)])
def test_a_simulated_update_is_the_client_s_own(loss, epochs, batch):
    model, training, loss = built(network), KnownTraining(epochs, 0.3, batch), find_loss(loss)
    sent = train_locally(model, loss, INPUTS[:5], LABELS[:5], training)
    found = local_update(model, loss, INPUTS[:5], LABELS[:5], training)
    steps = training.steps(5)
    assert steps == epochs * {5: 1, 2: 3}[batch]
    once = mean_gradients(model, loss, INPUTS[:5], LABELS[:5])
    for name, value in sent.items():
        size = dict(model.named_parameters())[name].abs().max() + value.abs().max()
        assert (found[name] * training.lr * steps - value).abs().max() <= 100 * steps * EPS * size
        if steps > 1:
            assert (found[name] - once[name]).norm() > 1e-3 * once[name].norm()
        else:
            assert (found[name] - once[name]).abs().max() <= 100 * EPS * size / training.lr


def test_the_search_differentiates_through_all_steps():
    model, training, loss = built(network), KnownTraining(2, 0.5, 2), find_loss("cross_entropy")
    leak = from_local_training(model, train_locally(model, loss, INPUTS[:4], LABELS[:4], training), loss, training, 4)
    x = INPUTS[10:14].clone().requires_grad_()

    def weigh(inputs):
        found = leak.gradients_of(inputs, LABELS[:4], graph=True)
        return sum((value * number).sum() for number, value in enumerate(found.values(), 1))

    assert torch.autograd.gradcheck(weigh, (x,))


def test_records_are_rebuilt_from_several_local_steps_but_not_if_these_are_taken_for_one():
    model, training, loss, true = built(network), KnownTraining(2, 1.0, 2), find_loss("cross_entropy"), [0, 1, 2, 3]
    sent = train_locally(model, loss, INPUTS[true], LABELS[true], training)
    leak = from_local_training(model, sent, loss, training, 4)
    figures = {}
    for name, one in (("steps", leak), ("one step", dataclasses.replace(leak, simulate=None))):
        search = Search("idlg", steps=80, restarts=1)
        found = reconstruct(one, (4, 64), search, classes=10, generator=chance(), labels=LABELS[true])
        images, originals = found.inputs.reshape(4, 1, 8, 8), INPUTS[true].reshape(4, 1, 8, 8)
        figures[name] = psnr(images[match(images, originals)], originals)
    floor = psnr(INPUTS.mean(0).expand(4, 64).reshape(4, 1, 8, 8), INPUTS[true].reshape(4, 1, 8, 8))
    assert min(figures["steps"]) > max(floor) + 10
    assert max(figures["one step"]) < max(floor)


def test_labels_are_estimated_from_a_short_local_training():
    model, training, loss = built(network), KnownTraining(1, 0.05, 2), find_loss("cross_entropy")
    sent = train_locally(model, loss, INPUTS[:6], LABELS[:6], training)
    leak = from_local_training(model, sent, loss, training, 6)
    assert batch_labels(leak, 6, INPUTS[100:160]) == sorted(LABELS[:6].tolist())


def test_training_settings_are_checked():
    for given in ((0, 0.1, 1), (1, 0.1, 0), (1, 0.0, 1), (1, float("nan"), 1)):
        with pytest.raises(BadArgument):
            KnownTraining(*given)
