"""The protections, the data sets, and the federation for each pair of them."""

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from benchmarks.patches import WIDTH, features
from fedveil import Federation, Privacy
from fedveil.data import Data, load
from fedveil.models import mlp
from fedveil.records.shards import generator

CLIENTS = 5
EPSILONS = (None, 8.0, 3.0, 1.0)
DELTA = 1e-5
Records = tuple[Tensor, Tensor]  # inputs, targets


@dataclass(frozen=True)
class Protection:
    """A combination of the three layers; `epsilon` is the budget per record, None without differential privacy."""

    veil: bool = False
    secure: bool = False
    epsilon: float | None = None

    @property
    def label(self) -> str:
        """The name of the combination, as tables show it."""
        parts = ["veil"] * self.veil + ["secure aggregation"] * self.secure
        parts += [f"DP {self.epsilon:g}"] if self.epsilon is not None else []
        return " + ".join(parts) or "none"

    @property
    def slug(self) -> str:
        """The name for a file."""
        return self.label.replace(" + ", "-").replace(" ", "-").lower()


NONE, VEIL = Protection(), Protection(veil=True)
COMBINED = 3.0  # the epsilon at which differential privacy is combined with other layers
PROTECTIONS = (
    *(Protection(veil, secure) for secure, veil in itertools.product((False, True), (False, True))),
    *(Protection(epsilon=epsilon) for epsilon in EPSILONS if epsilon is not None),
    *(Protection(veil, secure, COMBINED) for secure, veil in ((False, True), (True, False), (True, True))),
)


@dataclass(frozen=True)
class Task:
    """A data set and how it is trained, here and in `benchmarks.budgets`, whose documentation says what was tuned."""

    outputs: int
    hidden: int  # units; 0: a linear model
    loss: str
    metric: str
    rate: float
    rounds: int
    clip: float
    lr: float
    plain_lr: float | None = None  # without clipping, if it differs
    momentum: float | None = None  # of SGD; None: Adam
    patches: bool = False  # the inputs are `benchmarks.patches.features`
    records: int | None = None  # `benchmarks.protections` uses the first ones only
    most_seeds: int = 100

    def optimizer(self, private: bool) -> Callable[[Iterable[Tensor]], torch.optim.Optimizer]:
        """Return a function that makes an optimizer for parameters."""
        lr = self.lr if private or self.plain_lr is None else self.plain_lr
        if self.momentum is None:
            return partial(torch.optim.Adam, lr=lr)
        return partial(torch.optim.SGD, lr=lr, momentum=self.momentum)


TASKS = {
    "digits": Task(10, 100, "cross_entropy", "accuracy", 0.5, 150, 0.5, 0.02),
    "bank": Task(1, 50, "binary_cross_entropy", "auc", 0.05, 600, 1.0, 0.01),
    "cifar10": Task(
        outputs=10,
        hidden=0,
        loss="cross_entropy",
        metric="accuracy",
        rate=1.0,
        rounds=60,
        clip=1.9,
        lr=1.7,
        plain_lr=0.1,
        momentum=0.9,
        patches=True,
    ),
    "cifar10-mlp": Task(10, 50, "cross_entropy", "accuracy", 0.1, 200, 1.0, 0.003, records=10_000, most_seeds=3),
}


@cache
def records(name: str, whole: bool = False) -> Data:
    """Load a data set, reduced and with features as its task says; `whole` has all records."""
    data, task = load(name.partition("-")[0]), TASKS[name]
    parts = [data.train, data.test]
    if task.records is not None and not whole:
        parts = [part.take(torch.arange(min(task.records, len(part.targets)))) for part in parts]
    if data.name == "cifar10":
        parts = [
            part._replace(inputs=features(part.tensor) if task.patches else part.tensor.flatten(1)) for part in parts
        ]
    return replace(data, train=parts[0], test=parts[1])


def new_model(name: str, seed: int) -> nn.Module:
    """Return an MLP with one hidden layer and new weights, or GroupNorm and a linear layer of zeros without a bias."""
    task = TASKS[name]
    inputs = WIDTH if task.patches else records(name).train.tensor.shape[1]
    if not task.hidden:
        linear = nn.Linear(inputs, task.outputs, bias=False)  # with a bias, its learning rate diverges
        nn.init.zeros_(linear.weight)
        return nn.Sequential(nn.GroupNorm(1, inputs, affine=False), linear)  # the norm depends on one record only
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return mlp(inputs, task.outputs, hidden=task.hidden, layers=1)


def divide(chosen: Tensor, seed: int) -> list[Tensor]:
    """Divide indices of records among the clients, in equal parts at random."""
    order = torch.randperm(len(chosen), generator=generator("protections", seed))
    return [chosen[part] for part in order.tensor_split(CLIENTS)]


@cache
def noise_multiplier(name: str, epsilon: float) -> float:
    """Return the noise that a run needs for a budget."""
    task = TASKS[name]
    noise = Privacy(epsilon=epsilon, delta=DELTA, rounds=task.rounds, rate=task.rate).resolve(task.rate).noise
    assert noise is not None
    return noise


def make_privacy(name: str, protection: Protection, **changes: float) -> Privacy | None:
    """Return the settings of differential privacy; under secure aggregation clients add the noise."""
    if protection.epsilon is None:
        return None
    own = Privacy(
        noise=noise_multiplier(name, protection.epsilon),
        delta=DELTA,
        rate=TASKS[name].rate,
        clip=TASKS[name].clip,
        noise_by="clients" if protection.secure else "server",
    )
    return replace(own, **changes)


def make_federation(
    name: str,
    protection: Protection,
    seed: int,
    chosen: Tensor | None = None,
    *,
    fuse: bool = True,
) -> Federation:
    """Return a federation of five clients, by default with all training records."""
    task, train = TASKS[name], records(name).train
    parts = divide(torch.arange(len(train.targets)) if chosen is None else chosen, seed)
    return federation_of(
        name,
        protection,
        new_model(name, seed),
        [(train.tensor[rows], train.targets[rows]) for rows in parts],
        batch_size=max(1, round(task.rate * len(parts[0]))),
        privacy=make_privacy(name, protection),
        fuse=fuse,
        seed=seed,
    )


def federation_of(
    name: str,
    protection: Protection,
    model: nn.Module,
    clients: Sequence[Records],
    *,
    batch_size: int,
    privacy: Privacy | None,
    fuse: bool,
    seed: int,
) -> Federation:
    """Return a federation with the task's loss, optimizer and schedule."""
    task = TASKS[name]
    return Federation(
        model,
        clients,
        "veil" if protection.veil else "plain",
        task.optimizer(privacy is not None),
        loss=task.loss,
        schedule=partial(CosineAnnealingLR, T_max=task.rounds),
        schedule_every="round",
        batch_size=batch_size,
        privacy=privacy,
        secure_aggregation=protection.secure,
        fuse=fuse,
        seed=seed,
    )


@cache
def trained_model(name: str, epsilon: float | None, seed: int) -> nn.Module:
    """Train without a veil and without secure aggregation, which would give the same model up to rounding."""
    federation = make_federation(name, Protection(epsilon=epsilon), seed)
    federation.fit(rounds=TASKS[name].rounds)
    return copy.deepcopy(federation.model)
