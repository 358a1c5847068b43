"""How much of a model is covered, what clients know of it, and models that are refused for their precision."""

import re

import pytest
import torch
from tests.oracle import built, perturb
from tests.zoo import ZOO
from torch import nn

import fedveil
from fedveil import errors
from fedveil.defences import Veil


def mlp():
    return nn.Sequential(
        nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, 3)
    )


def half_bare():
    return nn.Sequential(nn.Linear(5, 6), Odd(), nn.Linear(6, 3))


class Odd(nn.Module):
    def forward(self, x):
        return torch.special.i0(x)


@pytest.mark.parametrize("name", ZOO)
def test_shares_add_up_to_one(name):
    build, shape = ZOO[name]
    shares = fedveil.analyse(build(), torch.zeros(2, *shape)).shares
    assert list(shares) == ["scaled", "signed", "moved", "bare"]
    assert sum(shares.values()) == pytest.approx(1)


def test_each_value_counts_under_the_strongest():
    shares = fedveil.analyse(mlp(), torch.zeros(2, 5)).shares
    total = 36 + 49 + 64 + 27
    moved = 36  # behind the first layer only GELU, which lets units trade places
    signed = 49  # tanh
    assert shares["moved"] == pytest.approx(moved / total)
    assert shares["signed"] == pytest.approx(signed / total)
    assert shares["scaled"] == pytest.approx((64 + 27) / total)
    assert shares["bare"] == 0


def test_what_counts_as_bare_is_sent_bit_for_bit_and_the_rest_is_not():
    model = built(half_bare)
    with pytest.warns(UserWarning, match="of the parameters' values are sent as they are"):
        plan = fedveil.analyse(model, torch.zeros(2, 5))
    sent = perturb(model, plan).broadcast.parameters
    same = sum(int((sent[name] == p).sum()) for name, p in model.named_parameters())
    total = sum(p.numel() for p in model.parameters())
    assert same / total == pytest.approx(plan.shares["bare"])
    assert plan.coverage == 1 - plan.shares["bare"]


def test_a_warning_says_how_much_is_bare_and_why_and_a_bound_refuses():
    text = "Sequential: 63.2% of the parameters' values are sent as they are, because 1 (special_i0): there is no rule"
    with pytest.warns(UserWarning, match=re.escape(text)):
        fedveil.analyse(half_bare(), torch.zeros(2, 5))
    with pytest.raises(
        errors.TooLittleCovered, match=r"36\.8% of its values can be covered, less than the 90\.0% asked"
    ):
        fedveil.analyse(half_bare(), torch.zeros(2, 5), min_coverage=0.9)
    with pytest.raises(errors.TooLittleCovered):
        fedveil.Federation(half_bare(), [(torch.zeros(4, 5), torch.zeros(4, 3))], Veil(min_coverage=0.9))
    with pytest.raises(errors.BadArgument, match="min_coverage must be from 0 to 1, got 2"):
        fedveil.analyse(half_bare(), torch.zeros(2, 5), min_coverage=2)


def normed(weight=None):
    layers = [nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 1), nn.ReLU(), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(5 * 4, 3))
    if weight is not None:
        nn.init.uniform_(model[1].weight, *weight)
    return model


def test_a_new_norm_shows_its_factors_and_the_plan_says_what_they_were_to_protect():
    model = normed()
    plan = fedveil.analyse(model, torch.zeros(2, 3, 2, 2))
    assert plan.known.names == ("1.weight",)
    # its own 4 weights and 4 biases, and the signs of the 12 weights before; the next layer keeps its rows' factors
    assert plan.known.share == pytest.approx((8 + 12) / plan.layout.parameters)
    sent = perturb(model, plan).broadcast.parameters
    shown = sent["1.weight"].abs()  # what a client divides out: |r| o 1
    rows = sent["3.weight"][:, :, 0, 0] * shown
    true = model[3].weight[:, :, 0, 0]
    ratio = rows.sort(1).values / rows.abs().sum(1, keepdim=True)
    wanted = (true / true.abs().sum(1, keepdim=True)).sort(1).values
    assert all(any(torch.allclose(r, w, rtol=1e-4) for w in wanted) for r in ratio)  # rows up to their own factor
    before = sent["0.weight"] * sent["1.weight"].sign().view(-1, 1, 1, 1)
    assert all(any(torch.equal(row, true) for true in model[0].weight) for row in before)  # rows up to their order
    assert "follow from values that clients know (1.weight)" in str(plan)


def test_trained_norms_are_not_known_but_public_ones_are():
    model = normed((0.5, 2.0))
    assert fedveil.analyse(model, torch.zeros(2, 3, 2, 2)).known.share == 0
    plan = fedveil.analyse(model, torch.zeros(2, 3, 2, 2), public=["1", "3.weight"])
    assert plan.known.names == ("1.bias", "1.weight", "3.weight")
    assert plan.known.share == pytest.approx((8 + 12 + 25) / plan.layout.parameters)  # with all of "3", bias included


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_refused_with_a_reason(dtype):
    with pytest.raises(errors.AnalysisError, match=r"0\.weight: it is torch.*lose more.*\n  Fix: model\.float\(\)"):
        fedveil.analyse(mlp().to(dtype), torch.zeros(2, 5, dtype=dtype))


@pytest.mark.parametrize("whole", [False, True])
def test_autocast_is_refused_inside_of_forward(whole):
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(5, 6), nn.Linear(6, 3)

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                x = self.body(x)
                x = self.head(x) if whole else x
            return x if whole else self.head(x.float().relu())

    with pytest.raises(errors.AnalysisError, match=r"Inside: its forward turns on torch\.autocast"):
        fedveil.analyse(Inside(), torch.zeros(2, 5))


def test_autocast_is_refused_around_forward():
    model = mlp()
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(errors.AnalysisError, match="autocast is on for cpu"),
    ):
        fedveil.analyse(model, torch.zeros(2, 5))
    broadcast = perturb(model, fedveil.analyse(model, torch.zeros(2, 5))).broadcast
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(errors.BadArgument, match="autocast is on for cpu"):
        fedveil.client_step(model, broadcast, torch.zeros(2, 5), torch.zeros(2, 3))


def test_a_channels_last_model_is_covered_as_any_other():
    model = built(ZOO["CNN"][0]).to(memory_format=torch.channels_last)
    plan = fedveil.analyse(model, torch.zeros(2, *ZOO["CNN"][1]))
    assert plan.shares == fedveil.analyse(built(ZOO["CNN"][0]), torch.zeros(2, *ZOO["CNN"][1])).shares


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.lstm(packed)[1][0][-1])


class Causal(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True), 1)
        self.head = nn.Linear(8, 2)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(3))

    def forward(self, x):
        return self.head(self.encoder(x, mask=self.mask)[:, -1])


class Numpy(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(x * float(x.detach().numpy().max()))


@pytest.mark.parametrize(
    ("model", "inputs", "text"),
    [
        (Packed(), (torch.zeros(2, 4, 3), torch.tensor([4, 2])), "cannot record packed sequences.*Fix: pass padded"),
        (Causal(), torch.zeros(2, 3, 8), "values of the mask.*Fix: say so: is_causal=True"),
        (Numpy(), torch.zeros(2, 3), "leaves PyTorch for NumPy.*Fix: use torch functions"),
    ],
    ids=["packed", "causal", "numpy"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_cannot_be_exported_is_refused_with_line_and_fix(model, inputs, text):
    with pytest.raises(errors.NotTraceable, match="(?s)" + text) as caught:
        fedveil.analyse(model, inputs)
    assert "line" in caught.value.where or "(" in caught.value.where
