"""Convert targets to the form that losses expect, and choose the default loss."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedveil.errors import BadArgument, FedveilError
from fedveil.federation.evaluate import move_inputs, predict, slice_inputs
from fedveil.graph.export import first_line
from fedveil.records.inputs import Batch, Inputs, tensors_by_path
from fedveil.records.sources import Rows, Source
from fedveil.scheme import losses
from fedveil.scheme.losses import AUTOGRAD_LOSSES, CLASS_LOSSES, BinaryCrossEntropy, Loss, match_targets
from fedveil.scheme.outputs import are_class_indices, class_axis, expand_classes, head_axis, remove_axis

MAX_ROUNDING = 2.0**-8  # maximum rounding error of a sum of bfloat16 probabilities
QUANTITIES_FIX = "loss='squared_error' for quantities"
BINARY_FIX = "loss='binary_cross_entropy' for 0 and 1"
CLASSES_FIX = "a model with one output per class"


@contextmanager
def attribute_targets(owner: str) -> Iterator[None]:
    """Add the owner of the targets to errors about them."""
    try:
        yield
    except BadArgument as error:
        if error.where != "targets":
            raise
        raise BadArgument(f"{owner}: targets", error.what, error.fix) from error


@contextmanager
def refuse_failure(where: str, message: str, fix: str) -> Iterator[None]:
    """Convert an error in a model or a loss to a `BadArgument` that quotes its first line."""
    try:
        yield
    except (FedveilError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # users' code may raise any exception
        raise BadArgument(where, f"{message}: {first_line(error)}", fix) from error


def default_loss(output: Tensor, sources: Sequence[Source]) -> str:
    """Return the name of the default loss: for classes if targets are integers, otherwise for quantities.

    A model with a single output is a binary classifier if its targets are the integers 0 and 1. Floats that are all 0
    or 1 are refused, because they may be classes or quantities. Only the first record of a stream is read. `output` is
    the model's output for one record.
    """
    targets, has_one_output = sources[0].take([0])[1], output.numel() == 1
    known_targets = [source.targets for source in sources if isinstance(source, Rows)]
    all_binary = len(known_targets) == len(sources) and all(is_binary(targets) for targets in known_targets)
    if targets.is_floating_point():
        if (
            not all_binary
            or not any(bool(targets.any()) for targets in known_targets)
            or all(bool(targets.all()) for targets in known_targets)
        ):
            return "squared_error"
        message = "all targets are the floats 0 or 1: are they classes or quantities?"
        fix = f"pass {BINARY_FIX}, loss='cross_entropy' for one-hot rows of classes, {QUANTITIES_FIX}"
        raise BadArgument("Federation", message, fix)
    if not has_one_output:
        return "cross_entropy"
    if all_binary:
        return "binary_cross_entropy"
    message = "targets are integers, but the model has one output: are they classes or quantities?"
    fix = f"use {BINARY_FIX}, floating-point targets for quantities, or {CLASSES_FIX}"
    raise BadArgument("Federation", message, fix)


def target_maker(
    model: nn.Module, loss: Loss, example: Batch, *, convert_dtypes: bool = False
) -> Callable[[Tensor], Tensor]:
    """Return a function that converts class indices to one-hot rows in the shape of the model's outputs.

    The function refuses targets that do not fit the loss. A custom loss receives targets unchanged. Cross-entropy at
    several positions of a record (pixels, tokens) keeps indices: one-hot targets would need as much memory as the
    outputs, and indices show which axis of the outputs is the class axis. If the shapes do not determine that
    axis, the class axis of the last layer's outputs is used. If `convert_dtypes` is True, targets of the wrong dtype
    are converted.
    """
    if isinstance(loss, AUTOGRAD_LOSSES):
        return lambda targets: targets
    output, axis = one_output(model, example[0]), head_axis(model)

    def convert(targets: Tensor) -> Tensor:
        template = output.expand(len(targets), *output.shape[1:])
        targets = fit_dtype(targets, template) if convert_dtypes else targets
        if isinstance(loss, CLASS_LOSSES):
            _check_classes(loss, targets, template, axis)
        elif isinstance(loss, BinaryCrossEntropy):
            _check_probabilities(targets, template)
        else:
            _check_quantities(loss, targets, template)
        return targets if targets.is_floating_point() else _dense(loss, targets, template, axis)

    return convert


def fit_dtype(targets: Tensor, outputs: Tensor) -> Tensor:
    """Return one target per record as a class index if the model has several outputs, and as a float if it has one.

    The dtype of an array of targets depends on all records: a single missing label turns integers into floats.
    """
    if outputs.dim() != 2 or targets.numel() != len(targets):
        return targets
    if outputs.shape[1] == 1:
        return targets.to(outputs.dtype)
    indices = targets.reshape(-1).long()
    return indices if bool((indices == targets.reshape(-1)).all()) else targets


def one_output(model: nn.Module, inputs: Inputs) -> Tensor:
    """Return the model's output for the first of these records; refuse a model that does not accept them."""
    fix = "use a model whose forward accepts these records (fedveil help inputs), or other records"
    if any(tensor.dtype == torch.uint8 for tensor in tensors_by_path(inputs).values()):
        fix += "; for bytes, call .float()"
    return try_model(model, inputs, "the clients' records", fix)[:1].cpu()


def try_model(model: nn.Module, inputs: Inputs, owner: str, fix: str, client_inputs: Inputs | None = None) -> Tensor:
    """Return the model's outputs for the first two records, in evaluation mode; refuse records that the model rejects.

    Args:
        model: the model, in any mode.
        inputs: the records' inputs.
        owner: name of the records in the error.
        fix: the fix to suggest in the error.
        client_inputs: clients' inputs, which the error also describes.
    """
    parameter = next(model.parameters())
    message = f"{type(model).__name__} does not accept these inputs ({_describe_inputs(inputs)})"
    message += "" if client_inputs is None else f"; the clients have {_describe_inputs(client_inputs)}"
    with refuse_failure(owner, message, fix):
        return predict(model, move_inputs(slice_inputs(inputs, 0, 2), parameter.device, parameter.dtype))


def describe(tensor: Tensor) -> str:
    """Describe the dtype and shape of one record."""
    return f"{tensor.dtype} of shape {tuple(tensor.shape[1:])}"


def _describe_inputs(inputs: Inputs) -> str:
    return ", ".join(f"{path}: {describe(tensor)}" for path, tensor in tensors_by_path(inputs).items())


def _dense(loss: Loss, targets: Tensor, template: Tensor, axis: int | None) -> Tensor:
    """Convert integer targets to the form that fits the model's outputs; `template` is an example of these."""
    if isinstance(loss, BinaryCrossEntropy):
        return loss.dense(targets, template)
    targets = targets.long()
    if not are_class_indices(template, targets):
        expected = " or ".join(sorted({str(tuple(remove_axis(template.shape, dim))) for dim in (-1, 1)}))
        fix = "use targets[:, 0] for a column, or the argmax of one-hot rows"
        raise BadArgument(
            "targets", f"expected class indices of shape {expected}, got shape {tuple(targets.shape)}", fix
        )
    if not isinstance(loss, CLASS_LOSSES) or template.dim() < 3:
        return expand_classes(targets, template, axis).contiguous()
    losses.check_classes(targets, template.shape[class_axis(template, targets, axis)])
    return targets


def is_binary(targets: Tensor) -> bool:
    """Return whether all targets are 0 or 1."""
    return bool(((targets == 0) | (targets == 1)).all())


def _check_classes(loss: Loss, targets: Tensor, outputs: Tensor, axis: int | None) -> None:
    """Refuse a single output, and rows that are not probability distributions."""
    are_floats, dim = targets.is_floating_point(), class_axis(outputs, targets, axis)
    if outputs.dim() < 2 or outputs.shape[dim] < 2:
        message = f"{loss.name} compares classes, but the model has one output: nothing can be learned"
        raise BadArgument("targets", message, f"use {BINARY_FIX}, {QUANTITIES_FIX} (targets.float()), or {CLASSES_FIX}")
    if not are_floats:
        return
    if targets.shape != outputs.shape and not _has_positions(targets, outputs):
        expected = f"class indices, or probabilities of shape {tuple(outputs.shape)}"
        message = f"{loss.name} expects {expected}, got {targets.dtype} of shape {tuple(targets.shape)}"
        fix = f"use targets.long() of shape {tuple(remove_axis(outputs.shape, dim))} for classes, or {QUANTITIES_FIX}"
        raise BadArgument("targets", message, f"{fix} with one output per quantity")
    if isinstance(loss, losses.Hinge) and not is_binary(targets):
        message = "hinge expects one-hot rows, but some values are not 0 or 1"
        raise BadArgument("targets", message, "use loss='cross_entropy'")
    if bool((targets < 0).any()) or bool(((targets.double().sum(dim) - 1).abs() > MAX_ROUNDING).any()):
        message = f"{loss.name} expects probabilities, but some rows have negative values or do not sum to 1"
        binary_loss = "loss='binary_cross_entropy' for several binary targets per record"
        raise BadArgument(
            "targets", message, f"use class indices or rows that sum to 1, {binary_loss}, or {QUANTITIES_FIX}"
        )


def _has_positions(targets: Tensor, outputs: Tensor) -> bool:
    """Return whether targets and outputs have positions; sequences may then be longer than in the example output."""
    return targets.dim() == outputs.dim() > 2


def _check_probabilities(targets: Tensor, outputs: Tensor) -> None:
    if not _has_positions(targets, outputs):
        match_targets(outputs, targets)
    if targets.dtype != torch.bool and bool(((targets < 0) | (targets > 1)).any()):
        message = "binary_cross_entropy expects targets from 0 to 1, but some are outside this range"
        raise BadArgument("targets", message, f"use {QUANTITIES_FIX}, or loss='cross_entropy' and {CLASSES_FIX}")


def _check_quantities(loss: Loss, targets: Tensor, outputs: Tensor) -> None:
    """Refuse integers that cannot be classes, and negative counts."""
    if not targets.is_floating_point():
        if outputs[0].numel() == 1 or targets.shape == outputs.shape:
            message = f"{targets.dtype} targets are class indices, but {loss.name} compares quantities here"
            raise BadArgument("targets", message, f"use targets.float() for quantities, or {BINARY_FIX}")
        return
    if not _has_positions(targets, outputs):
        match_targets(outputs, targets)
    if isinstance(loss, losses.Poisson) and bool((targets < 0).any()):
        message = "poisson expects counts, but some targets are negative"
        raise BadArgument("targets", message, f"use counts of at least 0, or {QUANTITIES_FIX}")


def warn_about_activation(model: nn.Module, loss: Loss, outputs: Tensor) -> None:
    """Warn if the model outputs probabilities but the loss expects logits: the activation would be applied twice."""
    values, last_module = outputs.double(), list(model.modules())[-1]
    in_unit_interval = bool(((values >= 0) & (values <= 1)).all())
    rows_sum_to_one = bool(((values.sum(-1) - 1).abs() <= outputs.shape[-1] * torch.finfo(outputs.dtype).eps).all())
    is_softmax = isinstance(loss, losses.CrossEntropy) and in_unit_interval and rows_sum_to_one
    if is_softmax or (
        isinstance(loss, BinaryCrossEntropy) and in_unit_interval and isinstance(last_module, nn.Sigmoid)
    ):
        layer = "softmax" if is_softmax else "sigmoid"
        message = f"Federation: {loss.name} expects logits, but the model's outputs are already probabilities."
        warnings.warn(f"{message} Remove the {layer} at the end of the model.", UserWarning, stacklevel=3)
