"""One network that takes its numbers in every form, and records to go with it."""

import torch
from tests.oracle import built
from torch import nn

from fedveil.models import mlp

CUT = 2


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(6, 4, hidden=10)

    def forward(self, x):
        return self.net(x)


class Apart(Whole):
    def forward(self, a, b):
        return self.net(torch.cat([a, b], 1))


class Nested(Whole):
    def forward(self, batch):
        return self.net(torch.cat([batch["a"], batch["more"][0]], 1))


class Optional(Whole):
    def forward(self, a, b, mask=None, scale=1.0):
        joined = torch.cat([a, b], 1) * scale
        return self.net(joined if mask is None else joined * mask)


class Words(nn.Module):
    """Token ids beside numbers; classes on the last axis, at each token."""

    def __init__(self):
        super().__init__()
        self.words, self.numbers, self.head = nn.Embedding(7, 10), nn.Linear(6, 10), nn.Linear(10, 4)

    def forward(self, numbers, ids):
        return self.head(torch.tanh(self.words(ids) + self.numbers(numbers).unsqueeze(1)))


FORMS = {
    "tuple": (Apart, lambda x: (x[:, :CUT], x[:, CUT:])),
    "list": (Apart, lambda x: [x[:, :CUT], x[:, CUT:]]),
    "dict": (Apart, lambda x: {"b": x[:, CUT:], "a": x[:, :CUT]}),
    "nested": (Nested, lambda x: ({"a": x[:, :CUT], "more": (x[:, CUT:],)},)),
    "with constants": (Optional, lambda x: {"a": x[:, :CUT], "b": x[:, CUT:], "mask": None, "scale": 1}),
}


def network(kind):
    """The same values whatever the form."""
    return built(kind)


def records(sizes=(20, 33, 7), classes=False):
    """(numbers, targets) of each client."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for size in sizes:
        inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64)
        targets = torch.randn(size, 4, generator=generator, dtype=torch.float64)
        found.append((inputs, targets.argmax(1) if classes else targets))
    return found


def reformed(parts, form):
    """The same records with inputs in another form."""
    return [(form(inputs), targets) for inputs, targets in parts]


def pooled_descent(model, inputs, targets, loss, rounds, lr):
    """Gradient descent on all records at once: what clients do together if each takes all its records in a round.

    `inputs` are positional arguments; `loss` is summed over the records.
    """
    for _ in range(rounds):
        found = torch.autograd.grad(loss(model(*inputs), targets) / len(targets), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), found, strict=True):
                parameter -= lr * gradient
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}
