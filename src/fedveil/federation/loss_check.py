"""Whether a loss can learn from such targets. Messages say what form targets have, never a value of one of them."""

import warnings

import torch
from torch import Tensor, nn

from fedveil.errors import BadArgument
from fedveil.scheme.losses import (
    OF_CLASSES,
    USERS,
    BinaryCrossEntropy,
    CrossEntropy,
    Hinge,
    Loss,
    Poisson,
    match_targets,
)
from fedveil.scheme.outputs import class_axis

HALF = 2.0**-8  # by which the sum of probabilities changes at most when they are rounded to bfloat16
QUANTITIES = "loss='squared_error' for quantities"
YES_NO = "loss='binary_cross_entropy' for 0 and 1"
PER_CLASS = "a model with one output per class"


def check_loss(loss: Loss, targets: Tensor, outputs: Tensor, axis: int | None = None) -> None:
    """Refuse targets from which this loss cannot learn; a user's own function gets whatever there is.

    Args:
        loss: what clients minimise.
        targets: of all records.
        outputs: of as many records, of which only the shape is read.
        axis: of classes, where shapes leave it open.
    """
    if isinstance(loss, USERS):
        return
    if isinstance(loss, OF_CLASSES):
        _check_classes(loss, targets, outputs, axis)
    elif isinstance(loss, BinaryCrossEntropy):
        _check_probabilities(targets, outputs)
    else:
        _check_quantities(loss, targets, outputs)


def is_binary(targets: Tensor) -> bool:
    """Whether there is nothing but 0 and 1."""
    return bool(((targets == 0) | (targets == 1)).all())


def _refuse(what: str, fix: str) -> None:
    raise BadArgument("targets", what, fix)


def _check_classes(loss: Loss, targets: Tensor, outputs: Tensor, axis: int | None) -> None:
    """Refuse a single output, which has nothing to be compared with, and rows that are no distribution."""
    floats, place = targets.is_floating_point(), class_axis(outputs, targets, axis)
    if outputs.dim() < 2 or outputs.shape[place] < 2:
        what = f"{loss.name} compares classes with one another, and the model has one output: nothing can be learned"
        if is_binary(targets):
            _refuse(what, f"use {YES_NO}, {QUANTITIES}, or {PER_CLASS}")
        _refuse(what, f"use {QUANTITIES}" if floats else f"use {PER_CLASS}, or {QUANTITIES} with targets.float()")
    if not floats:
        return
    if targets.shape != outputs.shape and not _has_positions(targets, outputs):
        form = f"{targets.dtype} of shape {tuple(targets.shape)}"
        what = f"they are {form}, and {loss.name} takes class indices, or probabilities of shape {tuple(outputs.shape)}"
        column = targets.dim() == 2 and targets.shape[1] == 1
        if bool((targets == targets.round()).all()):
            _refuse(what, f"use targets{'[:, 0]' if column else ''}.long() for classes")
        _refuse(what, f"use {QUANTITIES}, and a model with one output per quantity")
    if isinstance(loss, Hinge) and not is_binary(targets):
        _refuse("hinge takes one-hot rows, and there are other values than 0 and 1", "use loss='cross_entropy'")
    if bool((targets < 0).any()) or bool(((targets.double().sum(place) - 1).abs() > HALF).any()):
        what = f"{loss.name} takes probabilities, and there are rows with negative values or a sum that is not 1"
        several = "loss='binary_cross_entropy' for several yes/no answers per record"
        _refuse(what, f"use class indices or rows with the sum 1, {several}, or {QUANTITIES}")


def _has_positions(targets: Tensor, outputs: Tensor) -> bool:
    """Whether both have positions: sequences of another batch may be longer than those of the template."""
    return targets.dim() == outputs.dim() > 2


def _check_probabilities(targets: Tensor, outputs: Tensor) -> None:
    if not _has_positions(targets, outputs):
        match_targets(outputs, targets)
    if targets.dtype != torch.bool and bool(((targets < 0) | (targets > 1)).any()):
        what = "binary_cross_entropy takes targets from 0 to 1, and there are others"
        _refuse(what, f"use {QUANTITIES}, or loss='cross_entropy' and {PER_CLASS}")


def _check_quantities(loss: Loss, targets: Tensor, outputs: Tensor) -> None:
    """Refuse integers that cannot be classes, and counts below 0; class indices of several outputs are one-hot."""
    single = outputs[0].numel() == 1
    if not targets.is_floating_point():
        if single or targets.shape == outputs.shape:
            what = f"they are {targets.dtype}, which means class indices, and {loss.name} compares quantities here"
            _refuse(what, "use targets.float() for quantities" + (f", or {YES_NO}" if single else ""))
        return
    if not _has_positions(targets, outputs):
        match_targets(outputs, targets)
    if isinstance(loss, Poisson) and bool((targets < 0).any()):
        _refuse("poisson takes counts, and there are negative targets", f"use counts from 0, or {QUANTITIES}")


def warn_of_activation(model: nn.Module, loss: Loss, outputs: Tensor) -> None:
    """Warn of probabilities where a loss takes logits: it would squash them once more, and learn slowly."""
    found, last = outputs.double(), list(model.modules())[-1]
    inside = bool(((found >= 0) & (found <= 1)).all())
    rows = bool(((found.sum(-1) - 1).abs() <= outputs.shape[-1] * torch.finfo(outputs.dtype).eps).all())
    softmax = isinstance(loss, CrossEntropy) and inside and rows
    if softmax or (isinstance(loss, BinaryCrossEntropy) and inside and isinstance(last, nn.Sigmoid)):
        layer = "softmax" if softmax else "sigmoid"
        what = f"Federation: {loss.name} takes logits, and the model's outputs are probabilities already."
        warnings.warn(f"{what} Take the {layer} at its end out of the model.", UserWarning, stacklevel=3)
