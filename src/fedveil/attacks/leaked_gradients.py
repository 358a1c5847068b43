"""Gradients that an attacker obtains: from the difference of consecutive broadcasts, or from a victim's upload."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedveil.attacks.observation import Observation, Round
from fedveil.defences.dbcl import SketchedLayer
from fedveil.defences.plain import PlainUpdate
from fedveil.errors import BadArgument
from fedveil.scheme import Broadcast, Loss, Update, client_view
from fedveil.scheme.losses import one_hot
from fedveil.scheme.perturb import move_head

Gradients = dict[str, Tensor]
ULPS = 4  # of a weight: a step and a difference each round twice


@dataclass(frozen=True, eq=False)
class Leak:
    """A gradient, and the model that it belongs to as far as the attacker knows."""

    model: nn.Module  # in the mode in which clients compute gradients
    gradients: Gradients  # of the mean loss of some records, by the model's parameter names
    loss: Loss  # the clients'
    mask: Mapping[str, Tensor] | None = None  # for each name, which elements were received; None if all were
    compare: Callable[[Gradients], Tensor] | None = None  # the distance of another gradient, in place of a method's own


def mean_gradients(model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor, *, graph: bool = False) -> Gradients:
    """Return gradients of the mean loss by parameter name; buffers do not change.

    Targets are class indices, or rows of probabilities. With `graph`, the gradients can be differentiated again.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    outputs = torch.func.functional_call(model, buffers, (inputs,))
    value = loss.values(outputs, one_hot(targets, outputs)).mean()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = torch.autograd.grad(value, list(trained.values()), create_graph=graph)
    return dict(zip(trained, found, strict=True))


def from_difference(observed: Observation, at: int = -2) -> Leak:
    """Derive the mean gradient of all other clients from two broadcasts (V-diff).

        U = (W_t - W_{t+1}) / lr - share_a g_a,      U / (1 - share_a) = mean of g_k over k != a

    With two clients it is the victim's gradient. It is right if the server uses plain SGD and sends its model. For any
    other defence it is what the published attack gets: sketches are mapped back to the layer's own inputs, and their
    difference is sketched again as in the first round, S_t^T S_t = q I.

    Needs the round `at`, which the attacker answered, and the one after it.
    """
    now, later = observed.consecutive(at)
    own, before, after = own_gradients(observed, now), full_weights(now.model), full_weights(later.model)
    change = sketch_weights(now.model, {name: (before[name] - after[name]) / observed.learning_rate for name in own})
    others = {name: (change[name] - observed.share * own[name]) / (1 - observed.share) for name in own}
    return Leak(now.model, others, observed.loss)


def from_masked_difference(observed: Observation) -> Leak:
    """Derive the gradient from two broadcasts, with a mask of the elements that PPDL's clients sent.

    An element that was not sent is 0 up to the rounding of its weight, over the learning rate.
    """
    leak, mask = from_difference(observed), {}
    for name, value in leak.gradients.items():
        weight = leak.model.get_parameter(name).detach()
        mask[name] = value.abs() > ULPS * torch.finfo(value.dtype).eps * weight.abs() / observed.learning_rate
    return dataclasses.replace(leak, mask=mask)


def own_gradients(observed: Observation, seen: Round) -> Gradients:
    """Return the attacker's own gradient of a round: its upload, or computed again if that holds no plain gradient."""
    if isinstance(seen.upload, PlainUpdate):
        return dict(seen.upload.gradients)
    return mean_gradients(seen.model, observed.loss, *observed.own_batch(seen))


def full_weights(model: nn.Module) -> Gradients:
    """Return parameters by name; for a sketched layer W~ S^T, in the shape (units, inputs)."""
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, layer in sketched_layers(model):
        values[name] = layer.sketch.up(values[name])
    return values


def sketch_weights(model: nn.Module, values: Mapping[str, Tensor]) -> Gradients:
    """Map values in the shapes of `full_weights` to the shapes of the parameters: C S / q for a sketched layer."""
    small = dict(values)
    for name, layer in sketched_layers(model):
        small[name] = layer.sketch.down(values[name]) / layer.sketch.inputs.shape[0]
    return small


def sketched_layers(model: nn.Module) -> list[tuple[str, SketchedLayer]]:
    """Return all sketched layers, each with the name of its weight."""
    found = [(path, module) for path, module in model.named_modules() if isinstance(module, SketchedLayer)]
    return [(f"{path}.weight" if path else "weight", module) for path, module in found]


def from_upload(seen: Round, upload: object, loss: Loss) -> Leak:
    """Pair a victim's upload with the broadcast that it answers (V-up), as an eavesdropper or a leaky server sees them.

    A veil's client uploads gradients of the veiled model with publicly known heads. For squared error, its first pass
    is the gradient for the base. For other losses, the candidate t nearest to 0 is taken, whose pass is the gradient
    for the head base - t r_a.
    """
    if isinstance(upload, PlainUpdate):
        return Leak(seen.model, dict(upload.gradients), loss)
    if not isinstance(upload, Update) or not isinstance(seen.broadcast, Broadcast):
        raise BadArgument("from_upload", f"a {type(upload).__name__} holds no gradients that are known here")
    with torch.no_grad():
        model, head, number = client_view(seen.model, seen.broadcast, centred=True), seen.broadcast.head, 0
        if head is not None and len(head.candidates):
            number = int(head.candidates.square().sum(1).argmin())
            move_head(model, head, -head.noise(head.direction)[number])
    return Leak(model, {name: passes[number] for name, passes in upload.passes.items()}, loss)
