"""Models and examples that `analyse` refuses: the error says where, what and how to fix it."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import fedveil
from fedveil import errors


def dense(**options):
    return nn.Sequential(nn.Linear(5, 6, **options), nn.ReLU(), nn.Linear(6, 3))


class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class WithBranch(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = Branching(), nn.Linear(5, 2)

    def forward(self, x):
        return self.head(self.inner(x))


class TwoInputs(nn.Module):
    def forward(self, x, other):
        return x + other


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 3)

    def forward(self, x):
        return self.fc(x), x


X = torch.zeros(1, 5)
WAY_OUT = 'Fix:.*analyse.model, inputs, head="exposed".: then clients read the true predictions'
EXPOSED = {"head": "exposed"}


@pytest.mark.parametrize(
    ("model", "example", "options", "kind", "text"),
    [
        (WithBranch(), X, {}, errors.NotTraceable, r"inner \(Branching\), line.* reads the values.*Fix: replace `if`"),
        (dense(), torch.zeros(1, 7), {}, errors.NotTraceable, r"0 \(Linear\): torch.export cannot .*Fix: check"),
        (dense(), torch.tensor(1.0), {}, errors.BadArgument, "analyse: .*hold no tensor, or one without a batch"),
        (TwoInputs(), X, EXPOSED, errors.BadArgument, "missing a required argument: 'other'.*Fix: pass positional"),
        (nn.Sequential(nn.LayerNorm(5), nn.ReLU()), X, {}, errors.HeadNotLinear, f"no Linear and no conv.*{WAY_OUT}"),
        (
            nn.Sequential(nn.Conv1d(5, 5, 1, groups=5), nn.ReLU()), torch.zeros(1, 5, 5), {},
            errors.HeadNotLinear, rf"0 \(Conv1d\): it has 5 groups.*{WAY_OUT}",
        ),
        (
            nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 5)), nn.ReLU()), X, {},
            errors.HeadNotLinear, rf"0 \(linear\): its weight or bias is computed, not a param.*{WAY_OUT}",
        ),
        (TwoOutputs(), X, {}, errors.AnalysisError, "TwoOutputs: the model returns more than one tensor.*Fix: wrap it"),
        (
            nn.Sequential(nn.Linear(5, 6), nn.Softmax(1)), X, EXPOSED,
            errors.NothingToVeil, r"a veil would change nothing, because 1 \(Softmax\).*Fix:",
        ),
        (dense(), X, {"head": "open"}, errors.BadArgument, "analyse: head is 'open', not one of .linear"),
        (dense(dtype=torch.float64), X, {}, errors.AnalysisError, "must share one dtype and device, found"),
        (dense().requires_grad_(False), X, {}, errors.AnalysisError, "requires a gradient.*Fix: call req"),
    ],
)  # fmt: skip
def test_what_cannot_be_analysed_is_refused(model, example, options, kind, text):
    with pytest.raises(kind, match=f"(?s){text}"):
        fedveil.analyse(model, example, **options)
