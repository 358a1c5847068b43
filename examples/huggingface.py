"""Hugging Face: a BERT classifier as transformers builds it, a tokenizer, and a collator that pads each batch.

- Shows: DataLoaders of dicts with labels, padding that varies by batch, and a model that returns a ModelOutput.
- Who attacks: nobody here. What is protected: clients compute on a perturbed BERT, never on the model.
- Needs: pip install fedveil transformers
- Last line: accuracy: plain 100.0 %, veil 100.0 %
"""

import random
import sys

import torch
from torch.utils.data import DataLoader

import fedveil

try:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding, PreTrainedTokenizerFast
except ImportError:
    sys.exit("huggingface.py needs transformers: pip install transformers")

OPENINGS = ("the {} was", "i found the {}", "honestly the {} is", "we all thought the {} was", "the new {} seems")
THINGS = ("film", "book", "song", "meal", "hotel", "teacher", "phone", "garden", "story", "player")
DEGREES = ("", "very", "rather", "truly", "really", "quite")
GOOD = ("good", "great", "lovely", "clever", "funny", "warm", "brilliant", "charming")
BAD = ("bad", "awful", "boring", "weak", "rude", "cold", "terrible", "clumsy")


def sentence(rng: random.Random) -> tuple[str, int]:
    """Return a random sentence, and 1 if it is praise or 0 if not."""
    praise, start = rng.random() < 0.5, rng.choice(OPENINGS).format(rng.choice(THINGS))
    words = start, rng.choice(DEGREES), rng.choice(GOOD if praise else BAD)
    return " ".join(filter(None, words)), int(praise)


rng = random.Random(0)
praise = dict(sentence(rng) for _ in range(900))  # duplicates are dropped
words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
words.train_from_iterator(praise, trainers.WordLevelTrainer(special_tokens=["[PAD]", "[UNK]"]))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
records = [{**tokenizer(text), "label": label} for text, label in praise.items()]
collate = DataCollatorWithPadding(tokenizer)  # pads each batch to its longest sentence
parts = records[:200], *[records[k::3] for k in (200, 201, 202)]
test, *clients = [DataLoader(part, batch_size=16, collate_fn=collate) for part in parts]

config = BertConfig(
    vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=2,
)  # fmt: skip


def accuracy(defence: str) -> float:
    """Train with three clients, and return the accuracy on sentences that none of them has, in percent."""
    torch.manual_seed(0)  # plain and veil start from the same weights
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    federation = fedveil.Federation(model, clients, defence, optimizer, loss="cross_entropy")
    return 100 * federation.fit(epochs=6, test=test).last["accuracy"]


print(fedveil.analyse(BertForSequenceClassification(config), collate(records[:2])))
print(f"accuracy: plain {accuracy('plain'):.1f} %, veil {accuracy('veil'):.1f} %")
