"""How far gradients computed under torch.autocast are from those of float32, with and without a veil.

    PYTHONPATH=src python -m benchmarks.autocast

Forward runs in `torch.autocast("cpu", torch.bfloat16)`; the loss and all uploads are in float32. Each figure is
|found - true| / |true| over all parameters; true is the plain gradient of float32. In "head in float32", the layer with
additive noise is excluded from autocast. 20 batches of 16 random images, each with noise of its own.
"""

import copy
import itertools
import statistics
import sys
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedveil
from benchmarks.networks.vit import VisionTransformer
from benchmarks.timing import machine, table
from fedveil.models import resnet

BATCHES, SAMPLES, CLASSES, FACTORS = 20, 16, 10, (2.0, 4.0)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "ViT": (lambda: VisionTransformer(classes=CLASSES), 16),
    "ResNet20": (lambda: resnet(20), 32),
}
LOSSES = ("cross_entropy", "squared_error")
HEADS = {"bfloat16": False, "float32": True}


class Precise(nn.Linear):
    """A Linear layer that autocast does not convert."""

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer in float32; analysis sees no change of autocast."""
        if not torch.is_autocast_enabled("cpu"):
            return super().forward(input)
        with torch.autocast("cpu", enabled=False):
            return super().forward(input.float())


def objective(loss: str, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of a batch."""
    if loss == "cross_entropy":
        return F.cross_entropy(outputs, targets)
    return 0.5 * (outputs - F.one_hot(targets, CLASSES)).square().sum(1).mean()


def plain(model: nn.Module, loss: str, inputs: Tensor, targets: Tensor, *, rounded: bool) -> dict[str, Tensor]:
    """Return the gradients of plain autograd."""
    model = copy.deepcopy(model)
    names, parameters = zip(*model.named_parameters(), strict=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=rounded):
        outputs = model(inputs)
    gradients = torch.autograd.grad(objective(loss, outputs.float(), targets), parameters)
    return dict(zip(names, gradients, strict=True))


def distance(found: Mapping[str, Tensor], true: Mapping[str, Tensor]) -> float:
    """Return the relative distance of two gradients."""
    rest, whole = ([own[name] for name in true] for own in (found, true))
    differences = [(a - b).norm() for a, b in zip(rest, whole, strict=True)]
    return float(torch.stack(differences).norm() / torch.stack([own.norm() for own in whole]).norm())


def measure(name: str, loss: str, factor: float, *, precise: bool) -> tuple[list[float], list[float]]:
    """Return the errors of plain and of recovered gradients under autocast, one of each per batch."""
    build, size = NETWORKS[name]
    torch.manual_seed(0)
    model = build()
    if precise:
        next(own for own in [*model.modules()][::-1] if type(own) is nn.Linear).__class__ = Precise
    without, with_veil = [], []
    plan = fedveil.analyse(model, torch.zeros(2, 3, size, size))
    for number in range(BATCHES):
        draw = torch.Generator().manual_seed(number)
        inputs = torch.randn(SAMPLES, 3, size, size, generator=draw)
        targets = torch.randint(0, CLASSES, (SAMPLES,), generator=draw)
        true = plain(model, loss, inputs, targets, rounded=False)
        without.append(distance(plain(model, loss, inputs, targets, rounded=True), true))
        goals = targets if loss == "cross_entropy" else F.one_hot(targets, CLASSES).float()
        veil = fedveil.Veil(multiplicative=factor, entropy=fedveil.Entropy.for_tests(number))
        perturbation = veil.perturb(model, plan, loss)
        with torch.autocast("cpu", torch.bfloat16):
            update = fedveil.client_step(model, perturbation.broadcast, inputs, goals)
        with_veil.append(distance(perturbation.recover([update]).gradients, true))
    return without, with_veil


def main() -> int:
    """Print the table; it has no bound."""
    header = ["network", "loss", "factors", "head in", "plain median", "worst", "veil median", "worst"]
    rows = []
    for name in NETWORKS:
        for loss, factor, (head, precise) in itertools.product(LOSSES, FACTORS, HEADS.items()):
            errors = measure(name, loss, factor, precise=precise)
            figures = [f"{value:.2g}" for own in errors for value in (statistics.median(own), max(own))]
            rows.append([name, loss, f"{factor:g}", head, *figures])
    print(table(header, rows))
    print(f"\n{machine()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
