"""Class indices at each pixel or token of a record, with classes on axis 1 or on the last one."""

import numpy as np
import pytest
import torch
from tests.forms import pooled_descent
from tests.oracle import built, worst
from torch import nn
from torch.nn import functional as F

from fedveil import CrossEntropy, Entropy, Federation
from fedveil.defences import PPDL, Veil
from fedveil.errors import BadArgument
from fedveil.federation.evaluate import metrics
from fedveil.scheme import SquaredError, find_loss
from fedveil.scheme.outputs import class_axis, head_axis, loss_values, output_gradient

RATE = 0.05


def sgd(parameters):
    return torch.optim.SGD(parameters, RATE)


def draw(*shape, classes=None):
    generator = torch.Generator().manual_seed(sum(shape))
    if classes:
        return torch.randint(0, classes, shape, generator=generator)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def pixelwise(classes):
    return lambda: nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, classes, 1))


def tokenwise(classes):
    return lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, classes))


def summed(outputs, targets, **options):
    """Torch's own cross-entropy, whose classes are on axis 1."""
    return F.cross_entropy(outputs, targets, reduction="sum", **options)


CASES = {  # model, shape of a record, of its targets, classes, where torch's cross-entropy finds them
    "pixels": (pixelwise(3), (2, 4, 5), (4, 5), 3, 1),
    "pixels, as many as classes": (pixelwise(4), (2, 4, 4), (4, 4), 4, 1),
    "tokens": (tokenwise(3), (4, 5), (4,), 3, -1),
    "tokens, as many as classes": (tokenwise(4), (4, 5), (4,), 4, -1),
}


def clients_of(case, sizes=(5, 3)):
    _, shape, target, classes, _ = CASES[case]
    return [(draw(size, *shape), draw(size, *target, classes=classes)) for size in sizes]


def trained(case, clients, defence="plain", rounds=4, **options):
    federation = Federation(built(CASES[case][0]), clients, defence, sgd, **options)
    federation.fit(rounds=rounds)
    return {name: tensor.clone() for name, tensor in federation.model.state_dict().items()}


@pytest.mark.parametrize("options", [{}, {"fuse": False}, {"whole_shard": True, "batch_size": 2}], ids=str)
@pytest.mark.parametrize("loss", ["cross_entropy", "squared_error"])
@pytest.mark.parametrize("case", CASES)
def test_training_at_each_position_is_that_on_one_machine_with_torchs_loss(case, loss, options):
    build, _, _, classes, axis = CASES[case]
    clients = clients_of(case)
    inputs, targets = (torch.cat(part) for part in zip(*clients, strict=True))

    def true_loss(outputs, targets):
        outputs = outputs.movedim(axis, -1)
        if loss == "cross_entropy":
            return summed(outputs.flatten(0, -2), targets.flatten())
        return 0.5 * (outputs - F.one_hot(targets, classes)).square().sum()

    truth = pooled_descent(built(build), (inputs,), targets, true_loss, 4, RATE)
    assert worst(trained(case, clients, loss=loss, **options), truth) < 1e-12
    assert worst(trained(case, clients, PPDL(1.0), loss=loss, **options), truth) < 1e-12
    veil = Veil(additive=10.0, entropy=Entropy.for_tests(0))
    assert worst(trained(case, clients, veil, loss=loss, **options), truth) < 1e-9


@pytest.mark.parametrize("case", ["pixels", "pixels, as many as classes"])
def test_smoothing_weights_and_probabilities_go_by_the_class_axis(case):
    build, shape, target, classes, _ = CASES[case]
    weight = tuple(range(1, classes + 1))
    outputs, axis = draw(6, classes, *shape[1:]).requires_grad_(), head_axis(built(build))
    indices = draw(6, *target, classes=classes)
    soft = draw(6, classes, *shape[1:]).softmax(1)
    loss = CrossEntropy(weight, label_smoothing=0.1)
    for targets in (indices, soft):
        expected = summed(outputs, targets, weight=torch.tensor(weight).double(), label_smoothing=0.1)
        (gradient,) = torch.autograd.grad(expected, outputs)
        torch.testing.assert_close(output_gradient(loss, outputs.detach(), targets, axis), gradient)
        torch.testing.assert_close(loss_values(loss, outputs.detach(), targets, axis).sum(), expected.detach())


@pytest.mark.parametrize("case", CASES)
def test_accuracy_is_the_share_of_right_positions(case):
    build, _, _, _, axis = CASES[case]
    (inputs, targets), model = clients_of(case)[0], built(build)
    federation = Federation(model, [(inputs, targets)], "plain", sgd, loss="cross_entropy")
    last = federation.fit(rounds=1, test=(inputs, targets)).last
    outputs = model(inputs).detach().movedim(axis, 1)
    right = [int(outputs[place[0], :, *place[1:]].argmax()) == int(value) for place, value in np.ndenumerate(targets)]
    assert last["accuracy"] == sum(right) / targets.numel()
    assert last["loss"] == pytest.approx(float(summed(outputs, targets)) / len(targets))


def test_where_both_axes_fit_the_caller_says_which():
    outputs = draw(2, 3, 3)
    last, second = outputs.argmax(-1), outputs.argmax(1)
    assert not torch.equal(last, second)
    assert metrics(outputs, last)["accuracy"] == metrics(outputs, second, axis=1)["accuracy"] == 1
    assert metrics(outputs, second)["accuracy"] < 1


@pytest.mark.parametrize(
    ("outputs", "targets", "axis", "found"),
    [
        ((5, 3), (5,), 1, -1),
        ((5, 3, 4), (5, 3), 1, -1),
        ((5, 3, 4), (5, 4), -1, 1),
        ((5, 4, 4), (5, 4), None, -1),
        ((5, 4, 4), (5, 4), 1, 1),
        ((5, 3, 4, 2), (5, 3, 4, 2), None, -1),
        ((5, 3, 4, 2), (5, 3, 4, 2), 1, 1),
    ],
)
def test_shapes_say_where_classes_are(outputs, targets, axis, found):
    assert class_axis(torch.zeros(outputs), torch.zeros(targets), axis) == found


def test_the_last_layer_says_where_shapes_do_not():
    assert head_axis(pixelwise(3)()) == 1
    assert head_axis(tokenwise(3)()) == -1
    assert head_axis(nn.Sequential(pixelwise(3)(), nn.Flatten(), nn.Linear(60, 2), nn.ReLU())) == -1
    assert head_axis(nn.Embedding(3, 4)) is None


def test_classes_for_a_loss_that_compares_numbers_are_measured_as_trained():
    outputs, targets = draw(6, 4), draw(6, classes=4)
    expected = find_loss("log_cosh").values(outputs, F.one_hot(targets, 4).double()).mean()
    assert metrics(outputs, targets, find_loss("log_cosh"))["loss"] == pytest.approx(float(expected))
    with pytest.raises(BadArgument, match=r"shape \(6, 7\) does not match the shape \(6, 4\) of the model's outputs"):
        metrics(outputs, torch.zeros(6, 7), SquaredError())


@pytest.mark.parametrize(
    ("case", "targets", "text"),
    [
        ("pixels", torch.full((2, 4, 5), 3), "classes range from 3 to 3, but the model has outputs 0 to 2"),
        ("tokens", torch.full((2, 4), -100), "classes range from -100 to -100, but the model has outputs 0 to 2"),
        ("pixels", torch.zeros(2, 5, 4).long(), r"indices of shape \(2, 3, 4\) or .*, got shape \(2, 5, 4\)"),
        ("pixels", torch.zeros(2).long(), r"expected class indices of shape .*, got shape \(2,\)"),
    ],
)
def test_targets_that_fit_no_axis_are_refused(case, targets, text):
    with pytest.raises(BadArgument, match=text):
        Federation(built(CASES[case][0]), [(draw(2, *CASES[case][1]), targets)], "plain", sgd, loss="cross_entropy")
