"""Test data, checked against the model and its loss before the first round."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedveil.errors import BadArgument
from fedveil.federation.evaluate import metrics, moved, predict, predict_source
from fedveil.federation.shards import checked
from fedveil.federation.sources import Given, Rows, Source, as_source, check_range, named
from fedveil.federation.targets import target_maker, targets_of
from fedveil.graph.inputs import Inputs
from fedveil.scheme.losses import USERS, Loss, couples_samples
from fedveil.scheme.outputs import head_axis

WHO = "test data"


def read_held_out(
    given: Given, model: nn.Module, loss: Loss, dtype: torch.dtype, like: Callable[[], Inputs] | None = None
) -> Source:
    """Test data as a source; refuses records that the model does not take, and targets that do not fit the loss.

    A user's loss is evaluated on all records in memory, as after a round. Of a stream, two records are looked at, or
    all of them if the loss compares samples with one another.

    Args:
        given: in any form that clients may have.
        model: the server's.
        loss: what clients minimise.
        dtype: of floating-point numbers.
        like: returns inputs of clients, if they are known.
    """
    source = as_source(WHO, given)
    if not len(source):
        raise BadArgument("fit", f"{WHO} has no records", "give at least one test record, or leave out test=")
    source = checked([source])[0]
    if isinstance(source, Rows):
        check_range(WHO, (source.inputs, source.targets), range(len(source)), dtype)
    inputs, targets = source.take(range(min(2, len(source))))
    device = next(model.parameters()).device
    try:
        outputs = predict(model, moved(inputs, device, dtype))
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise _explain(inputs, like, error) from error
    with targets_of(WHO):
        target_maker(model, loss, (inputs, targets))(source.targets if isinstance(source, Rows) else targets)
        if couples_samples(loss) or (isinstance(loss, USERS) and isinstance(source, Rows)):
            outputs, targets = predict_source(model, source)
        _try_loss(loss, outputs, targets.to(device), head_axis(model))
    return source


def _try_loss(loss: Loss, outputs: Tensor, targets: Tensor, axis: int | None) -> None:
    """Compute the metrics as after a round; refuse targets on which the loss fails."""
    try:
        metrics(outputs, targets, loss, axis=axis)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, BadArgument):
            raise
        form = f"outputs of {outputs.dtype} and shape {tuple(outputs.shape)}"
        what = f"{loss.name} does not take them ({_describe(targets)}) for {form}: {_first_line(error)}"
        raise BadArgument("targets", what, "give targets in the clients' form, or mend the loss") from error


def _explain(inputs: Inputs, like: Callable[[], Inputs] | None, error: Exception) -> BadArgument:
    """A model's failure on test records, beside the form of those that it takes."""
    found = ", ".join(f"{place} {_describe(leaf)}" for place, leaf in named(inputs).items())
    what = f"the model does not take its records ({found})"
    if like is not None:
        wanted = ", ".join(f"{place} {_describe(leaf)}" for place, leaf in named(like()).items())
        what += f", clients have {wanted}"
    return BadArgument(WHO, f"{what}: {_first_line(error)}", "give test data the form of the clients' records")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _describe(leaf: object) -> str:
    """The dtype and shape of a record."""
    return f"{leaf.dtype} {tuple(leaf.shape[1:])}" if isinstance(leaf, Tensor) else type(leaf).__name__
