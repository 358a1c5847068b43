"""Gradients that an attacker obtains, and the labels that they reveal.

A client knows the difference between consecutive broadcasts, and an eavesdropper knows a victim's upload. A curious
server knows updates or, with secure aggregation, their sums. The sum of a round is the gradient of one large batch, so
every attack on a batch also applies to it. If the server opens two sums for the same model, one of them with an
additional client, the difference is that client's update.
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
from fedveil.graph.outputs import find_predictions
from fedveil.scheme import Broadcast, Loss, Update, client_view
from fedveil.scheme.broadcast import move_head
from fedveil.scheme.losses import one_hot

Gradients = dict[str, Tensor]
Simulation = Callable[[Tensor, Tensor, bool], Gradients]  # arguments: inputs, targets, and whether to build a graph
ULPS = 4  # bound on the rounding error of a weight; the step and the difference are rounded twice each


@dataclass(frozen=True, eq=False)
class Leak:
    """A gradient and the model at which it was computed, as far as the attacker knows them."""

    model: nn.Module  # the model, in the same mode (training or evaluation) as on the clients
    gradients: Gradients  # gradients of the mean loss of some records, by parameter name
    loss: Loss  # the loss that clients minimise
    mask: Mapping[str, Tensor] | None = None  # the elements that were received, by parameter name; None for all
    compare: Callable[[Gradients], Tensor] | None = None  # distance from the leak; overrides the method's distance
    simulate: Simulation | None = (
        None  # computes a client's update for inputs and targets; None for their mean gradient
    )

    def gradients_of(self, inputs: Tensor, targets: Tensor, *, graph: bool = False) -> Gradients:
        """Return the gradients that a client would send for these records; if `graph`, they are differentiable."""
        if self.simulate is not None:
            return self.simulate(inputs, targets, graph)
        return mean_gradients(self.model, self.loss, inputs, targets, graph=graph)

    def divide_by(self, reach: float) -> "Leak":
        """Divide a client's difference by `reach`, which yields the client's mean gradient (see `Round.reach`)."""
        if reach == 1:
            return self
        return dataclasses.replace(self, gradients={name: value / reach for name, value in self.gradients.items()})


def mean_gradients(model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor, *, graph: bool = False) -> Gradients:
    """Return the gradients of the mean loss by parameter name, without changing buffers.

    Targets are class indices, or rows of probabilities. If `graph` is true, the gradients are differentiable.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    outputs = find_predictions(model, torch.func.functional_call(model, buffers, (inputs,)))
    value = loss.values(outputs, one_hot(targets, outputs)).mean()
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    result = torch.autograd.grad(value, list(parameters.values()), create_graph=graph)
    return dict(zip(parameters, result, strict=True))


def from_difference(observation: Observation, index: int = -2) -> Leak:
    """Derive the mean gradient of all other clients from two broadcasts (V-diff).

        U = (W_t - W_{t+1}) / lr - share_a g_a,      U / (1 - share_a) = mean of g_k over k != a

    With two clients, the result is the victim's gradient. It is exact if the server uses plain SGD and broadcasts its
    model. For any other defence, it is the estimate of the published attack. Sketched weights are first mapped back to
    the layer's inputs, and their difference is sketched with the sketch of the earlier round (S_t^T S_t = q I).

    The attack needs the round at `index`, which the attacker must have answered, and the following round.
    """
    first, second = observation.consecutive_rounds(index)
    own_part, before, after = own_gradients(observation, first), full_weights(first.model), full_weights(second.model)
    change = sketch_weights(
        first.model, {name: (before[name] - after[name]) / observation.learning_rate for name in own_part}
    )
    others = {name: (change[name] - observation.share * own_part[name]) / (1 - observation.share) for name in own_part}
    return Leak(first.model, others, observation.loss)


def from_masked_difference(observation: Observation, index: int = -2) -> Leak:
    """Derive the gradient from two broadcasts, with a mask of the elements that PPDL's clients sent.

    An element that was not sent is 0, except for the rounding errors of two weights divided by lr (1 - share).
    """
    leak, mask = from_difference(observation, index), {}
    for name, value in leak.gradients.items():
        weight = leak.model.get_parameter(name).detach()
        rounding = ULPS * torch.finfo(value.dtype).eps * weight.abs()
        mask[name] = value.abs() > rounding / (observation.learning_rate * (1 - observation.share))
    return dataclasses.replace(leak, mask=mask)


def own_gradients(observation: Observation, observed_round: Round) -> Gradients:
    """Return the attacker's own gradient in a round; it is recomputed if the upload contains no plain gradient."""
    if isinstance(observed_round.upload, PlainUpdate):
        return dict(observed_round.upload.gradients)
    return mean_gradients(observed_round.model, observation.loss, *observation.own_batch(observed_round))


def full_weights(model: nn.Module) -> Gradients:
    """Return the parameters by name; the weight of a sketched layer is W~ S^T, with shape (units, inputs)."""
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, layer in sketched_layers(model):
        values[name] = layer.sketch.back_project(values[name])
    return values


def sketch_weights(model: nn.Module, values: Mapping[str, Tensor]) -> Gradients:
    """Map values from the shapes of `full_weights` to the parameters' shapes; a sketched layer's C becomes C S / q."""
    sketched = dict(values)
    for name, layer in sketched_layers(model):
        sketched[name] = layer.sketch.project(values[name]) / layer.sketch.inputs.shape[0]
    return sketched


def sketched_layers(model: nn.Module) -> list[tuple[str, SketchedLayer]]:
    """Return all sketched layers, each with the name of its weight."""
    result = [(path, module) for path, module in model.named_modules() if isinstance(module, SketchedLayer)]
    return [(f"{path}.weight" if path else "weight", module) for path, module in result]


def from_upload(observed_round: Round, upload: object, loss: Loss) -> Leak:
    """Return the gradient in a victim's upload, and the model at which it was computed (V-up).

    An eavesdropper or a leaky server has this view. With a veil, a client uploads gradients of the veiled model for
    several publicly known heads. For squared error, the first pass is the gradient at the base head. For other losses,
    the pass of the candidate t closest to 0 is used, which is the gradient at the head base - t r_a.
    """
    if isinstance(upload, PlainUpdate):
        return Leak(observed_round.model, dict(upload.gradients), loss)
    if not isinstance(upload, Update) or not isinstance(observed_round.broadcast, Broadcast):
        raise BadArgument("from_upload", f"cannot read gradients from an upload of type {type(upload).__name__}")
    with torch.no_grad():
        model = client_view(observed_round.model, observed_round.broadcast, centred=True)
        head, pass_index = observed_round.broadcast.head, 0
        if head is not None and len(head.candidates):
            pass_index = int(head.candidates.square().sum(1).argmin())
            move_head(model, head, -head.noise(head.direction)[pass_index])
    return Leak(model, {name: passes[pass_index] for name, passes in upload.passes.items()}, loss)


@dataclass(frozen=True, eq=False)
class Sum:
    """The sums that the server opens in a round: sum_k n_k g_k in float64 by parameter name, and sum_k n_k."""

    values: Gradients
    records: int

    def __sub__(self, other: "Sum") -> "Sum":
        values = {name: value - other.values[name] for name, value in self.values.items()}
        return Sum(values, self.records - other.records)

    def mean(self) -> Gradients:
        """Return the gradient of the mean loss over the records."""
        if self.records < 1:
            raise BadArgument(
                "Sum",
                f"expected a sum over at least one record, got {self.records}",
                "subtract a sum over fewer clients",
            )
        return {name: value / self.records for name, value in self.values.items()}


def secure_sum(gradients: Sequence[Mapping[str, Tensor]], records: Sequence[int]) -> Sum:
    """Return the sum of the clients' gradients, weighted by their numbers of records, as secure aggregation opens it.

    Values are encoded in fixed point (`fedveil.secagg.fixed`); the largest value limits the number of fractional bits.
    """
    from fedveil.secagg import fixed  # imported here because a default audit does not need it

    values = {}
    for name in gradients[0]:
        pairs = zip(gradients, records, strict=True)
        weighted = torch.stack([count * gradient[name].detach().double() for gradient, count in pairs])
        bits = fixed.bits(len(weighted), fixed.exponent(float(weighted.abs().max())))
        words = fixed.encode(weighted.cpu().numpy(), bits).sum(0)
        values[name] = torch.from_numpy(fixed.decode(words, bits)).to(weighted)
    return Sum(values, sum(records))


def single_label(leak: Leak) -> int:
    """Return the label of a single record (iDLG, arXiv 2001.02610).

    The head's gradient for class c is (p_c - [c = label]) h, where h is the feature vector. If no feature is negative,
    only the label's row has a negative sum, so the function returns the class with the smallest sum. If the head has a
    bias, its gradient is used instead: it is p_c - [c = label] for any features.
    """
    return int(_head(leak)[1].argmin())


def batch_labels(leak: Leak, records: int, own_inputs: Tensor) -> list[int]:
    """Return the labels of several records, sorted; a label may occur more than once.

    For a loss with gradient s(y) - target (cross-entropy, squared error), the gradient of the bias for B records is
    mean s(y)_c - n_c / B, where n_c is the number of records of class c. The attacker estimates the mean from its own
    records. It then assigns the B labels one at a time, each to the class with the largest remainder of
    B (mean s(y)_c - gradient_c). Without a bias, row sums are divided by the mean sum of features of the attacker's
    records.

    The method follows LLG (Wainakh et al. 2022, arXiv 2105.09369), but estimates the mean from the attacker's own
    records.
    """
    head, sums, has_bias = _head(leak)
    with torch.no_grad(), record_calls([head]) as calls:
        outputs = leak.model(own_inputs)
    class_zero = F.one_hot(outputs.new_zeros(len(outputs), dtype=torch.int64), outputs.shape[-1]).to(outputs)
    mean_slope = (leak.loss.gradient(outputs, class_zero) + class_zero).mean(0)
    feature_sum = 1.0 if has_bias else float(calls[0].first_input.flatten(1).sum(1).mean())
    remaining = records * (mean_slope - sums / (feature_sum or 1.0))
    labels = []
    for _ in range(records):
        labels.append(int(remaining.argmax()))
        remaining[labels[-1]] -= 1
    return sorted(labels)


def _head(leak: Leak) -> tuple[nn.Linear, Tensor, bool]:
    """Return the last Linear, the gradient of its bias (or the row sums of its weight), and whether it has a bias."""
    linears = [(path, module) for path, module in leak.model.named_modules() if isinstance(module, nn.Linear)]
    if not linears:
        raise BadArgument("labels", "the model has no Linear to read the labels from", "use --method dlg")
    path, head = linears[-1]
    weight, bias = (leak.gradients.get(f"{path}.{name}" if path else name) for name in ("weight", "bias"))
    if bias is not None:
        return head, bias, True
    assert weight is not None
    return head, weight.sum(1), False
