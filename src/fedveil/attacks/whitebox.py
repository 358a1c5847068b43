"""The white-box membership attack of Nasr et al. (2019): a network that detects members from hidden outputs."""

import copy
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedveil.attacks.scores import balanced_accuracy
from fedveil.errors import BadArgument
from fedveil.records.shards import generator

Features = Mapping[str, Tensor]  # features by name; the first dimension is the record
Score = Callable[[Features], Tensor]
BRANCH_OUTPUTS = 64  # number of outputs of a branch
HIDDEN_WIDTHS = {"label": 128}  # width of a branch's hidden layer; all other branches use 100
INIT_STD = 0.01  # standard deviation of the initial weights
KERNELS = 100  # number of kernels in a branch for gradients, sequences or maps
DROPOUT = 0.5  # dropout rate for a map's pixels and for the outputs of its kernels


@dataclass(frozen=True, eq=False)
class TrainedNetwork:
    """The attack network after the first epoch with the best accuracy on the validation records."""

    score: Score  # maps features to one score per record, between 0 and 1; larger scores indicate members
    held_out: tuple[Tensor, Tensor]  # scores of the validation members and others, used to choose a threshold
    epoch: int  # index of the chosen epoch
    collapsed: bool  # whether the network makes the same prediction for all of its training records


class MembershipNetwork(nn.Module):
    """One branch per feature, and an encoder with 256, 128, 64 and 1 units that combines the branches.

    The branches follow the authors' code: 100-64 units for layer outputs and the loss, 128-64 for the label, and, for
    maps, kernels as large as the map, with dropout. Two branches are smaller here, since the attackers know few
    records. Maps have 100 kernels, 64 units and dropout 0.5 (originally one kernel per channel, 1024-512-128-64 units
    and 0.2). Gradients have 100 kernels as wide as a row, and 256-64 units (originally 2024-512-256). Sequences use the
    branch for gradients, with steps as rows.
    """

    def __init__(self, features: Features, rng: torch.Generator) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({name: _branch(name, values) for name, values in features.items()})
        hidden_layers = _dense(BRANCH_OUTPUTS * len(features), 256, 128, 64)
        self.encoder = nn.Sequential(*hidden_layers, nn.Linear(64, 1), nn.Sigmoid())
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0, INIT_STD, generator=rng)
                nn.init.zeros_(module.bias)

    def forward(self, features: Features) -> Tensor:
        """Return the predicted probability of being a member."""
        branch_outputs = torch.cat([branch(features[name]) for name, branch in self.branches.items()], 1)
        result: Tensor = self.encoder(branch_outputs).squeeze(1)
        return result


def _dense(*widths: int) -> list[nn.Module]:
    """Return Linear layers with these widths, each followed by a ReLU."""
    return [
        module for inputs, outputs in itertools.pairwise(widths) for module in (nn.Linear(inputs, outputs), nn.ReLU())
    ]


def _branch(name: str, values: Tensor) -> nn.Module:
    if values.dim() == 4:
        kernels = [nn.Flatten(), nn.Dropout(DROPOUT), *_dense(values[0].numel(), KERNELS)]
        return nn.Sequential(*kernels, nn.Dropout(DROPOUT), *_dense(KERNELS, BRANCH_OUTPUTS))
    if values.dim() == 3:
        rows, columns = values.shape[1:]
        return nn.Sequential(*_dense(columns, KERNELS), nn.Flatten(), *_dense(rows * KERNELS, 256, BRANCH_OUTPUTS))
    return nn.Sequential(*_dense(values.shape[1], HIDDEN_WIDTHS.get(name, 100), BRANCH_OUTPUTS))


def select(features: Features, rows: Tensor | slice) -> dict[str, Tensor]:
    """Return the features of some records."""
    return {name: values[rows] for name, values in features.items()}


def make_standardiser(reference: Features, device: str = "cpu") -> Callable[[Features], dict[str, Tensor]]:
    """Return a function that scales features to mean 0 and standard deviation 1; constant features become 0.

    The means and deviations are computed over the records of `reference`; for maps, also over pixels. The result is not
    affected by factors that multiply a unit or channel, such as the noise of a veil. Features that are not in
    `reference` are dropped.
    """
    dims = {name: (0, 2, 3) if values.dim() == 4 else (0,) for name, values in reference.items()}
    means, scales = (
        {name: moment(v, dims[name], keepdim=True) for name, v in reference.items()}
        for moment in (torch.mean, torch.std)
    )
    is_varying = {
        n: scales[n] > torch.finfo(v.dtype).eps * v.abs().amax(dims[n], True) * 10 for n, v in reference.items()
    }
    return lambda features: {
        name: torch.where(is_varying[name], (features[name] - means[name]) / scales[name], 0.0).float().to(device)
        for name in reference
    }


@dataclass(frozen=True)
class Recipe:
    """Settings for training the attack network; `validation` is the fraction of records used to choose the epoch."""

    epochs: int = 100
    lr: float = 1e-3
    batch_size: int = 64
    validation: float = 0.25
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 2 or not 0 < self.validation < 1:
            message = (
                f"got {self.epochs} epochs, batch size {self.batch_size} and validation fraction {self.validation}"
            )
            fix = "use at least 1 epoch, a batch size of at least 2, and a fraction between 0 and 1"
            raise BadArgument("attack network", message, fix)


def train_attack(
    members: Features,
    others: Features,
    *,
    recipe: Recipe | None = None,
    on_epoch: Callable[[int, Score], None] = lambda epoch, score: None,
) -> TrainedNetwork:
    """Train a network on records with known membership, and keep the epoch with the best validation accuracy.

    Training minimises the squared error to the targets 1 (members) and 0 (others) with Adam, on standardised features.
    Half of each batch consists of members. After each epoch, `on_epoch` is called with its index and a score function.

    There are two differences from Nasr et al.: the epoch is chosen on records held out from training instead of the
    test records; and the learning rate is the default of their code, 1e-3, since the paper's 1e-4 learns less from few
    records.
    """
    recipe = recipe or Recipe()
    rng = generator("attack network", recipe.seed)
    held_out, training_features = _split(members, others, recipe.validation, rng)
    standardise = make_standardiser(training_features, recipe.device)
    inputs = standardise(training_features)
    network = MembershipNetwork(inputs, rng).to(recipe.device)

    @torch.no_grad()
    def score(features: Features) -> Tensor:
        result: Tensor = network(standardise(features))
        return result.double().cpu()

    best = -1.0
    optimizer = torch.optim.Adam(network.parameters(), recipe.lr)
    for epoch_index in range(recipe.epochs):
        with torch.random.fork_rng():  # dropout does not accept a generator
            torch.manual_seed(int(torch.randint(2**62, (1,), generator=rng)))
            _train_epoch(network, inputs, optimizer, recipe.batch_size, rng)
        with torch.no_grad():
            predictions = network(inputs) > 0.5
        validation = balanced_accuracy(score(held_out[0]), score(held_out[1]), 0.5).value
        on_epoch(epoch_index, score)
        if validation > best:
            best, epoch, collapsed = validation, epoch_index, len(predictions.unique()) == 1
            values = copy.deepcopy(network.state_dict())
    network.load_state_dict(values)
    return TrainedNetwork(score, (score(held_out[0]), score(held_out[1])), epoch, collapsed)


def _split(
    members: Features, others: Features, fraction: float, rng: torch.Generator
) -> tuple[tuple[Features, Features], Features]:
    """Select equally many members and others, hold out a fraction of each, and concatenate the rest, members first."""
    sizes = [len(next(iter(part.values()))) for part in (members, others)]
    count = min(sizes)
    num_held_out = round(fraction * count)
    if num_held_out < 2 or count - num_held_out < 2:
        raise BadArgument("attack network", f"only {count} records of each group are known", "use more records")
    member_rows, other_rows = (torch.randperm(size, generator=rng)[:count] for size in sizes)
    training_features = {
        name: torch.cat([members[name][member_rows[num_held_out:]], others[name][other_rows[num_held_out:]]])
        for name in members
    }
    return (select(members, member_rows[:num_held_out]), select(others, other_rows[:num_held_out])), training_features


def _train_epoch(
    network: MembershipNetwork, inputs: Features, optimizer: torch.optim.Optimizer, size: int, rng: torch.Generator
) -> None:
    """Train on every record once; the first half of the records are members."""
    network.train()
    num_members = len(next(iter(inputs.values()))) // 2
    member_rows, other_rows = (torch.randperm(num_members, generator=rng) + start for start in (0, num_members))
    for members, others in zip(torch.split(member_rows, size // 2), torch.split(other_rows, size // 2), strict=True):
        rows = torch.cat([members, others])
        predictions = network(select(inputs, rows))
        labels = (rows < num_members).to(predictions)
        optimizer.zero_grad()
        (predictions - labels).square().mean().backward()
        optimizer.step()
    network.eval()
