"""Text classification: an LSTM and a transformer learn that "the film was hardly good" is not praise.

- Shows: nn.Embedding, nn.LSTM and nn.TransformerEncoderLayer, without and with a veil, and their coverage.
- Who attacks: nobody here. What is protected: clients compute on perturbed embeddings and layers, never on the model.
- Needs: pip install fedveil
- Last line: accuracy: LSTM plain 100.0 %, veil 100.0 %; transformer plain 100.0 %, veil 100.0 %
"""

import random

import torch
from torch import Tensor, nn

import fedveil

OPENINGS = ("the {} was", "i found the {}", "honestly the {} is", "we all thought the {} was", "the new {} seems")
THINGS = ("film", "book", "song", "meal", "hotel", "teacher", "phone", "garden", "story", "player")
NEGATIONS, DEGREES = ("not", "never", "hardly"), ("", "very", "rather", "truly")
GOOD = ("good", "great", "lovely", "clever", "funny", "warm", "brilliant", "charming")
BAD = ("bad", "awful", "boring", "weak", "rude", "cold", "terrible", "clumsy")
LENGTH = 10  # maximum number of words in a sentence


def sentence(rng: random.Random) -> tuple[str, int]:
    """Return a random sentence, and 1 if it is praise or 0 if not."""
    praise, negated = rng.random() < 0.5, rng.random() < 0.5
    start, negation = rng.choice(OPENINGS).format(rng.choice(THINGS)), rng.choice(NEGATIONS) * negated
    words = start, negation, rng.choice(DEGREES), rng.choice(GOOD if praise != negated else BAD)
    return " ".join(filter(None, words)), int(praise)


class Lstm(nn.Module):
    """An LSTM that classifies a sentence by its last state."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(words, 16), nn.Linear(24, 2)
        self.lstm = nn.LSTM(16, 24, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        """Return two logits per sentence."""
        return self.head(self.lstm(self.embedding(ids))[0][:, -1])


class Transformer(nn.Module):
    """A transformer block with four heads that classifies a sentence by the mean over positions."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(words, 24), nn.Linear(24, 2)
        self.positions = nn.Parameter(0.1 * torch.randn(LENGTH, 24))
        self.block = nn.TransformerEncoderLayer(24, 4, 48, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        """Return two logits per sentence."""
        return self.head(self.block(self.embedding(ids) + self.positions).mean(1))


rng = random.Random(0)
praise = dict(sentence(rng) for _ in range(1500))  # duplicates are dropped
index = {word: i for i, word in enumerate(["", *sorted(set(" ".join(praise).split()))])}
ids = torch.tensor([[0] * (LENGTH - len(s.split())) + [index[word] for word in s.split()] for s in praise])
targets = torch.tensor([*praise.values()])
test, clients = (ids[:400], targets[:400]), [(ids[k::3], targets[k::3]) for k in (400, 401, 402)]


def accuracy(network: type[nn.Module], defence: str) -> str:
    """Train a network with three clients, and return its accuracy on sentences that none of them has."""
    torch.manual_seed(0)  # plain and veil start from the same weights
    model = network(len(index))
    federation = fedveil.Federation(model, clients, defence, torch.optim.Adam(model.parameters(), lr=1e-2))
    return f"{100 * federation.fit(epochs=12, test=test).last['accuracy']:.1f} %"


networks = {"LSTM": Lstm, "transformer": Transformer}
for name, network in networks.items():
    shares = fedveil.analyse(network(len(index)), ids[:2]).shares
    print(f"{name}, coverage:", ", ".join(f"{kind} {100 * share:.0f} %" for kind, share in shares.items()))
results = [f"{name} plain {accuracy(net, 'plain')}, veil {accuracy(net, 'veil')}" for name, net in networks.items()]
print(f"accuracy: {'; '.join(results)}")
