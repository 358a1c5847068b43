"""A client with one record, and layers that normalise over a batch."""

import pytest
import torch
from tests.oracle import built
from torch import nn

from fedveil.errors import BadArgument
from fedveil.federation import Federation


class Named(nn.Module):
    """A model whose layer has a name, and another norm before it that takes a single record."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.body(x))))


def flat():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def parts(shape, sizes):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(n, *shape, generator=generator), torch.randn(n, 2, generator=generator)) for n in sizes]


MODELS = {"flat": (flat, (6,), "1"), "named": (Named, (3, 6, 6), "norm")}


@pytest.mark.parametrize("defence", ["plain", "veil"])
@pytest.mark.parametrize("name", MODELS)
def test_a_client_with_one_record_is_refused_with_its_number_and_the_layer(name, defence):
    build, shape, layer = MODELS[name]
    data = parts(shape, (5, 4, 1, 3))
    text = rf"(?s)client 2 has a single record, and layer '{layer}' .* needs two.*Fix: join this client with another"
    with pytest.raises(BadArgument, match=text):
        Federation(built(build), data, defence)
    Federation(built(build).eval(), data, defence).fit(1)


@pytest.mark.parametrize("whole_shard", [False, True])
def test_batches_of_one_record_are_refused_too(whole_shard):
    with pytest.raises(BadArgument, match=r"(?s)batch_size=1 .* layer '1' .*Fix: choose batch_size=2"):
        Federation(built(flat), parts((6,), (5, 4)), "plain", batch_size=1, whole_shard=whole_shard)


def test_the_only_record_of_all_is_refused_before_the_analysis():
    with pytest.raises(BadArgument, match="client 0 has a single record, and layer '1'"):
        Federation(built(flat), parts((6,), (1,)), "veil")


@pytest.mark.parametrize("defence", ["plain", "veil"])
def test_one_image_has_many_values_and_trains(defence):
    model = built(Named)
    model.norm.eval()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = torch.get_rng_state()
    run = Federation(model, parts((3, 6, 6), (5, 1)), defence)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_pre_hooks for module in model.modules())
    run.fit(rounds=2)
    model.norm.train()
    with pytest.raises(BadArgument, match="client 1 has a single record, and layer 'norm'"):
        Federation(model, parts((3, 6, 6), (5, 1)), defence)
