"""Evaluate reconstructions by feature distances and with an independent network trained on the private data."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from scipy.stats import binomtest
from torch import Tensor, nn
from torch.nn import functional as F

from fedveil.data import Data
from fedveil.errors import BadArgument
from fedveil.federation.checkpoint import load_keyed, save_keyed
from fedveil.federation.evaluate import evaluation_mode
from fedveil.graph.inputs import record_calls
from fedveil.progress import Progress, ignore_progress
from fedveil.records.shards import generator as source
from fedveil.studies.inversion.results import SuccessRate

BATCH, LR, DECAY = 64, 2e-3, 5e-4


def make_judge(channels: int, size: int, classes: int, width: int) -> nn.Sequential:
    """Build a network of six 3 x 3 convolutions with BatchNorm and ReLU, global average pooling and a linear head."""
    layer_plan = [
        (width, 2 if size > 32 else 1),
        (width, 1),
        (2 * width, 2),
        (2 * width, 1),
        (4 * width, 2),
        (4 * width, 1),
    ]
    layers: list[nn.Module] = []
    for out_channels, stride in layer_plan:
        conv = nn.Conv2d(channels, out_channels, 3, stride=stride, padding=1, bias=False)
        layers += [conv, nn.BatchNorm2d(out_channels), nn.ReLU()]
        channels = out_channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, classes))


def _batches(images: Tensor, targets: Tensor, random: torch.Generator, flip: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the images in shuffled batches; a batch of one image is skipped, since BatchNorm needs at least two.

    Each batch is shifted by up to an eighth of the image size, with edge padding. If `flip`, images are mirrored at
    random.
    """
    size, max_shift = images.shape[-1], images.shape[-1] // 8
    for rows in torch.split(torch.randperm(len(images), generator=random).to(images.device), BATCH):
        if len(rows) > 1:
            row_shift, column_shift = (int(torch.randint(0, 2 * max_shift + 1, (), generator=random)) for _ in range(2))
            padded_images = F.pad(images[rows], (max_shift,) * 4, mode="replicate") if max_shift else images[rows]
            batch = padded_images[:, :, row_shift : row_shift + size, column_shift : column_shift + size]
            if flip:
                is_mirrored = (torch.rand(len(rows), generator=random) < 0.5).to(images.device)
                batch = torch.where(is_mirrored.view(-1, 1, 1, 1), batch.flip(-1), batch)
            yield batch, targets[rows]


def train_judge(
    data: Data,
    epochs: int,
    *,
    width: int = 32,
    seed: int = 0,
    device: str = "cpu",
    path: Path | None = None,
    key: str = "",
    progress: Progress = ignore_progress,
) -> nn.Module:
    """Train an image classifier with cross-entropy, AdamW, cosine annealing, and shifted and mirrored images.

    Only colour images are mirrored, since mirroring changes the meaning of digits. If `path` is given, the state is
    saved there, and interrupted training resumes after the last finished epoch if `key` is the same.
    """
    images, targets = data.pixels(data.train.tensor).to(device), data.train.targets.to(device)
    classes, flip = len(data.classes), images.shape[1] == 3
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = make_judge(images.shape[1], images.shape[-1], classes, width).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), LR, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    parts: dict[str, nn.Module | torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler]
    parts = {"net": net, "optimizer": optimizer, "schedule": schedule}
    key, first_epoch = repr((key, tuple(images.shape), epochs, classes, width, flip, seed)), 0
    if path and (saved := load_keyed(path, key, images.device)):
        first_epoch = saved["epoch"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    for epoch in range(first_epoch, epochs):
        progress(epoch / epochs, f"judge, epoch {epoch + 1}/{epochs}")
        for batch, labels in _batches(images, targets, source("judge", seed, epoch), flip):
            loss = F.cross_entropy(net(batch), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        schedule.step()
        if path:
            save_keyed(path, key, {name: part.state_dict() for name, part in parts.items()} | {"epoch": epoch + 1})
    return net.eval()


def outputs_and_features(model: nn.Module, inputs: Tensor, *, batch_size: int = 500) -> tuple[Tensor, Tensor]:
    """Return the outputs and the features, which are the flattened input of the last module with parameters."""
    modules = [m for m in model.modules() if not m._modules and next(m.parameters(recurse=False), None) is not None]
    outputs, features = [], []
    with torch.no_grad(), evaluation_mode(model), record_calls(modules) as calls:
        for part in torch.split(inputs, batch_size):
            outputs.append(model(part))
            if not calls:
                raise BadArgument("features", "the model does not call any module with parameters")
            features.append(calls[-1].first_input.flatten(1))
            calls.clear()
    return torch.cat(outputs), torch.cat(features)


def distances(
    features: Tensor, labels: Tensor, private_features: Tensor, targets: Tensor, *, same_class: bool = True
) -> tuple[float, float]:
    """Return the mean squared feature distances to the class centroid and to the nearest private image.

    `features` and `labels` are the features and classes of the reconstructions; `private_features` and `targets` are
    the features and classes of the private training images. If `same_class`, the nearest image must have the same
    class, as in GMI; otherwise it may have any class, as in the paper.
    """
    features, private_features = features.double(), private_features.double()
    centroid, nearest = [], []
    for label in sorted(set(labels.tolist())):
        class_features, class_images = features[labels == label], private_features[targets == label]
        centroid.append((class_features - class_images.mean(0)).square().sum(1))
        nearest.append(torch.cdist(class_features, class_images if same_class else private_features).amin(1).square())
    return float(torch.cat(centroid).mean()), float(torch.cat(nearest).mean())


def per_class(answers: Tensor, labels: Tensor, classes: int) -> list[float | None]:
    """Return the accuracy for each class; None for a class without images."""
    correct = [(answers[labels == label] == label).double() for label in range(classes)]
    return [float(hits.mean()) if len(hits) else None for hits in correct]


def wilson(is_hit: Tensor) -> tuple[float, float, float, int, int]:
    """Return the hit rate, its 95 % Wilson interval (for independent trials), and the number of hits and of trials."""
    hits, trials = int(is_hit.sum()), len(is_hit)
    interval = binomtest(hits, trials).proportion_ci(0.95, "wilson")
    return hits / trials, float(interval.low), float(interval.high), hits, trials


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Evaluates reconstructions with a judge, given the features that it extracts from the private images."""

    data: Data
    judge: nn.Module
    private_features: Tensor  # features of the private training images, divided by their mean norm
    norm: float  # mean norm of the features, before the division
    device: torch.device

    def evaluate(self, images: Tensor, labels: Tensor) -> SuccessRate:
        """Return the success rate according to the judge, and distances in its normalised features."""
        outputs, features = outputs_and_features(self.judge, images)
        targets = self.data.train.targets.to(self.device)
        feature_distances = distances(features / self.norm, labels, self.private_features, targets)
        answers = outputs.argmax(1)
        by_class, is_hit = per_class(answers, labels, len(self.data.classes)), answers == labels
        return SuccessRate(
            *wilson(is_hit), *feature_distances, by_class, is_hit.long().tolist(), sample_size=len(is_hit)
        )

    def evaluate_by(self, models: Sequence[nn.Module], images: Tensor, labels: Tensor) -> SuccessRate:
        """Return the success rate and distances according to the attacked models (the paper's protocol).

        The nearest image may have any class. Each model judges an equal part of the images, and distances are averaged
        over models.
        """
        is_hit, all_distances = [], []
        targets = self.data.train.targets.to(self.device)
        parts = zip(images.chunk(len(models)), labels.chunk(len(models)), strict=True)
        for model, (part, classes) in zip(models, parts, strict=True):
            outputs, features = outputs_and_features(model, self.data.standardise(part))
            _, private_features = outputs_and_features(model, self.data.train.tensor.to(self.device))
            all_distances.append(distances(features, classes, private_features, targets, same_class=False))
            is_hit.append(outputs.argmax(1) == classes)
        centroid, nearest = (sum(values) / len(models) for values in zip(*all_distances, strict=True))
        return SuccessRate(*wilson(torch.cat(is_hit)), centroid, nearest, sample_size=len(labels))
