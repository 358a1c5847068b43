"""Normalisations: what their statistics absorb exactly, and what they do not."""

import torch
from torch import nn

from fedveil.graph.calls import Call, Outcome, rule
from fedveil.graph.ledger import Attachment, Units, pinned, spread
from fedveil.graph.symmetry import Symmetry


def _tie(call: Call, attribute: str, *ties: tuple[Units, int]) -> None:
    """Ties the module's tensor to units with their powers; the order of the first is the tensor's own."""
    tensor = getattr(call.module, attribute, None)
    if tensor is None:
        return
    index = torch.arange(tensor.numel()).reshape(tensor.shape)
    attachments = [Attachment(units, index, 1, power, moves=not i) for i, (units, power) in enumerate(ties)]
    call.ledger.attach(call.tensor_name(attribute), *attachments)


def _unscaled(units: Units) -> Units:
    return Units(pinned(units.shape).scale, units.order)


def _affine(call: Call, inputs: Units) -> Units:
    """The output's units: a new axis if there is a weight, else what passed."""
    if call.module.weight is None:
        return inputs
    outputs = Units(call.ledger.fresh_scale(inputs.shape[0], call.tensor_name("weight")), inputs.order)
    _tie(call, "weight", (outputs, 1), (inputs, -1))
    _tie(call, "bias", (outputs, 1))
    return outputs


@rule(
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip
def batch_norm(call: Call) -> Outcome:
    """Statistics of the batch absorb signs exactly (and factors only up to eps); stored ones absorb everything."""
    module = call.module
    instance = isinstance(module, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d)
    spatial = {"1": 1, "2": 2, "3": 3}[type(module).__name__[-2]]
    unbatched = instance and call.x.value.dim() == spatial + 1
    dim = 0 if unbatched else 1
    inputs = call.ledger.vector(call.x.units, dim)
    if module.training or module.running_mean is None:
        call.limit(inputs, Symmetry.SIGN, "statistics of the batch let signs only through, because of eps")
    _tie(call, "running_mean", (inputs, 1))
    _tie(call, "running_var", (_unscaled(inputs), 1))
    return spread(_affine(call, inputs), call.output.shape, dim)


@rule(nn.GroupNorm)
def group_norm(call: Call) -> Outcome:
    """A mean over different channels lets no factor through; channels of a group may trade places."""
    inputs = call.ledger.vector(call.x.units, 1)
    call.limit(inputs, Symmetry.NOTHING, "statistics over several channels let no factor through")
    groups = call.module.num_groups
    call.ledger.mark(inputs.order, torch.arange(groups).repeat_interleave(inputs.shape[0] // groups))
    return spread(_affine(call, _unscaled(inputs)), call.output.shape, 1)


def _last_dims(call: Call, symmetry: Symmetry, why: str) -> Units:
    """Normalises over the last dims, element by element of their flattened form."""
    shape = call.output.shape
    kept = len(shape) - len(call.module.normalized_shape)
    flat = call.ledger.replay(lambda t: t[0].contiguous().flatten(kept), [call.x.units], call.where)
    inputs = call.ledger.vector(flat, -1)
    call.limit(inputs, symmetry, why)
    outputs = _affine(call, inputs if symmetry else _unscaled(inputs))
    flat_output = spread(outputs, (*shape[:kept], -1 if kept else inputs.shape[0]), -1) if kept else outputs
    return call.ledger.replay(lambda t: t[0].reshape(shape), [flat_output], call.where)


@rule(nn.LayerNorm)
def layer_norm(call: Call) -> Outcome:
    """A mean over different features lets no factor through, and every permutation."""
    return _last_dims(call, Symmetry.NOTHING, "statistics over several features let no factor through")


@rule(nn.RMSNorm)
def rms_norm(call: Call) -> Outcome:
    """A mean square lets signs through, and every permutation."""
    return _last_dims(call, Symmetry.SIGN, "a mean square over several features lets signs only through")
