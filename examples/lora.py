"""Adapters: a public network learns rotated digits through low-rank products; only what is trained travels.

- Shows: frozen="local", which parameters are sent, and the bytes per round, without and with a veil.
- Who attacks: nobody here. What is protected: the products and the classifier are perturbed; the base is public.
- Needs: pip install fedveil
- Last line: accuracy: plain 95.7 %, veil 95.7 %; kilobytes down: 100.2 whole, 17.3 without the base
"""

import copy

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fedveil
from fedveil.defences import Plain, Veil


class LowRank(nn.Module):
    """A frozen Linear plus a trained product of two matrices, which begins at zero (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both."""
        return self.base(x) + self.up(self.down(x))


digits = load_digits()
images, targets = torch.tensor(digits.images / 16, dtype=torch.float32), torch.tensor(digits.target)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
images, targets = images[order], targets[order]
public = images[:700].flatten(1), targets[:700]  # upright, and known to everyone
rotated = images[700:].rot90(dims=(1, 2)).flatten(1), targets[700:]  # what clients have
test, clients = tuple(own[:300] for own in rotated), [tuple(own[k::3] for own in rotated) for k in (300, 301, 302)]

torch.manual_seed(0)
base = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 96), nn.ReLU(), nn.Linear(96, 10))
optimizer = torch.optim.Adam(base.parameters(), lr=1e-2)
for _ in range(200):  # nothing here is private
    optimizer.zero_grad()
    nn.functional.cross_entropy(base(public[0]), public[1]).backward()
    optimizer.step()
model = copy.deepcopy(base)
model[0], model[2] = LowRank(model[0]), LowRank(model[2])
print(fedveil.analyse(model, test[0][:2], frozen="local"))


def train(defence: fedveil.defences.Defence) -> tuple[float, float]:
    """Train with three clients; return the accuracy in percent and the kilobytes that a client receives per round."""
    start = copy.deepcopy(model)
    optimizer = torch.optim.Adam([own for own in start.parameters() if own.requires_grad], lr=1e-2)
    history = fedveil.Federation(start, clients, defence, optimizer).fit(epochs=40, test=test)
    return 100 * history.last["accuracy"], history.records[-1]["bytes_down"] / 1000


plain, _ = train(Plain(frozen="local"))
_, whole = train(Veil())
veil, part = train(Veil(frozen="local"))
sizes = f"kilobytes down: {whole:.1f} whole, {part:.1f} without the base"
print(f"accuracy: plain {plain:.1f} %, veil {veil:.1f} %; {sizes}")
