"""Test data that the model or the loss does not take are refused before the first round, not after an epoch."""

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from fedveil import Federation
from fedveil.errors import BadArgument
from fedveil.models import mlp


def records(size=12, width=4, classes=3):
    draw = torch.Generator().manual_seed(0)
    return torch.randn(size, width, generator=draw), torch.arange(size) % classes


class Ids(nn.Module):
    """An embedding of token ids, with a mask if there is one."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 3)

    def forward(self, ids, mask):
        return self.head((self.embed(ids) * mask[:, :, None]).mean(1))


class Read(Dataset):
    def __init__(self, inputs, targets):
        self.inputs, self.targets = inputs, targets

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


def refused(federation, test, *texts):
    """Refuse such test data without a round or a change of the model."""
    before = [parameter.clone() for parameter in federation.model.parameters()]
    with pytest.raises(BadArgument) as caught:
        federation.fit(2, test=test)
    assert str(caught.value).startswith("test data")
    for text in texts:
        assert text in str(caught.value)
    assert federation.round == 0
    assert all(torch.equal(a, b) for a, b in zip(before, federation.model.parameters(), strict=True))


def classifier(loss=None, outputs=3):
    return Federation(mlp(4, outputs, hidden=8), [records()], "plain", loss=loss)


@pytest.mark.parametrize("form", [lambda pair: pair, lambda pair: Read(*pair)])
def test_another_width_is_named_with_the_one_that_clients_have(form):
    refused(classifier(), form(records(width=5)), "inputs torch.float32 (5,)", "clients have inputs torch.float32 (4,)")


def test_integers_in_place_of_floating_point_numbers_are_named():
    inputs, targets = records()
    refused(classifier(), (inputs.long(), targets), "torch.int64 (4,)", "torch.float32 (4,)")


def test_another_number_of_inputs_is_named():
    ids, mask = torch.arange(24).reshape(12, 2) % 10, torch.ones(12, 2)
    federation = Federation(Ids(), [((ids, mask), torch.arange(12) % 3)], "plain")
    refused(federation, (ids, torch.arange(12) % 3), "inputs torch.int64 (2,)", "inputs[1] torch.float32 (2,)")
    wrong = ids.float(), mask
    refused(federation, (wrong, torch.arange(12) % 3), "inputs[0] torch.float32 (2,)", "inputs[0] torch.int64 (2,)")


@pytest.mark.parametrize("loss", [None, "squared_error", "hinge"])
def test_classes_beyond_the_outputs_are_refused(loss):
    refused(classifier(loss), records(classes=4), "test data: targets", "the model has outputs 0 to 2")


def test_targets_of_another_kind_are_refused():
    inputs, targets = records()
    refused(classifier(), (inputs, targets.float()), "test data: targets", "targets.long()")
    quantities = Federation(mlp(4, 1, hidden=8), [(inputs, inputs[:, 0])], "plain")
    refused(quantities, (inputs, targets), "test data: targets", "targets.float()")


def test_targets_that_a_users_function_does_not_take_are_refused():
    def own(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    inputs, targets = records()
    refused(
        classifier(own), (inputs, targets.float()), "test data: targets", "own does not take them (torch.float32 ()"
    )
