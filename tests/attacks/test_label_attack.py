"""The gradient of the head reveals labels."""

import pytest
import torch
from tests.attacks.victims import DIGITS
from tests.oracle import built

from fedveil.attacks.labels import batch_labels, single_label
from fedveil.attacks.leaked_gradients import Leak, mean_gradients
from fedveil.errors import BadArgument
from fedveil.models import mlp
from fedveil.scheme import find_loss


@pytest.mark.parametrize("loss", ["cross_entropy", "squared_error"])
@pytest.mark.parametrize("bias", [True, False])
def test_labels_follow_from_the_head(loss, bias):
    net = built(lambda: mlp(64, 10, layers=1, hidden=200, bias=bias), dtype=torch.float32)
    inputs, targets, found = DIGITS.train.inputs, DIGITS.train.targets, find_loss(loss)

    def leak(rows):
        return Leak(net, mean_gradients(net, found, inputs[rows], targets[rows]), found)

    assert [single_label(leak([row])) for row in range(20)] == targets[:20].tolist()
    twice = [*range(4), *range(4)]
    assert batch_labels(leak(twice), 8, inputs[100:]) == sorted(targets[twice].tolist())


def test_a_model_without_a_linear_is_refused():
    with pytest.raises(BadArgument, match="no Linear"):
        single_label(Leak(torch.nn.Conv2d(1, 1, 1), {}, find_loss("cross_entropy")))
