"""Models that cannot be recorded, or whose precision is too low, are refused with a reason and a fix."""

import pytest
import torch
from tests.oracle import perturb
from torch import nn

import fedveil
from fedveil import errors
from fedveil.models import mlp


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_refused_with_a_reason(dtype):
    with pytest.raises(errors.AnalysisError, match=r"0\.weight: it is torch.*\n  Fix: call model\.float\(\)"):
        fedveil.analyse(mlp(5, 3).to(dtype), torch.zeros(2, 5, dtype=dtype))


class Autocast(nn.Module):
    def __init__(self, whole):
        super().__init__()
        self.body, self.head, self.whole = nn.Linear(5, 6), nn.Linear(6, 3), whole

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            x = self.body(x)
            x = self.head(x) if self.whole else x
        return x if self.whole else self.head(x.float().relu())


def test_autocast_is_refused_inside_of_forward_and_around_it():
    example = torch.zeros(2, 5)
    for whole in (False, True):
        with pytest.raises(errors.AnalysisError, match=r"Autocast: its forward turns on torch\.autocast"):
            fedveil.analyse(Autocast(whole), example)
    model = mlp(5, 3)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(errors.AnalysisError, match="autocast is on for cpu"):
        fedveil.analyse(model, example)
    broadcast = perturb(model, fedveil.analyse(model, example)).broadcast
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(errors.BadArgument, match="autocast is on for cpu"):
        fedveil.client_step(model, broadcast, example, torch.zeros(2, 3))


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


class Numpy(nn.Linear):
    def forward(self, x):
        return super().forward(x * float(x.detach().numpy().max()))


@pytest.mark.parametrize(
    ("model", "inputs", "text"),
    [
        (Packed(), (torch.zeros(2, 4, 3), torch.tensor([4, 2])), "cannot record packed sequences.*Fix: pass padded"),
        (Causal(), torch.zeros(2, 3, 8), "values of the mask.*Fix: pass is_causal=True"),
        (Numpy(3, 2), torch.zeros(2, 3), "leaves PyTorch for NumPy.*Fix: use torch functions"),
    ],
    ids=["packed", "causal", "numpy"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_cannot_be_exported_is_refused_with_line_and_fix(model, inputs, text):
    with pytest.raises(errors.NotTraceable, match="(?s)" + text) as caught:
        fedveil.analyse(model, inputs)
    assert "line" in caught.value.where or "(" in caught.value.where
