"""Gradients that an attacker obtains, and the labels that they reveal.

A client has the difference of consecutive broadcasts; an eavesdropper has a victim's upload. A curious server has
updates or, with secure aggregation, sums of them. The sum of a round is the gradient of one large batch, so every
attack on a batch runs on it unchanged. Two sums for the same model whose members differ by one client differ by that
client's update.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedveil.attacks.observation import Observation, Round
from fedveil.defences.dbcl import SketchedLayer
from fedveil.defences.plain import PlainUpdate
from fedveil.errors import BadArgument
from fedveil.graph.inputs import record_calls
from fedveil.scheme import Broadcast, Loss, Update, client_view
from fedveil.scheme.client import move_head
from fedveil.scheme.losses import one_hot

Gradients = dict[str, Tensor]
ULPS = 4  # rounding error of a weight: a step and a difference each round twice


@dataclass(frozen=True, eq=False)
class Leak:
    """A gradient and, as far as the attacker knows, the model that it belongs to."""

    model: nn.Module  # in the mode in which clients compute gradients
    gradients: Gradients  # of the mean loss of some records, by the model's parameter names
    loss: Loss  # the loss that clients minimise
    mask: Mapping[str, Tensor] | None = None  # for each name, which elements were received; None if all were
    compare: Callable[[Gradients], Tensor] | None = None  # the distance of another gradient, instead of the method's


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

    With two clients, it is the victim's gradient. It is correct if the server uses plain SGD and sends its model. For
    any other defence, it is the result of the published attack: sketches are mapped back to the layer's inputs, and
    their difference is sketched again as in the first round, S_t^T S_t = q I.

    Needs the round `at`, which the attacker answered, and the one after it.
    """
    now, later = observed.consecutive(at)
    own, before, after = own_gradients(observed, now), full_weights(now.model), full_weights(later.model)
    change = sketch_weights(now.model, {name: (before[name] - after[name]) / observed.learning_rate for name in own})
    others = {name: (change[name] - observed.share * own[name]) / (1 - observed.share) for name in own}
    return Leak(now.model, others, observed.loss)


def from_masked_difference(observed: Observation, at: int = -2) -> Leak:
    """Derive the gradient from two broadcasts, with a mask of the elements that PPDL's clients sent.

    An element that was not sent is 0 up to the rounding of two weights, magnified by the division by learning rate and
    share.
    """
    leak, mask = from_difference(observed, at), {}
    for name, value in leak.gradients.items():
        weight = leak.model.get_parameter(name).detach()
        rounding = ULPS * torch.finfo(value.dtype).eps * weight.abs()
        mask[name] = value.abs() > rounding / (observed.learning_rate * (1 - observed.share))
    return dataclasses.replace(leak, mask=mask)


def own_gradients(observed: Observation, seen: Round) -> Gradients:
    """Return the attacker's own gradient in a round: its upload, or recomputed if that contains no plain gradient."""
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
        raise BadArgument("from_upload", f"a {type(upload).__name__} contains no known gradients")
    with torch.no_grad():
        model, head, number = client_view(seen.model, seen.broadcast, centred=True), seen.broadcast.head, 0
        if head is not None and len(head.candidates):
            number = int(head.candidates.square().sum(1).argmin())
            move_head(model, head, -head.noise(head.direction)[number])
    return Leak(model, {name: passes[number] for name, passes in upload.passes.items()}, loss)


@dataclass(frozen=True, eq=False)
class Sum:
    """The opened sums of a round: sum_k n_k g_k in float64 by parameter name, and sum_k n_k."""

    values: Gradients
    records: int

    def __sub__(self, other: "Sum") -> "Sum":
        values = {name: value - other.values[name] for name, value in self.values.items()}
        return Sum(values, self.records - other.records)

    def mean(self) -> Gradients:
        """Return the gradient of the mean loss over the records."""
        if self.records < 1:
            raise BadArgument("Sum", f"it is over {self.records} records", "subtract the sum over fewer clients")
        return {name: value / self.records for name, value in self.values.items()}


def secure_sum(gradients: Sequence[Mapping[str, Tensor]], records: Sequence[int]) -> Sum:
    """Return the sum of the clients' gradients, each times its number of records, as secure aggregation opens it.

    Values are sent in fixed point (`fedveil.secagg.fixed`), with the fractional bits that the largest value leaves.
    """
    from fedveil.secagg import fixed  # a default audit does not need it

    values = {}
    for name in gradients[0]:
        pairs = zip(gradients, records, strict=True)
        weighted = torch.stack([count * own[name].detach().double() for own, count in pairs])
        bits = fixed.bits(len(weighted), fixed.exponent(float(weighted.abs().max())))
        words = fixed.encode(weighted.cpu().numpy(), bits).sum(0)
        values[name] = torch.from_numpy(fixed.decode(words, bits)).to(weighted)
    return Sum(values, sum(records))


def single_label(leak: Leak) -> int:
    """Return the label of one record (iDLG, arXiv 2001.02610).

    It is the class whose row of the head's gradient has the least sum. Row c is (p_c - [c = label]) h for features h.
    If no feature is negative, only the label's row is. The bias's gradient, if there is one, is p_c - [c = label]
    itself, whatever the features.
    """
    return int(_head(leak)[1].argmin())


def batch_labels(leak: Leak, records: int, own: Tensor) -> list[int]:
    """Return the labels of several records, sorted; a label may occur more than once.

    For a loss with the gradient s(y) - target (cross-entropy, squared error), the bias's gradient for B records is
    mean s(y)_c - n_c / B with n_c records of class c. The attacker estimates the mean with its own records and assigns
    labels one by one, each to the class with the largest remainder of B (mean s(y)_c - gradient_c). Without a bias, row
    sums are divided by the mean sum of its own records' features.

    Source: the counting idea of LLG (Wainakh et al. 2022, arXiv 2105.09369), with own records instead of a fit.
    """
    head, sums, has_bias = _head(leak)
    with torch.no_grad(), record_calls([head]) as calls:
        outputs = leak.model(own)
    some = F.one_hot(outputs.new_zeros(len(outputs), dtype=torch.int64), outputs.shape[-1]).to(outputs)
    slope = (leak.loss.gradient(outputs, some) + some).mean(0)
    size = 1.0 if has_bias else float(calls[0].first_input.flatten(1).sum(1).mean())
    left = records * (slope - sums / (size or 1.0))
    labels = []
    for _ in range(records):
        labels.append(int(left.argmax()))
        left[labels[-1]] -= 1
    return sorted(labels)


def _head(leak: Leak) -> tuple[nn.Linear, Tensor, bool]:
    """Return the last Linear, the gradient of its bias (or the sum of each class's row), and whether it has a bias."""
    found = [(path, module) for path, module in leak.model.named_modules() if isinstance(module, nn.Linear)]
    if not found:
        raise BadArgument("labels", "the model has no Linear whose gradient would reveal labels", "use --method dlg")
    path, head = found[-1]
    weight, bias = (leak.gradients.get(f"{path}.{name}" if path else name) for name in ("weight", "bias"))
    if bias is not None:
        return head, bias, True
    assert weight is not None
    return head, weight.sum(1), False
