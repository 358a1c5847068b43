"""Records that do not fit the model or the loss are refused before the first round, not after an epoch."""

import pytest
import torch
from tests.oracle import built
from tests.small import Records
from torch import nn

from fedveil import Federation
from fedveil.errors import BadArgument
from fedveil.models import mlp


def records(size=12, width=4, classes=3):
    draw = torch.Generator().manual_seed(0)
    return torch.randn(size, width, generator=draw), torch.arange(size) % classes


class Ids(nn.Module):
    """An embedding of token ids, with a mask."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 3)

    def forward(self, ids, mask):
        return self.head((self.embed(ids) * mask[:, :, None]).mean(1))


def check_refusal(federation, test, *texts):
    """Such test data are refused without a round or a change of the model."""
    before = [parameter.clone() for parameter in federation.model.parameters()]
    with pytest.raises(BadArgument, match=r"^test data") as caught:
        federation.fit(2, test=test)
    assert all(text in str(caught.value) for text in texts), str(caught.value)
    assert federation.round == 0
    assert all(torch.equal(a, b) for a, b in zip(before, federation.model.parameters(), strict=True))


def own(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


INPUTS, TARGETS = records()
WIDE = records(width=5)


@pytest.mark.parametrize(
    ("loss", "test", "texts"),
    [
        (None, WIDE, ["inputs: torch.float32 of shape (5,)", "the clients' are inputs: torch.float32 of shape (4,)"]),
        (None, Records(*WIDE), ["inputs: torch.float32 of shape (5,)", "the clients' are inputs: torch.float32 of"]),
        (None, (INPUTS.long(), TARGETS), ["torch.int64 of shape (4,)", "torch.float32 of shape (4,)"]),
        (None, (INPUTS, TARGETS.float()), ["test data: targets", "targets.long()"]),
        (own, (INPUTS, TARGETS.float()), ["test data: targets", "own does not accept them (torch.float32 of shape ()"]),
        (None, (INPUTS[:0], TARGETS[:0]), ["there are no records"]),
        (None, (INPUTS, TARGETS[:9]), ["12 records in inputs and 9 targets"]),
        (None, (INPUTS / 0, TARGETS), ["test data, record 0: inputs hold NaN or infinity"]),
        (None, Records(INPUTS / 0, TARGETS), ["test data, record 0: inputs hold NaN or infinity"]),
        ("squared_error", (INPUTS, INPUTS[:, :3] / 0), ["test data, record 0: targets hold NaN or infinity"]),
        (None, INPUTS, ["it is a Tensor"]),
        *[(loss, records(classes=4), ["the model has outputs 0 to 2"]) for loss in (None, "squared_error", "hinge")],
    ],
)
def test_test_data_that_do_not_fit_are_refused_before_the_first_round(loss, test, texts):
    check_refusal(Federation(mlp(4, 3, hidden=8), [records()], "plain", loss=loss), test, *texts)


def test_integers_are_not_quantities():
    quantities = Federation(mlp(4, 1, hidden=8), [(INPUTS, INPUTS[:, 0])], "plain")
    check_refusal(quantities, (INPUTS, TARGETS), "test data: targets", "targets.float()")


def test_another_number_or_kind_of_inputs_is_named():
    ids, mask = torch.arange(24).reshape(12, 2) % 10, torch.ones(12, 2)
    federation = Federation(Ids(), [((ids, mask), TARGETS)], "plain")
    check_refusal(federation, (ids, TARGETS), "inputs: torch.int64 of shape (2,)", "inputs[1]: torch.float32 of")
    check_refusal(federation, ((ids.float(), mask), TARGETS), "inputs[0]: torch.float32", "inputs[0]: torch.int64")


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
    text = rf"(?s)client 2 has a single record, and layer '{layer}' .* needs two.*Fix: merge this client with another"
    with pytest.raises(BadArgument, match=text):
        Federation(built(build), data, defence)
    Federation(built(build).eval(), data, defence).fit(1)


@pytest.mark.parametrize("whole_shard", [False, True])
def test_batches_of_one_record_are_refused_too(whole_shard):
    with pytest.raises(BadArgument, match=r"(?s)batch_size=1 .* layer '1' .*Fix: set batch_size"):
        Federation(built(flat), parts((6,), (5, 4)), "plain", batch_size=1, whole_shard=whole_shard)
    with pytest.raises(BadArgument, match="client 0 has a single record, and layer '1'"):  # before the analysis
        Federation(built(flat), parts((6,), (1,)), "veil", whole_shard=whole_shard)


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
