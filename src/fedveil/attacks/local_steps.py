"""Reconstruct records from an update that contains several local steps (FedAvg) instead of one gradient.

A client that trains locally sends W_0 - W_T after T steps of SGD. The attacker repeats these steps with candidate
records, differentiates through them, and searches for records whose update is close to the observed one (Geiping et al.
2020, arXiv 2003.14053; Dimitrov et al. 2022, arXiv 2206.12395). Every search of `attacks.gradients` works.

The attacker knows the number of epochs, the learning rate and the batch size, but not the division of the records
into batches; it assumes the same consecutive batches in every epoch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedveil.attacks.leaked_gradients import Gradients, Leak
from fedveil.checks import check_count
from fedveil.errors import BadArgument
from fedveil.graph.outputs import find_predictions
from fedveil.scheme import Loss
from fedveil.scheme.losses import one_hot


@dataclass(frozen=True)
class KnownTraining:
    """A client's local training with plain SGD.

    Attributes:
        epochs: number of times that the client uses each record.
        lr: learning rate.
        batch: number of records per step; the last step of an epoch may have fewer.
    """

    epochs: int
    lr: float
    batch: int

    def __post_init__(self) -> None:
        check_count("KnownTraining", "epochs", self.epochs)
        check_count("KnownTraining", "batch", self.batch)
        if not self.lr > 0:
            raise BadArgument("KnownTraining", f"lr must be positive, got {self.lr}", "use a positive learning rate")

    def steps(self, records: int) -> int:
        """Return the number of steps of a client with this number of records."""
        return self.epochs * -(-records // self.batch)


def local_update(
    model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor, training: KnownTraining, *, graph: bool = False
) -> Gradients:
    """Return the mean gradient of a client's local steps, (W_0 - W_T) / (lr T), without changing the model.

    Targets are class indices, or rows of probabilities. If `graph` is true, the result is differentiable.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    initial: Gradients = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    frozen = {name: parameter for name, parameter in model.named_parameters() if name not in initial}
    current, starts = dict(initial), range(0, len(inputs), training.batch)
    for start in [start for _ in range(training.epochs) for start in starts]:
        rows = slice(start, start + training.batch)
        returned = torch.func.functional_call(model, {**frozen, **current, **buffers}, (inputs[rows],))
        outputs = find_predictions(model, returned)
        value = loss.values(outputs, one_hot(targets[rows], outputs)).mean()
        gradients = torch.autograd.grad(value, list(current.values()), create_graph=graph)
        current = {
            name: value_before - training.lr * gradient
            for (name, value_before), gradient in zip(current.items(), gradients, strict=True)
        }
    scale = 1 / (training.lr * training.steps(len(inputs)))
    result = {name: (initial[name] - final) * scale for name, final in current.items()}
    return result if graph else {name: value.detach() for name, value in result.items()}


def from_local_training(
    model: nn.Module, difference: Mapping[str, Tensor], loss: Loss, training: KnownTraining, records: int
) -> Leak:
    """Return a client's local update as a leak that `gradients.reconstruct` and `batch_labels` accept.

    `difference` is W_0 - W_T by parameter name, and `records` is the client's number of records. The leak's gradients
    are the mean over all steps. Labels are estimated from this mean as if it were a single gradient, which is exact
    only for one step; the longer the training, the less accurate the estimate.
    """
    scale = 1 / (training.lr * training.steps(records))
    mean = {name: value * scale for name, value in difference.items()}

    def simulate(inputs: Tensor, targets: Tensor, graph: bool) -> Gradients:
        return local_update(model, loss, inputs, targets, training, graph=graph)

    return Leak(model, mean, loss, simulate=simulate)
