"""Over a network, one record affects neither the form of the others nor whether their client takes part."""

import math

import pytest
import torch
from tests.federation.secured import net, parts
from tests.federation.test_record_sums import clear_server, exact_sum, flat
from torch import nn

from fedveil import Privacy
from fedveil.federation.client import ClientSession


class WholeNumbers(nn.Module):
    """A model of whole numbers that float32 cannot represent."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 2)
        with torch.no_grad():
            self.lin.weight.copy_(torch.eye(2, 3))

    def forward(self, x):
        return self.lin((x % 5).float())


class Masked(nn.Module):
    """A model whose operation on a mask depends on its dtype."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 2)

    def forward(self, x, mask):
        return self.lin(x.masked_fill(~mask, 0.0))


def numbers(changed):
    draw = torch.Generator().manual_seed(0)
    items = [(torch.randint(2**24, 2**26, (3,), generator=draw), k % 2) for k in range(40)]
    if changed:
        items[7] = torch.tensor([0.5, 1.0, 2.0]), 1
    return items


def masks(changed):
    draw = torch.Generator().manual_seed(0)
    items = [
        {"x": torch.rand(3, generator=draw), "mask": torch.rand(3, generator=draw) > 0.3, "labels": k % 2}
        for k in range(40)
    ]
    if changed:
        items[7]["mask"] = items[7]["mask"].long()
    return items


class Items(torch.utils.data.Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


@pytest.mark.parametrize(
    ("build", "items", "example"),
    [
        (WholeNumbers, numbers, torch.ones(2, 3).long()),
        (Masked, masks, {"x": torch.ones(2, 3), "mask": torch.ones(2, 3).bool()}),
    ],
    ids=["numbers", "masks"],
)
def test_a_record_of_another_dtype_does_not_change_the_dtype_of_others(build, items, example):
    found = []
    for changed in (False, True):
        torch.manual_seed(0)
        data = [Items(items(changed and not k)) for k in range(5)]
        found.append(exact_sum(build, "cross_entropy", data, example))
    assert float((found[0] - found[1]).norm()) <= 2.0 + 1e-3  # clipped to 1 each
    assert bool(found[0].any())


def spoil_input(data):
    data[0][0][3, 0] = math.nan


def spoil_class(data):
    data[0][1][3] = 99  # the model has four outputs


@pytest.mark.parametrize("spoil", [spoil_input, spoil_class])
def test_without_secure_aggregation_a_bad_record_is_left_out_alone(spoil):
    """Otherwise, its client would be missing from the sum, although the server adds noise only for one record."""
    quiet, found = Privacy(noise=0.0, rate=1.0, clip=0.1), []
    for change in (lambda data: None, spoil):
        change(data := parts())
        server = clear_server("plain", quiet)
        server.engine.transport.answers |= {"site-0": ClientSession(net(), data[0], client=0).reply}
        result = server.exchange()
        assert result.figures["answers"] == 5
        found.append(flat(result.gradients) * result.figures["records"])
    rounding = 5 * quiet.grid(len(found[0]), 1, None).unit * math.sqrt(len(found[0]))
    assert 0 < float((found[0] - found[1]).norm()) <= 0.1 + rounding
