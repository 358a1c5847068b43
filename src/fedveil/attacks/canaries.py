"""Measure the epsilon of private training with canaries, records whose gradients use separate coordinates.

The defence under test treats a canary like any other record: it samples the canary, computes and clips its gradient,
and adds noise. A wrapper around the model confines this gradient to a single coordinate that no other record affects:

    canary j:         outputs = constant + (w_j - detach(w_j)) direction,   so d loss / d w_j = norm; the rest is 0
    null record:      outputs = constant,                                   so the gradient is 0
    any other record: outputs = model(inputs)

The outputs do not depend on the value of w, so the gradients of canaries are the same in every round. Each canary is
replaced by a null record with probability 1/2, as in the accountant's definition of neighbours. From coordinate w_j of
the noisy gradients of all rounds, the auditor guesses which canaries were replaced.
"""

import copy
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedveil.checks import check_count
from fedveil.defences.interface import AnyDefence
from fedveil.defences.registry import add_privacy
from fedveil.errors import BadArgument
from fedveil.federation.local import BATCH_SIZE, Federation
from fedveil.federation.prepare import Optimizer
from fedveil.federation.targets import default_loss, one_output, target_maker
from fedveil.privacy.measure import MeasuredEpsilon, measure
from fedveil.records.inputs import Inputs, map_tensors
from fedveil.records.sources import Source, UserRecords, as_source, check_sources, choose_batch_size, list_clients
from fedveil.scheme.losses import Function, Loss, find_loss
from fedveil.scheme.outputs import head_axis, output_gradient

if TYPE_CHECKING:
    from fedveil.privacy import Privacy

WHERE = "measure_epsilon"
CANARY_OUTPUTS = (0.5, 0.25)  # outputs for canaries; for any target, the loss has a nonzero derivative at one of them
DEFAULT_NORM = 1e4  # norm of a canary's gradient if the clipping norm is unknown
RELATIVE_NORM = 10.0  # norm of a canary's gradient, relative to the clipping norm
GUESS_FRACTION = 0.5  # number of guesses / number of canaries
DEFAULT_CANARIES = 3000  # with more canaries, the bound is looser at delta = 1e-5
MARK_NAME = "canary_mark"  # input that marks each record as RECORD, NULL, or FIRST + the index of its canary
RECORD, NULL, FIRST = 0, 1, 2
Order = Callable[[int, int], Tensor]


class CanaryModel(nn.Module):
    """A model with one extra parameter per canary; the values of these parameters do not affect its outputs.

    Args:
        module: the model.
        count: number of canaries.
        constant: outputs for canaries and null records.
        direction: change in the outputs along which a canary's loss has the slope `norm` (see `wrap_model`).
    """

    direction: Tensor

    def __init__(self, module: nn.Module, count: int, constant: float, direction: Tensor) -> None:
        super().__init__()
        self.module, self.constant = module, constant
        self.canaries = nn.Parameter(direction.new_zeros(count))
        self.register_buffer("direction", direction)

    def forward(self, canary_mark: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Return the model's outputs for ordinary records, and the constant for canaries and null records."""
        outputs: Tensor = self.module(*args, **kwargs)
        canary_values = self.canaries[(canary_mark - FIRST).clamp(min=0)] * (canary_mark >= FIRST)
        shape = (-1, *[1] * (outputs.dim() - 1))
        canary_outputs = self.constant + (canary_values - canary_values.detach()).view(shape) * self.direction
        return torch.where(canary_mark.view(shape) == RECORD, outputs, canary_outputs)


def plant(source: Source, marks: Tensor, target: Tensor) -> tuple[Inputs, Tensor]:
    """Append one record per mark to a client's records; the added records have the same inputs and target."""
    inputs, targets = source.take(range(len(source)))

    def extend(tensor: Tensor, value: Tensor) -> Tensor:
        return torch.cat([tensor, value.expand(len(marks), *tensor.shape[1:])])

    inputs = map_tensors(lambda tensor: extend(tensor, tensor[:1]), inputs)
    targets, all_marks = extend(targets, target), torch.cat([torch.full((len(source),), RECORD), marks])
    if isinstance(inputs, Mapping):
        return {MARK_NAME: all_marks, **inputs}, targets
    return (all_marks, inputs) if isinstance(inputs, Tensor) else (all_marks, *inputs), targets


def wrap_model(model: nn.Module, loss: Loss, source: Source, count: int, norm: float) -> CanaryModel:
    """Wrap a copy of the model, with canaries that have the same target as the first record."""
    parameter = next(model.parameters())
    inputs, targets = source.take([0])
    true_targets = target_maker(model, loss, (inputs, targets))(targets)
    true_targets = true_targets.to(parameter.dtype) if true_targets.is_floating_point() else true_targets
    outputs = one_output(model, inputs).detach().to(parameter.dtype)
    slopes = {
        value: output_gradient(loss, torch.full_like(outputs, value), true_targets, head_axis(model))
        for value in CANARY_OUTPUTS
    }
    constant = max(slopes, key=lambda value: float(slopes[value].norm().nan_to_num(0.0, 0.0)))
    slope_norm = slopes[constant].norm()
    if not slope_norm > 0 or not slope_norm.isfinite():
        raise BadArgument(WHERE, f"canaries have no effect, because the gradient of {loss.name} is 0 or not finite")
    direction = norm * slopes[constant][0] / slope_norm**2
    return CanaryModel(copy.deepcopy(model), count, constant, direction.to(parameter.device))


def measure_epsilon(
    model: nn.Module,
    clients: Sequence[UserRecords],
    defence: str | AnyDefence = "plain",
    optimizer: Optimizer = torch.optim.Adam,
    *,
    privacy: "Privacy | None" = None,
    rounds: int | None = None,
    claimed: float | None = None,
    delta: float = 1e-5,
    loss: str | Loss | Function | None = None,
    batch_size: int | None = None,
    whole_shard: bool = False,
    participation: float = 1.0,
    secure_aggregation: bool = False,
    order: Order | None = None,
    canaries: int = DEFAULT_CANARIES,
    seed: int = 0,
    progress: Callable[[int, int], object] | None = None,
) -> MeasuredEpsilon:
    """Train once with canaries among the records, and return a lower bound on the true epsilon of records.

    The number of canaries, the number of guesses (half as many) and the auditor's decision rule are fixed before
    training (Steinke, Nasr and Jagielski, arXiv 2305.08846). The bound detects wrong sampling, clipping, noise and
    accounting. It does not test whether the gradients of ordinary records are correct. A bound below the claim does not
    prove the claim.

    Args:
        model: the model; only a copy is trained.
        clients: the clients' records, in the forms that `fedveil.Federation` accepts; they are read into memory.
        defence: the defence under test, or the one that `privacy` protects. A defence from another package needs
            `claimed`, or a server with an `accountant` that has a method `epsilon()` and an attribute `delta`.
        optimizer: see `fedveil.Federation`.
        privacy: differential privacy for records.
        rounds: number of rounds for which epsilon is claimed; by default `privacy.rounds`.
        claimed: the claimed epsilon; by default the accountant's epsilon.
        delta: the delta of `claimed`; if `claimed` is None, the accountant's delta is used.
        loss: see `fedveil.Federation`.
        batch_size: see `fedveil.Federation`. It is scaled up so that a record is as likely to be in a batch as it
            would be without canaries.
        whole_shard: see `fedveil.Federation`.
        participation: see `fedveil.Federation`.
        secure_aggregation: see `fedveil.Federation`.
        order: a function (client, round) -> indices of the records that the client uses in this round, if an adversary
            knows them; canaries come after the client's own records. By default, the order is known if the defence
            leaves the choice of records to the federation, which shuffles them with a seed.
        canaries: number of canaries.
        seed: see `fedveil.Federation`; the included canaries are always chosen at random.
        progress: function to call with the number of completed rounds and the total number of rounds.
    """
    num_canaries = check_count(WHERE, "canaries", canaries, 10)
    rounds = rounds if rounds is not None or privacy is None else privacy.rounds
    if rounds is None:
        raise BadArgument(WHERE, "the number of rounds is missing", "pass rounds=")
    check_count(WHERE, "rounds", rounds)
    sources = check_sources([as_source(f"client {k}", client) for k, client in enumerate(list_clients(clients))])
    size, max_size = choose_batch_size(clients, batch_size, BATCH_SIZE), max(map(len, sources))
    if privacy is not None:
        defence = add_privacy(defence, privacy, 1.0 if whole_shard else min(1.0, size / max_size))
    loss_function = find_loss(
        default_loss(one_output(model, sources[0].take([0])[0]), sources) if loss is None else loss
    )
    norm = DEFAULT_NORM if privacy is None else RELATIVE_NORM * privacy.clip
    is_included = np.random.default_rng(secrets.randbits(128)).random(num_canaries) < 0.5
    marks = torch.where(torch.from_numpy(is_included), torch.arange(num_canaries) + FIRST, NULL)
    target, client_indices = sources[0].take([0])[1], torch.arange(num_canaries) % len(sources)
    client_records = [plant(source, marks[client_indices == k], target) for k, source in enumerate(sources)]
    federation = Federation(
        wrap_model(model, loss_function, sources[0], num_canaries, norm),
        client_records,
        defence,
        optimizer,
        loss=loss_function,
        batch_size=round(size * max(len(targets) for _, targets in client_records) / max_size),
        whole_shard=whole_shard,
        participation=participation,
        secure_aggregation=secure_aggregation,
        seed=seed,
    )
    accountant = federation.defence_server.accountant
    if federation.defence.dp_clip is not None or (accountant is None and claimed is None):
        message = "epsilon is measured for records, but this defence does not protect individual records"
        raise BadArgument(WHERE, message, "pass privacy=fedveil.Privacy(epsilon=3.0, rounds=150), or claimed=3.0")
    scores = _collect_scores(federation, rounds, num_canaries, order, progress)
    if accountant is not None and claimed is None:
        claimed, delta = accountant.epsilon(), accountant.delta
    assert claimed is not None
    return measure(scores, is_included, claimed, delta, int(GUESS_FRACTION * num_canaries))


def _collect_scores(
    federation: Federation, rounds: int, count: int, order: Order | None, progress: Callable[[int, int], object] | None
) -> NDArray[np.float64]:
    """Train, and return each canary's noisy coordinate, summed over the rounds that may have used the canary."""
    shards, scores = federation.shards, torch.zeros(count, dtype=torch.float64)
    clients = range(len(shards.sizes))
    if order is None and not federation.whole_shard and federation.clients.client.sample(1) is None:
        order = lambda client, round_index: shards.rows(client, round_index) - shards.starts[client]  # noqa: E731
    for round_index in range(rounds):
        coordinates = federation.step().gradients["canaries"].cpu().double()
        if order is not None:
            for client in clients:
                canaries = torch.arange(client, count, len(clients))  # the last records of the client
                rows = shards.sizes[client] - len(canaries) + torch.arange(len(canaries))
                coordinates[canaries] *= torch.isin(rows, order(client, round_index))
        scores += coordinates
        if progress:
            progress(round_index + 1, rounds)
    return scores.numpy()
