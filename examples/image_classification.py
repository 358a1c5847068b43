# %% [markdown]
"""# Image classification: plain training and a veil give the same model.

- Shows: five clients that train a small CNN on handwritten digits, without and with a veil, from the same weights.
- Who attacks: a client that uses the model as it receives it, and one that first removes the public part of the noise.
- Needs: `pip install fedveil`
- Last line: `accuracy: plain 98.3 %, veil 98.3 %; the same answer for 100.0 % of the test images`
"""

# %%
import builtins

import torch
from torch import Tensor, nn

import fedveil
from fedveil.data import load, split
from fedveil.report import Picture

# %% [markdown]
"""## The clients

1,438 images of 8 x 8 pixels are divided among five clients. A Dirichlet split gives each of them a different mixture,
as with real hospitals or banks: most clients have hardly any images of some digits. The other 359 are test images.
"""

# %%
data = load("digits", flat=False)  # inputs of shape (records, 1, 8, 8)
clients = [data.train.take(rows) for rows in split(data, 5, how="dirichlet", alpha=0.5)]
for number, (_, digits) in enumerate(clients):
    print(f"client {number}: {len(digits)} images; zeros, ones ... nines: {digits.bincount(minlength=10).tolist()}")

# %% [markdown]
"""## Two federations

In every round the server sends the model, each client returns the gradient of its next 32 images, and the server takes
an optimizer step. Under a veil the server sends a perturbed model, with new secret noise in every round, and removes
the noise from the gradients that it receives.
"""


# %%
def train(defence: str) -> fedveil.Federation:
    """Train a federation, always from the same initial weights."""
    torch.manual_seed(0)
    first = nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    model = nn.Sequential(*first, nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    federation = fedveil.Federation(model, clients, defence, optimizer, batch_size=32)  # cross-entropy by default
    federation.fit(epochs=15, test=data.test)
    return federation


plain, veil = train("plain"), train("veil")
curves = zip(plain.history.curve("accuracy"), veil.history.curve("accuracy"), strict=True)
for (number, without), (_, veiled) in list(curves)[::2]:
    print(f"round {number:3}: test accuracy plain {100 * without:.1f} %, veil {100 * veiled:.1f} %")

# %% [markdown]
"""## What a client has

A client never receives the server's model. We create one more broadcast and look at what a client receives. As
received, the model is useless. However, the noise on the last layer has a public part, and a client that subtracts it
recovers nearly all predictions: **a veil is not a guarantee** (`docs/threat-model.md`). The image shows the predictions
of the three models, with one row for each true digit and one column for each predicted digit.
"""

# %%
defence_round = veil.defence_server.start_round(veil.model)
broadcast = defence_round.broadcast
views = {
    "the server's model": veil.model,
    "as received by a client": fedveil.client_view(veil.model, broadcast),
    "public offset removed": fedveil.client_view(veil.model, broadcast, centred=True),
}
defence_round.release()  # drop the secret of this broadcast, as after every round


def answers(model: nn.Module) -> Tensor:
    """Return the predicted digit for each test image."""
    with torch.no_grad():
        return model(data.test.inputs).argmax(1)


def confusion(model: nn.Module) -> Tensor:
    """Return the fraction of each predicted digit, with one row for each true digit."""
    counts = torch.bincount(10 * data.test.targets + answers(model), minlength=100).view(10, 10)
    return counts / counts.sum(1, keepdim=True)


for name, model in views.items():
    print(f"{name}: {100 * (answers(model) == data.test.targets).float().mean():.1f} % right")
if hasattr(builtins, "__IPYTHON__"):  # in a notebook, show all three as images; darker means more predictions
    from IPython.display import Image, display

    shares = torch.cat([nn.functional.pad(confusion(model), (1, 1, 1, 1), value=0.1) for model in views.values()], 1)
    pixels = (255 * (1 - shares)).byte().repeat_interleave(16, 0).repeat_interleave(16, 1)
    display(Image(Picture(pixels.shape[1], pixels.shape[0], 1, pixels.numpy().tobytes()).to_png()))

# %% [markdown]
"""## How similar the two models are

The noise is removed exactly, up to rounding in float32. Rounding errors grow during training, as they do between plain
runs on two machines. Even after 180 rounds, the two models make the same predictions.
"""

# %%
with torch.no_grad():
    difference = (plain.model(data.test.inputs).softmax(1) - veil.model(data.test.inputs).softmax(1)).abs().max()
print(f"largest difference between probabilities: {difference:.1g}")
accuracy = [f"{run.defence.name} {100 * run.history.last['accuracy']:.1f} %" for run in (plain, veil)]
same = 100 * (answers(plain.model) == answers(veil.model)).float().mean()
print(f"accuracy: {', '.join(accuracy)}; the same answer for {same:.1f} % of the test images")
