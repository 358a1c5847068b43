"""Who says what a reconstruction shows: a network of its own that knows the private data, and distances of features."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedveil.data import Data
from fedveil.errors import BadArgument
from fedveil.federation.checkpoint import load_for, save_for
from fedveil.federation.evaluate import evaluating
from fedveil.federation.shards import generator as source
from fedveil.studies.jobs import Tell

BATCH, LR, DECAY = 64, 2e-3, 5e-4


def make_judge(channels: int, size: int, classes: int, width: int) -> nn.Sequential:
    """Six 3 x 3 convolutions with BatchNorm and ReLU, global mean, a linear head: wider than what is attacked."""
    first = 2 if size > 32 else 1
    plan = [(channels, width, first), (width, width, 1), (width, 2 * width, 2), (2 * width, 2 * width, 1)]
    plan += [(2 * width, 4 * width, 2), (4 * width, 4 * width, 1)]
    layers: list[nn.Module] = []
    for before, after, stride in plan:
        conv = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        layers += [conv, nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, classes))


def _varied(images: Tensor, random: torch.Generator, *, flip: bool) -> Tensor:
    """The batch moved by up to an eighth of its side, the gap filled with the edge, and perhaps mirrored."""
    most = images.shape[-1] // 8
    down, right = (int(torch.randint(0, 2 * most + 1, (), generator=random)) for _ in range(2))
    size = images.shape[-1]
    padded = F.pad(images, (most,) * 4, mode="replicate") if most else images
    moved = padded[:, :, down : down + size, right : right + size]
    if not flip:
        return moved
    mirrored = (torch.rand(len(images), generator=random) < 0.5).to(images.device)
    return torch.where(mirrored.view(-1, 1, 1, 1), moved.flip(-1), moved)


def train_judge(
    images: Tensor,
    targets: Tensor,
    epochs: int,
    *,
    classes: int,
    width: int = 32,
    flip: bool = True,
    seed: int = 0,
    path: Path | None = None,
    asked: str = "",
    tell: Tell = lambda share, what: None,
) -> nn.Module:
    """A classifier of pixels by cross-entropy: AdamW, the learning rate on a half cosine, moved and mirrored images.

    A batch moves together, an image is mirrored for itself. With `path`, a training that was stopped goes on from its
    last epoch, if what `asked` stands for is the same.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = make_judge(images.shape[1], images.shape[-1], classes, width).to(images.device)
    optimizer = torch.optim.AdamW(net.parameters(), LR, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    key, begin = repr((asked, tuple(images.shape), epochs, classes, width, flip, seed)), 0
    old = load_for(path, key, images.device) if path else None
    if old:
        net.load_state_dict(old["net"])
        optimizer.load_state_dict(old["optimizer"])
        schedule.load_state_dict(old["schedule"])
        begin = old["epoch"]
    for epoch in range(begin, epochs):
        tell(epoch / epochs, f"judge, epoch {epoch + 1}/{epochs}")
        _one_epoch(net, optimizer, images, targets, source("judge", seed, epoch), flip=flip)
        schedule.step()
        if path:
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
            save_for(path, key, {**state, "epoch": epoch + 1})
    return net.eval()


def _one_epoch(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    targets: Tensor,
    random: torch.Generator,
    *,
    flip: bool,
) -> None:
    """Once through the images; a last one that is alone is left out, since statistics of a batch need two."""
    net.train()
    order = torch.randperm(len(images), generator=random).to(images.device)
    for rows in torch.split(order, BATCH):
        if len(rows) > 1:
            loss = F.cross_entropy(net(_varied(images[rows], random, flip=flip)), targets[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def look(model: nn.Module, inputs: Tensor, *, batch_size: int = 500) -> tuple[Tensor, Tensor]:
    """Outputs, and features: what goes into the module with parameters that is called last, flat; no gradients."""
    leaves = [m for m in model.modules() if not m._modules and next(m.parameters(recurse=False), None) is not None]
    last: list[Tensor] = []

    def note(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        last[:] = [given[0].detach()]

    hooks = [leaf.register_forward_pre_hook(note) for leaf in leaves]
    outputs, features = [], []
    try:
        with torch.no_grad(), evaluating(model):
            for part in torch.split(inputs, batch_size):
                outputs.append(model(part))
                if not last:
                    raise BadArgument("features", "the model calls no module with parameters of its own")
                features.append(last[0].flatten(1))
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat(outputs), torch.cat(features)


@dataclass(frozen=True)
class Distances:
    """Mean squared L2 distances of features: to the centroid of the wanted class, and to the nearest training image."""

    centroid: float
    nearest: float


def distances(found: Tensor, wanted: Tensor, known: Tensor, targets: Tensor, *, same_class: bool = True) -> Distances:
    """How far features of reconstructions are from features of the private training images.

    Args:
        found: features of the reconstructions.
        wanted: their classes.
        known: features of the training images.
        targets: their classes.
        same_class: the nearest image of the wanted class, as in GMI; else of all, as the paper says.
    """
    found, known = found.double(), known.double()
    centroid, nearest = [], []
    for label in sorted(set(wanted.tolist())):
        own, class_images = found[wanted == label], known[targets == label]
        centroid.append((own - class_images.mean(0)).square().sum(1))
        nearest.append(torch.cdist(own, class_images if same_class else known).amin(1).square())
    return Distances(float(torch.cat(centroid).mean()), float(torch.cat(nearest).mean()))


def per_class(answers: Tensor, wanted: Tensor, classes: int) -> list[float | None]:
    """For each class the share of its images that is answered right; None without any image."""
    rights = [(answers[wanted == label] == label).double() for label in range(classes)]
    return [float(right.mean()) if len(right) else None for right in rights]


def wilson(right: Tensor) -> dict[str, Any]:
    """A share with Wilson's 95 % interval (Wilson 1927).

    (p + z^2 / 2n  -+  z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n),  z = 1.96, for trials that do not depend on
    one another.
    """
    n, z = len(right), NormalDist().inv_cdf(0.975)
    p = float(right.double().mean())
    middle = p + z * z / (2 * n)
    around = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = ((middle + sign * around) / (1 + z * z / n) for sign in (-1, 1))
    hits = int(right.sum())
    return {"value": p, "low": low if hits else 0.0, "high": high if hits < n else 1.0, "hits": hits, "trials": n}


@dataclass(frozen=True, eq=False)
class Bench:
    """What the experimenter measures with: private images as pixels and as inputs, and the judge's view of them."""

    data: Data
    judge: nn.Module
    known: Tensor  # the judge's features of the training images, divided by their mean norm
    norm: float
    device: torch.device

    def judged(self, images: Tensor, wanted: Tensor) -> dict[str, Any]:
        """Success by the judge, with distances of its features after division by the mean norm of the real ones."""
        outputs, features = look(self.judge, images)
        far = distances(features / self.norm, wanted, self.known, self.data.train.targets.to(self.device))
        answers = outputs.argmax(1)
        share = per_class(answers, wanted, len(self.data.classes))
        right = (answers == wanted).long().tolist()
        return {**wilson(answers == wanted), "right": right, "per_class": share, **dataclasses.asdict(far)}

    def self_judged(self, models: Sequence[nn.Module], images: Tensor, wanted: Tensor) -> dict[str, Any]:
        """The paper's protocol: success by the attacked model, distances in its features, nearest of all classes.

        Of several models each judges its part of the images, as many as every other; distances are the mean.
        """
        right, far = [], []
        targets = self.data.train.targets.to(self.device)
        parts = zip(images.chunk(len(models)), wanted.chunk(len(models)), strict=True)
        for model, (part, labels) in zip(models, parts, strict=True):
            outputs, features = look(model, self.data.scaled(part))
            _, known = look(model, self.data.train.tensor.to(self.device))
            far.append(distances(features, labels, known, targets, same_class=False))
            right.append(outputs.argmax(1) == labels)
        mean = {name: sum(getattr(d, name) for d in far) / len(far) for name in ("centroid", "nearest")}
        return {**wilson(torch.cat(right)), **mean}
