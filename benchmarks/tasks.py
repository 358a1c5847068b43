"""Is a veiled run equal to a plain run for segmentation and text? Compared with three rounding baselines.

    FEDVEIL_DATA=folder python -m benchmarks.tasks [segmentation] [lstm] [transformer] [--quick]

segmentation: lesion pictures of 64 x 64; a pixel belongs to the lesion if it is darker than its picture's mean by half
a standard deviation; UNet, cross-entropy per pixel. lstm, transformer: passages of 16 words of Python's own help texts,
which of four topics they come from; cross-entropy. Three clients, Adam, 60 rounds (segmentation 24). The test loss
per position and the parameters at the end: |veil - plain| against three times the largest baseline (docs/maths.md,
'What "equal" means'; floors: 1e-4 of a loss, 1e-6 of the parameters).
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

from benchmarks.networks.encoders import EncoderClassifier
from benchmarks.networks.pixelwise import UNet
from benchmarks.networks.recurrent import LstmClassifier
from benchmarks.timing import table
from fedveil import data as datasets
from fedveil.defences import Defence, Plain, Veil
from fedveil.federation import Federation

BASELINES = (1, 2, 3)
TOPICS = ("specialnames", "compound", "formatstrings", "debugger")
WORDS, VOCABULARY = 16, 400
Part = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """Clients' records, held-out ones, and a network for them."""

    clients: list[Part]
    test: Part
    build: Callable[[], nn.Module]
    batch_size: int
    rounds: int


def passages() -> tuple[Tensor, Tensor]:
    """Passages of words as numbers, and the topic of each; 0 is any rare word."""
    words = {topic: re.findall(r"[a-z_]+", topics[topic].lower()) for topic in TOPICS}
    known = Counter(word for text in words.values() for word in text).most_common(VOCABULARY - 1)
    number = {word: place for place, (word, _) in enumerate(known, 1)}
    rows, labels = [], []
    for label, text in enumerate(words.values()):
        for start in range(0, len(text) - WORDS, WORDS):
            rows.append([number.get(word, 0) for word in text[start : start + WORDS]])
            labels.append(label)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    return torch.tensor(rows)[order], torch.tensor(labels)[order]


def masked(pictures: Tensor) -> Tensor:
    """1 where a pixel is darker than its picture by half a standard deviation."""
    grey = pictures.mean(1)
    mean, spread = grey.mean((1, 2), keepdim=True), grey.std((1, 2), keepdim=True)
    return (grey < mean - 0.5 * spread).long()


def divided(inputs: Tensor, targets: Tensor, held_out: int) -> tuple[list[Part], Part]:
    """Three clients of unequal size, and the rest."""
    first = len(inputs) - held_out
    sizes = [first // 2, first // 3, first - first // 2 - first // 3]
    parts = list(zip(inputs[:first].split(sizes), targets[:first].split(sizes), strict=True))
    return parts, (inputs[first:], targets[first:])


def segmentation(quick: bool) -> Task:
    """Lesions in their pictures."""
    found = datasets.load("lesion", train_size=60 if quick else 240, test_size=60)
    pictures = torch.cat([found.train.tensor, found.test.tensor])
    clients, test = divided(pictures, masked(pictures), 60)
    return Task(clients, test, lambda: UNet(classes=2), 8, 4 if quick else 24)


def text(build: Callable[[], nn.Module], quick: bool) -> Task:
    """Topics of passages."""
    ids, labels = passages()
    clients, test = divided(ids, labels, 200)
    return Task(clients, test, build, 32, 10 if quick else 60)


TASKS: dict[str, Callable[[bool], Task]] = {
    "segmentation": segmentation,
    "lstm": partial(text, lambda: LstmClassifier(vocabulary=VOCABULARY, classes=len(TOPICS))),
    "transformer": partial(
        text, lambda: EncoderClassifier(vocabulary=VOCABULARY, length=WORDS, classes=len(TOPICS), norm_first=True)
    ),
}


def run(task: Task, defence: Defence, rounds: int) -> tuple[float, float, Tensor, Defence]:
    """Test loss, accuracy and parameters after training."""
    torch.manual_seed(0)
    model = task.build()
    federation = Federation(
        model,
        task.clients,
        defence,
        lambda p: torch.optim.Adam(p, 3e-3),
        batch_size=task.batch_size,
        loss="cross_entropy",
    )
    last = federation.fit(rounds=rounds, test=task.test, evaluate_every=rounds).last
    flat = torch.cat([p.detach().reshape(-1).double() for p in model.parameters()])
    positions = task.test[1][0].numel()  # what a loss has at several positions is summed; people read it per pixel
    return last["loss"] / positions, last["accuracy"], flat, federation.defence


def judge(name: str, quick: bool) -> tuple[list[str], bool]:
    """A row of the table, and whether the veil stays within its bounds."""
    task = TASKS[name](quick)
    rounds = task.rounds
    loss, accuracy, values, _ = run(task, Plain(), rounds)
    baselines = [run(task, Plain(rounding=seed), rounds) for seed in BASELINES]
    veiled = run(task, Veil(additive=10.0), rounds)
    loss_bound = 3 * max(1e-4, *[abs(b[0] - loss) for b in baselines])
    apart = [float((b[2] - values).norm() / values.norm()) for b in (*baselines, veiled)]
    value_bound = 3 * max(1e-6, *apart[:-1])
    kept = abs(veiled[0] - loss) <= loss_bound and apart[-1] <= value_bound
    shares = veiled[3].plan.shares  # type: ignore[attr-defined]
    figures = [
        f"{accuracy:.4f}",
        f"{veiled[1]:.4f}",
        f"{loss:.5f}",
        f"{abs(veiled[0] - loss):.1e}",
        f"{loss_bound:.1e}",
    ]
    figures += [f"{apart[-1]:.1e}", f"{value_bound:.1e}"]
    covered = " ".join(f"{100 * share:.0f}" for share in shares.values())
    return [name, *figures, covered, "ok" if kept else "OVER"], kept


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tasks; 1 if a bound is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tasks", description="Veiled against plain runs.")
    parser.add_argument("tasks", nargs="*", choices=[*TASKS, []], help=f"some of {', '.join(TASKS)} (default all)")
    parser.add_argument("--quick", action="store_true", help="few rounds, little data")
    options = parser.parse_args(argv)
    found = [judge(name, options.quick) for name in options.tasks or TASKS]
    header = ["task", "plain", "veil", "loss", "losses apart", "bound", "values apart", "bound", "covered %", ""]
    print(table(header, [row for row, _ in found]))
    print("covered: scaled, signed, moved, bare")
    return int(not all(kept for _, kept in found))


if __name__ == "__main__":
    sys.exit(main())
