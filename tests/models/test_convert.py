"""Conversion of BatchNorm: no record depends on another afterwards, and nothing else changes."""

import torch
from torch import nn

from fedveil.models import with_group_norm


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.norm = nn.BatchNorm1d(12, affine=False)
        self.last = nn.Linear(6, 12)

    def forward(self, x):
        return self.norm(self.last(self.first(x).mean((2, 3))))


def test_records_become_independent_and_the_given_model_stays():
    model = Net()
    with torch.no_grad():
        model.first[1].weight.normal_()
    found, x = with_group_norm(model, groups=4), torch.randn(5, 3, 4, 4)
    assert torch.allclose(found(x)[:2], found(x[:2]), atol=1e-6)
    assert not torch.allclose(model(x)[:2], model(x[:2]), atol=1e-2)
    assert torch.equal(found.first[1].weight, model.first[1].weight)
    assert found.first[1].weight is not model.first[1].weight
    assert [type(m).__name__ for m in model.modules()].count("BatchNorm2d") == 1
    assert (found.first[1].num_groups, found.norm.num_groups) == (2, 4)
    assert isinstance(with_group_norm(nn.BatchNorm1d(8)), nn.GroupNorm)
