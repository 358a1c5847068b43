"""Models, batches and data sets in the forms of Hugging Face's packages, which are not installed here."""

from collections import OrderedDict, UserDict
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import Dataset

WORDS, CLASSES = 11, 3


class Encoding(UserDict):
    """A batch as tokenizers return it: a mapping that is not a dict."""


@dataclass
class ModelOutput(OrderedDict):
    """Outputs that are both a dataclass and a dict, without entries for values of None."""

    logits: torch.Tensor
    hidden_states: tuple = None
    pooled: torch.Tensor = None

    def __post_init__(self):
        for name in ("logits", "hidden_states", "pooled"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)


class Encoder(nn.Module):
    """A masked mean of embeddings; `wrap` makes what forward returns from logits and features."""

    def __init__(self, wrap=lambda logits, features: logits, tokens=False):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.hidden, self.classifier = nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.wrap, self.tokens = wrap, tokens

    def forward(self, input_ids=None, attention_mask=None, scale=1):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        shares = mask.unsqueeze(-1).to(self.classifier.weight.dtype)
        embedded = self.embed(input_ids) * shares
        if not self.tokens:
            embedded = embedded.sum(1) / shares.sum(1)
        features = torch.relu(self.hidden(embedded))
        return self.wrap(scale * self.classifier(features), features)


def batch(samples=5, length=6, seed=0):
    """Token ids and a mask that hides the end of some rows."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, WORDS, (samples, length), generator=draw)
    mask = (torch.arange(length) < torch.randint(2, length + 1, (samples, 1), generator=draw)).long()
    return Encoding(input_ids=ids * mask, attention_mask=mask)


class Sentences(Dataset):
    """Records as `datasets` returns them: dicts of lists and numbers."""

    def __init__(self, size, seed=0, label="label", length=None):
        draw = torch.Generator().manual_seed(seed)
        sizes = torch.randint(2, 7, (size,), generator=draw).tolist() if length is None else [length] * size
        ids = [torch.randint(1, WORDS, (own,), generator=draw).tolist() for own in sizes]
        classes = torch.randint(0, CLASSES, (size,), generator=draw).tolist()
        self.items = [{"input_ids": own, label: k} for own, k in zip(ids, classes, strict=True)]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def pad(items):
    """Pad a batch to its longest record, and rename "label", as DataCollatorWithPadding does."""
    longest = max(len(item["input_ids"]) for item in items)
    rows = [(item["input_ids"], longest - len(item["input_ids"])) for item in items]
    ids = torch.tensor([own + [0] * more for own, more in rows])
    mask = torch.tensor([[1] * len(own) + [0] * more for own, more in rows])
    return Encoding(input_ids=ids, attention_mask=mask, labels=torch.tensor([item["label"] for item in items]))


def pad_tokens(items):
    """Like `pad`, with one label per token: its own id modulo the classes, and -100 for padding."""
    found = pad(items)
    found["labels"] = torch.where(found["attention_mask"] > 0, found["input_ids"] % CLASSES, -100)
    return found


class LoRA(nn.Module):
    """A frozen Linear with a trained product of low rank."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapted():
    """An encoder with a frozen base, low-rank products and a trained classifier."""
    net = Encoder(lambda logits, features: {"logits": logits}).requires_grad_(False)
    net.hidden = LoRA(net.hidden)
    net.classifier.requires_grad_(True)
    return net.double()
