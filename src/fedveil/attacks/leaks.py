"""Gradients that an attacker obtains: from the difference of consecutive broadcasts, or from a victim's upload."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedveil.attacks.observed import Observed, Round
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
    loss: Loss  # what clients minimise
    mask: Mapping[str, Tensor] | None = None  # for each name, which numbers were received; None if all were
    compare: Callable[[Gradients], Tensor] | None = None  # the distance of another gradient, in place of a method's own


def gradients_of(model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor, *, graph: bool = False) -> Gradients:
    """Gradients of the mean loss by parameter name, with a `graph` to differentiate again; buffers do not change.

    Targets are class indices, or rows of probabilities.
    """
    own = {name: buffer.clone() for name, buffer in model.named_buffers()}
    outputs = torch.func.functional_call(model, own, (inputs,))
    value = loss.values(outputs, one_hot(targets, outputs)).mean()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = torch.autograd.grad(value, list(trained.values()), create_graph=graph)
    return dict(zip(trained, found, strict=True))


def from_difference(observed: Observed, at: int = -2) -> Leak:
    """What a client gets from two broadcasts (V-diff): the mean gradient of all other clients.

        U = (W_t - W_{t+1}) / lr - share_a g_a,      U / (1 - share_a) = mean of g_k over k != a

    With two clients it is the victim's gradient. It is right if the server uses plain SGD and sends its model. For any
    other defence it is what the published attack gets: sketches are mapped back to the layer's own inputs, and their
    difference is sketched again as in the first round, S_t^T S_t = q I.

    Needs the round `at`, which the attacker answered, and the one after it.
    """
    rounds = list(observed.rounds)
    if len(rounds) < 2 or rounds[at] is rounds[-1]:
        raise BadArgument("from_difference", "a difference needs a round and the one after it", "observe(..., 2)")
    now, later = rounds[at], rounds[rounds.index(rounds[at]) + 1]
    own, before, after = own_gradients(observed, now), full_weights(now.model), full_weights(later.model)
    change = as_sketched(now.model, {name: (before[name] - after[name]) / observed.learning_rate for name in own})
    others = {name: (change[name] - observed.share * own[name]) / (1 - observed.share) for name in own}
    return Leak(now.model, others, observed.loss)


def from_masked_difference(observed: Observed) -> Leak:
    """The difference of two broadcasts, with only the numbers that PPDL's clients sent."""
    return received(from_difference(observed), learning_rate=observed.learning_rate)


def own_gradients(observed: Observed, seen: Round) -> Gradients:
    """The attacker's own gradient of a round: its upload or, if that is no gradient of the model, computed again."""
    if isinstance(seen.upload, PlainUpdate):
        return dict(seen.upload.gradients)
    if seen.rows is None:
        raise BadArgument("own_gradients", "the attacker has not answered this round", "an earlier round")
    return gradients_of(seen.model, observed.loss, observed.inputs[seen.rows], observed.targets[seen.rows])


def full_weights(model: nn.Module) -> Gradients:
    """Parameters by name; for a sketched layer W~ S^T, in the shape (units, inputs)."""
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, layer in sketched_layers(model):
        values[name] = layer.sketch.up(values[name])
    return values


def as_sketched(model: nn.Module, values: Mapping[str, Tensor]) -> Gradients:
    """Map values in the shapes of `full_weights` to the shapes of the parameters: C S / q for a sketched layer."""
    small = dict(values)
    for name, layer in sketched_layers(model):
        small[name] = layer.sketch.down(values[name]) / layer.sketch.inputs.shape[0]
    return small


def sketched_layers(model: nn.Module) -> list[tuple[str, SketchedLayer]]:
    """All sketched layers, by their weight's name."""
    found = [(path, module) for path, module in model.named_modules() if isinstance(module, SketchedLayer)]
    return [(f"{path}.weight" if path else "weight", module) for path, module in found]


def from_upload(seen: Round, upload: Any, loss: Loss) -> Leak:
    """A victim's upload with the broadcast that it answers (V-up), as seen by an eavesdropper or a leaky server.

    A veil's client uploads gradients of the veiled model with publicly known heads. For squared error, its first pass
    is the gradient for the base. For other losses, the candidate t nearest to 0 is taken, whose pass is the gradient
    for the head base - t r_a.
    """
    if isinstance(upload, PlainUpdate):
        return Leak(seen.model, dict(upload.gradients), loss)
    if not isinstance(upload, Update) or not isinstance(seen.broadcast, Broadcast):
        raise BadArgument("from_upload", f"a {type(upload).__name__} holds no gradients that are known here")
    model, number = _veiled_model(seen)
    return Leak(model, {name: passes[number] for name, passes in upload.passes.items()}, loss)


def _veiled_model(seen: Round) -> tuple[nn.Module, int]:
    """The network that a veil's clients differentiate in one of their passes, and that pass's number."""
    with torch.no_grad():
        model, head = client_view(seen.model, seen.broadcast, centred=True), seen.broadcast.head
        if head is None or not len(head.candidates):
            return model, 0
        number = int(head.candidates.square().sum(1).argmin())
        move_head(model, head, -head.noise(head.direction)[number])
    return model, number


def received(leak: Leak, *, learning_rate: float) -> Leak:
    """Mask what PPDL did not send: gradients that are 0 up to the rounding of the weights, over the learning rate."""
    mask = {}
    for name, value in leak.gradients.items():
        weight = leak.model.get_parameter(name).detach()
        mask[name] = value.abs() > ULPS * torch.finfo(value.dtype).eps * weight.abs() / learning_rate
    return dataclasses.replace(leak, mask=mask)
