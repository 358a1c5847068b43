"""Targets as losses take them, and the loss that suits them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedveil.errors import BadArgument
from fedveil.federation.evaluate import moved, predict, rows_of
from fedveil.federation.loss_check import check_loss, is_binary
from fedveil.federation.sources import Batch, Rows, Source
from fedveil.graph.inputs import Inputs, tensors
from fedveil.scheme.losses import OF_CLASSES, USERS, BinaryCrossEntropy, Loss
from fedveil.scheme.outputs import are_classes, check_classes, class_axis, head_axis, spread, without


@contextmanager
def targets_of(who: str) -> Iterator[None]:
    """Says whose targets they are that a loss refuses."""
    try:
        yield
    except BadArgument as error:
        if error.where != "targets":
            raise
        raise BadArgument(f"{who}: targets", error.what, error.fix) from error


def usual_loss(model: nn.Module, sources: Sequence[Source]) -> str:
    """The loss for such records: of classes, which are integers, or of quantities; one output means yes or no.

    Floating-point targets of nothing but 0 and 1 may be either, and are refused; of a stream nothing is read for it.
    """
    inputs, targets = sources[0].take([0])
    known = [source.targets for source in sources if isinstance(source, Rows)]
    binary = len(known) == len(sources) and all(is_binary(own) for own in known)
    single = one_output(model, inputs).numel() == 1
    if targets.is_floating_point():
        if binary and any(bool(own.any()) for own in known) and not all(bool(own.all()) for own in known):
            _refuse_binary(single)
        return "squared_error"
    if not single:
        return "cross_entropy"
    if binary:
        return "binary_cross_entropy"
    what = "targets are whole numbers, and the model has one output: classes or quantities?"
    fix = "loss='binary_cross_entropy' for 0 and 1, floating-point targets for quantities, or one output per class"
    raise BadArgument("Federation", what, fix)


def _refuse_binary(single: bool) -> None:
    """Ask for a loss where targets say neither that they are classes nor that they are quantities."""
    what = "targets are floating-point numbers, all of them 0 or 1: classes or quantities?"
    classes = "loss='binary_cross_entropy' for yes or no"
    if not single:
        classes = "loss='cross_entropy' for one-hot rows of classes, loss='binary_cross_entropy' for several yes or no"
    raise BadArgument("Federation", what, f"name the loss: {classes}, loss='squared_error' for quantities")


def target_maker(model: nn.Module, loss: Loss, example: Batch, axis: int | None = None) -> Callable[[Tensor], Tensor]:
    """A function that turns class indices into one-hot rows in the shape of the model's outputs for such records.

    It refuses targets from which the loss cannot learn. A user's own loss gets targets as they are. Cross-entropy at
    several positions of a record (pixels, tokens) keeps indices: one-hot targets would take the memory of the outputs,
    and indices say which axis of the outputs counts classes. Where shapes leave that open, `axis` does; by default it
    is the one that the model's last layer writes.
    """
    if isinstance(loss, USERS):
        return lambda targets: targets
    one = one_output(model, example[0])
    axis = head_axis(model) if axis is None else axis

    def make(targets: Tensor) -> Tensor:
        template = one.expand(len(targets), *one.shape[1:])
        check_loss(loss, targets, template, axis)
        return targets if targets.is_floating_point() else _dense(loss, targets, template, axis)

    return make


def one_output(model: nn.Module, inputs: Inputs) -> Tensor:
    """The model's output for the first of these records; refuses a model that does not take them."""
    first = next(model.parameters())
    try:
        return predict(model, moved(rows_of(inputs, 0, 2), first.device, first.dtype))[:1].cpu()
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, BadArgument):
            raise
        forms = ", ".join(f"{tensor.dtype} of shape {tuple(tensor.shape[1:])}" for tensor in tensors(inputs))
        what = f"it does not take the clients' records ({forms}): {str(error).splitlines()[0]}"
        fix = "a model whose forward takes these records (docs/inputs.md), or other records"
        if any(tensor.dtype == torch.uint8 for tensor in tensors(inputs)):
            fix += ": .float() for bytes"
        raise BadArgument(type(model).__name__, what, fix) from error


def _dense(loss: Loss, targets: Tensor, template: Tensor, axis: int | None) -> Tensor:
    """Whole numbers as targets for outputs like the template."""
    if isinstance(loss, BinaryCrossEntropy):
        return loss.dense(targets, template)
    targets = targets.long()
    if not are_classes(template, targets):
        wanted = " or ".join(sorted({str(tuple(without(template.shape, place))) for place in (-1, 1)}))
        fix = "targets[:, 0]" if targets.dim() == 2 and targets.shape[1] == 1 else f"give targets of shape {wanted}"
        if targets.shape == template.shape and is_binary(targets):
            fix = f"use targets.argmax({class_axis(template, targets, axis)}) of one-hot rows, or targets.float()"
        raise BadArgument("targets", f"shape is {tuple(targets.shape)}, want class indices of shape {wanted}", fix)
    if not isinstance(loss, OF_CLASSES) or template.dim() < 3:
        return spread(targets, template, axis).contiguous()
    check_classes(targets, template.shape[class_axis(template, targets, axis)])
    return targets
