"""Models and examples that `analyse` refuses: the error says where, what and how to fix it."""

import pytest
import torch
from tests.oracle import Network
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence

import fedveil
from fedveil import errors
from fedveil.models import mlp


def dense(**options):
    return nn.Sequential(nn.Linear(5, 6, **options), nn.ReLU(), nn.Linear(6, 3))


class TwoInputs(nn.Module):
    def forward(self, x, other):
        return x + other


class Numpy(nn.Linear):
    def forward(self, x):
        return super().forward(x * float(x.detach().numpy().max()))


def with_branch():
    inner = Network(lambda _, x: x if x.sum() > 0 else -x)
    return Network(lambda m, x: m.head(m.inner(x)), inner=inner, head=nn.Linear(5, 2))


def two_outputs():
    return Network(lambda m, x: (m.fc(x), x), fc=nn.Linear(5, 3))


def with_autocast(whole):
    def run(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            x = model.body(x)
            x = model.head(x) if whole else x
        return x if whole else model.head(x.float().relu())

    return Network(run, body=nn.Linear(5, 6), head=nn.Linear(6, 3))


def packed():
    def run(model, x, lengths):
        sequences = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return model.head(model.lstm(sequences)[1][0][-1])

    return Network(run, lstm=nn.LSTM(3, 4, batch_first=True), head=nn.Linear(4, 2))


def causal():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True), 1)
    model = Network(lambda m, x: m.head(m.encoder(x, mask=m.mask)[:, -1]), encoder=encoder, head=nn.Linear(8, 2))
    model.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(3))
    return model


X = torch.zeros(1, 5)
WAY_OUT = 'Fix:.*analyse.model, inputs, head="exposed".: clients then see the true predictions'
EXPOSED = {"head": "exposed"}
PACKED = (torch.zeros(2, 4, 3), torch.tensor([4, 2]))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("model", "example", "options", "kind", "text"),
    [
        (with_branch(), X, {}, errors.NotTraceable, r"inner \(Network\), .*py:\d+ .* reads the val.*Fix: replace"),
        (dense(), torch.zeros(1, 7), {}, errors.NotTraceable, r"0 \(Linear\): torch.export cannot .*Fix: check"),
        (packed(), PACKED, {}, errors.NotTraceable, r"py:\d+ .*cannot trace packed sequences.*Fix: pass padded"),
        (causal(), torch.zeros(2, 3, 8), {}, errors.NotTraceable, r"py:\d+ .*values of the mask.*Fix: pass is_causal"),
        (Numpy(3, 2), torch.zeros(2, 3), {}, errors.NotTraceable, r"py:\d+ .*calls NumPy.*Fix: use torch fun"),
        (dense(), torch.tensor(1.0), {}, errors.BadArgument, "contain no tensor, or a tensor without a batch"),
        (TwoInputs(), X, EXPOSED, errors.BadArgument, "missing a required argument: 'other'.*Fix: pass positional"),
        (nn.Sequential(nn.LayerNorm(5), nn.ReLU()), X, {}, errors.HeadNotLinear, f"neither a Linear.*{WAY_OUT}"),
        (
            nn.Sequential(nn.Conv1d(5, 5, 1, groups=5), nn.ReLU()), torch.zeros(1, 5, 5), {},
            errors.HeadNotLinear, rf"0 \(Conv1d\): it has 5 groups.*{WAY_OUT}",
        ),
        (
            nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 5)), nn.ReLU()), X, {},
            errors.HeadNotLinear, rf"0 \(linear\): its weight or bias is computed, not a param.*{WAY_OUT}",
        ),
        (two_outputs(), X, {}, errors.BadArgument, "its forward.*several floating-point tensors.*Fix: choose one"),
        (
            nn.Sequential(nn.Linear(5, 6), nn.Softmax(1)), X, EXPOSED,
            errors.NothingToVeil, r"a veil would change nothing, because 1 \(Softmax\).*Fix:",
        ),
        (dense(), X, {"head": "open"}, errors.BadArgument, "analyse: head must be .linear. or .exposed., got 'open'"),
        (dense(dtype=torch.float64), X, {}, errors.AnalysisError, "must share one dtype and device, got"),
        (dense().requires_grad_(False), X, {}, errors.AnalysisError, "requires a gradient.*Fix: call req"),
        *[
            (mlp(5, 3).to(dtype), X.to(dtype), {}, errors.AnalysisError, r"0\.weight: it has dtype.*Fix: call model")
            for dtype in (torch.bfloat16, torch.float16)
        ],
        *[
            (with_autocast(whole), X, {}, errors.AnalysisError, r"Network: its forward method enables torch\.autocast")
            for whole in (False, True)
        ],
    ],
)  # fmt: skip
def test_what_cannot_be_analysed_is_refused(model, example, options, kind, text):
    with pytest.raises(kind, match=f"(?s){text}"):
        fedveil.analyse(model, example, **options)
