"""ResNet20 on all images of a data set, with clients that augment their own images."""

from functools import partial

import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR

from benchmarks.full.augmented import AugmentedImages
from benchmarks.full.tasks import ImageTask, Run
from fedveil import CrossEntropy, Federation
from fedveil.data import Data, split
from fedveil.models import resnet
from fedveil.records.shards import count_batches


def build(run: Run, task: ImageTask, data: Data, depth: int = 20, dtype: torch.dtype = torch.float32) -> Federation:
    """Return the federation of a run, before the first round; all defences see the same augmented batches."""
    images, targets = data.train.tensor.to(dtype), data.train.targets
    parts = split(data, run.clients, seed=run.seed)
    clients = [AugmentedImages(images[rows], targets[rows], run.seed, k) for k, rows in enumerate(parts)]
    torch.manual_seed(run.seed)
    model: nn.Module = resnet(depth, images.shape[1], data.outputs).to(dtype)
    if run.defence == "rounding":
        model = model.to(memory_format=torch.channels_last)
    batch = task.batch // run.clients
    rounds = run.epochs * count_batches(max(map(len, clients)), batch)
    federation = Federation(
        model,
        clients,
        "veil" if run.defence == "veil" else "plain",
        partial(SGD, lr=task.peak, momentum=0.9, nesterov=True, weight_decay=5e-4),
        schedule=partial(OneCycleLR, max_lr=task.peak, total_steps=rounds, cycle_momentum=False),
        schedule_every="round",
        batch_size=batch,
        loss=CrossEntropy(weight=class_weights(targets, data.outputs) if task.weighted else None),
        seed=run.seed,
    )
    for client in clients:
        client.current_round = lambda: federation.round
    return federation


def class_weights(targets: Tensor, classes: int) -> tuple[float, ...]:
    """Return one weight per class, inversely proportional to its frequency; the mean over records is 1."""
    return tuple((len(targets) / (classes * targets.bincount(minlength=classes))).tolist())


def one_against_rest(targets: Tensor, probabilities: Tensor) -> float:
    """Return the AUC of each class against all others, averaged over the classes."""
    return float(roc_auc_score(targets.numpy(), probabilities.numpy(), multi_class="ovr"))
