"""Sums of per-record gradients, each clipped to a maximum norm.

    S_j = sum_i g_ij min(1, clip / |g_ij|)

Here, g_ij is the gradient of record i's loss for candidate j of a veil's head. Without a veil, there is only one
candidate. The norm is over all parameters. The sum is computed in one of three ways (tests/privacy/test_gradients.py):

- For a stack of Linear and ReLU layers, the gradient of a layer is an outer product, so its norm is a product of two
  norms, and one matrix product computes the clipped sum. No per-record gradient is computed.
- Otherwise, torch.func.vmap runs over chunks of records. Linear layers with one row per record are treated as above.
- Models that vmap does not support, and operations after a veiled head, are run for one record at a time.

One record must not affect how the others are computed, because a server that chooses the weights can make
differences in rounding visible. The method is therefore chosen with a record of zeros, buffers are copied for every
record, attributes of modules are restored, and the position of a record in a batch should be random
(`RecordPrivateClient.sample`).

Gradients are computed in the model's dtype, then scaled and summed in float64. Each contribution has a norm of at most
`clip` in exact arithmetic, and `summation_error` bounds the rounding error of the sum.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedveil.checks import suspend_autocast
from fedveil.errors import BadArgument
from fedveil.graph.inputs import Inputs, count, each
from fedveil.privacy.isolation import attempt, keep_attributes
from fedveil.privacy.row_layers import ForwardVaries, Product, RowLayer, find_row_layers, norms, run_with_taps
from fedveil.scheme.broadcast import Broadcast, PublicHead
from fedveil.scheme.client import add_alpha, backpropagate, client_step, cotangents, find_layer_paths, forward
from fedveil.scheme.losses import AUTOGRAD_LOSSES, Loss
from fedveil.scheme.outputs import are_class_indices, compute_outputs, expand_classes, head_axis, output_gradient
from fedveil.wire import Tensors

EPS = torch.finfo(torch.float64).eps
MEMORY = 2**28  # default limit for per-record gradients, in bytes
CHUNK_RECORDS, CHUNK_BYTES = 32, 2**25  # larger chunks use at most CHUNK_BYTES, for fast allocation
RecordFunction = Callable[[Inputs, Tensor], Tensors]
Backward = Callable[[Tensor], tuple[Tensors, Tensors]]


@dataclass(frozen=True, eq=False)
class RecordGradients:
    """The computation of per-record gradients.

    Attributes:
        model: the architecture.
        values: the model's parameters and buffers; a veiled head has an extra row for alpha.
        trainable: names of the parameters that receive a gradient.
        loss_gradients: function that returns the derivatives of the losses with respect to the outputs, by candidate.
        candidates: the number of candidates.
        head: the head of a veil.
        compute_single: function that returns the gradients of one record, one row per candidate.
        loss: the loss whose derivatives `loss_gradients` returns.
    """

    model: nn.Module
    values: Tensors
    trainable: tuple[str, ...]
    loss_gradients: Callable[[Tensor, Tensor], Tensor]
    candidates: int
    head: PublicHead | None
    compute_single: RecordFunction
    loss: Loss

    @classmethod
    def from_model(cls, model: nn.Module, loss: Loss) -> "RecordGradients":
        """Return an object that computes the gradients of a plain model."""
        refuse_coupling(loss)
        axis = head_axis(model)
        parameters = {name: value.detach() for name, value in model.named_parameters()}
        buffers = {name: value.detach() for name, value in model.named_buffers()}
        trainable = tuple([name for name, value in model.named_parameters() if value.requires_grad])

        def loss_gradients(outputs: Tensor, targets: Tensor) -> Tensor:
            return output_gradient(loss, outputs, targets, axis).unsqueeze(0)

        def compute_single(inputs: Inputs, targets: Tensor) -> Tensors:
            leaves = {name: parameters[name].requires_grad_() for name in trainable}
            copies = {name: value.clone() for name, value in buffers.items()}  # a forward pass may change them
            with torch.enable_grad():
                outputs = compute_outputs(model, inputs, parameters | leaves | copies)
                cotangent = loss_gradients(outputs.detach(), targets)[0]
                result = torch.autograd.grad(outputs, list(leaves.values()), cotangent, allow_unused=True)
            pairs = zip(leaves.items(), result, strict=True)
            return {name: (torch.zeros_like(p) if value is None else value).unsqueeze(0) for (name, p), value in pairs}

        return cls(model, parameters | buffers, trainable, loss_gradients, 1, None, compute_single, loss)

    @classmethod
    def from_broadcast(cls, model: nn.Module, broadcast: Broadcast) -> "RecordGradients":
        """Return an object that computes the gradients of a veiled model for each candidate of its head."""
        refuse_coupling(broadcast.loss)
        head = broadcast.head
        if head is not None and not head.has_candidates:
            message = "the paper's terms for squared error do not reveal the norm of a record's gradient"
            raise BadArgument("privacy", message, "use fedveil.Veil(decoys=2)")
        values = add_alpha(head, broadcast.parameters) if head else dict(broadcast.parameters)

        def loss_gradients(outputs: Tensor, targets: Tensor) -> Tensor:
            ones = torch.ones(len(targets), dtype=outputs.dtype, device=outputs.device)
            return cotangents(broadcast.loss, head, outputs, targets, ones)

        def compute_single(inputs: Inputs, targets: Tensor) -> Tensors:
            return client_step(model, broadcast, inputs, targets).passes

        all_values, candidates = values | dict(broadcast.buffers), len(head.candidates) if head else 1
        return cls(
            model, all_values, broadcast.trainable, loss_gradients, candidates, head, compute_single, broadcast.loss
        )

    def fresh_values(self, leaves: Tensors) -> Tensors:
        """Return all values, with `leaves` as parameters and copies of the buffers, which a forward pass may change."""
        buffers = {name: self.values[name].clone() for name, _ in self.model.named_buffers() if name in self.values}
        return self.values | buffers | leaves

    def count_values(self) -> int:
        """Return the number of values in one gradient."""
        return sum(self.trim_alpha(name, self.values[name].unsqueeze(0)).numel() for name in self.trainable)

    def trim_alpha(self, name: str, rows: Tensor) -> Tensor:
        """Return the gradients of a parameter, one per row, without the part for alpha."""
        head = self.head
        if head is None or name not in (head.weight, head.bias):
            return rows
        dim = 1 + (head.dim if name == head.weight else 0)
        return rows.narrow(dim, 0, len(head.direction))


def dense_targets(loss: Loss, head: PublicHead | None, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return dense targets, for outputs with one row per record."""
    outputs = outputs if head is None else outputs[:, : len(head.direction)]
    are_classes = head is None and are_class_indices(outputs, targets) and targets.numel() != outputs.numel()
    return expand_classes(targets, outputs) if are_classes else loss.dense(targets, outputs)


def refuse_coupling(loss: Loss) -> None:
    """Refuse a loss that does not have a separate gradient for each record."""
    if loss.couples:
        message = f"{loss.name} compares records of a batch with one another, so single records have no gradient"
        fix = "use a loss with one value per record, such as cross_entropy, or fedveil.CrossEntropy(weight=...)"
        raise BadArgument("privacy", message, fix)


def summation_error(records: int, clip: float) -> float:
    """Bound the norm of the rounding error of a sum of `records` clipped gradients in float64."""
    return 2 * records * (records + 8) * EPS * clip


@torch.no_grad()
@suspend_autocast()
def clipped_sums(
    task: RecordGradients, inputs: Inputs, targets: Tensor, included: Tensor, clip: float, memory: int = MEMORY
) -> Tensors:
    """Return the sum of clipped gradients of each parameter in float64, with one row per candidate.

    A record whose gradient is not finite contributes 0. No error is raised, because it would reveal the record.

    Args:
        task: the computation of the gradients.
        inputs: the inputs of the records.
        targets: their targets.
        included: a mask of the records to include; gradients of the other records are computed and discarded.
        clip: maximum norm of a record's contribution.
        memory: maximum number of bytes for per-record gradients; larger batches are processed in chunks.
    """
    paths = find_layer_paths(task.model, inputs, task.values) if task.head is None or not task.head.is_inner else None
    chunks: Iterable[tuple[slice, GradientParts]] = _chunks(task, inputs, targets, included, memory)
    if paths and isinstance(inputs, Tensor):
        chunks = _stack_chunks(task, paths, inputs, targets, included, memory)
    total: Tensors = {}
    for rows, result in chunks:
        for name, value in _clip(task, *result, included[rows], clip).items():
            total[name] = total[name].add_(value) if name in total else value
    for name in () if total else task.trainable:  # there are no records
        total[name] = _zero_gradient(task, name).double()
    return {name: total[name] for name in task.trainable}


def clip_factors(squares: Tensor, included: Tensor, clip: float, num_terms: int) -> Tensor:
    """Return the factor that clips each record's gradient, given its squared norm, a sum of `num_terms` squares."""
    slack = 1 + (num_terms + 16) * EPS
    norms = squares.sqrt() * slack
    factors = torch.where(norms > clip, clip / norms, torch.ones_like(norms)) / slack
    return torch.where(included & squares.isfinite(), factors, torch.zeros_like(factors))


GradientParts = tuple[
    Tensors, list[Product]
]  # gradients with dims (records, candidates, ...); products for other parameters


def _stack_chunks(
    task: RecordGradients, paths: Sequence[str | None], inputs: Tensor, targets: Tensor, included: Tensor, memory: int
) -> Iterator[tuple[slice, GradientParts]]:
    """Yield chunks of records whose activations and cotangents in float64 need at most `memory` bytes."""
    widths = [task.values[f"{path}.weight"].shape for path in paths if path is not None]
    bytes_per_record = 8 * sum(
        in_features + (1 + task.candidates) * out_features for out_features, in_features in widths
    )
    size = max(1, min(CHUNK_BYTES, memory) // bytes_per_record)
    for start in range(0, len(inputs), size):
        rows = slice(start, start + size)
        yield rows, ({}, _stack_products(task, paths, inputs[rows], targets[rows], included[rows]))


def _stack_products(
    task: RecordGradients, paths: Sequence[str | None], inputs: Tensor, targets: Tensor, included: Tensor
) -> list[Product]:
    """Return the products of a stack of Linear and ReLU layers."""
    activations = forward(paths, task.values, inputs)
    steps = backpropagate(
        paths, task.values, activations, separate_loss_gradients(task, activations[-1], targets, included)
    )
    result = [Product.from_layer(task, f"{path}.weight", f"{path}.bias", *step) for path, *step in steps]
    return [product for product in result if product.weight or product.bias]


def _clip(task: RecordGradients, gradients: Tensors, products: list[Product], included: Tensor, clip: float) -> Tensors:
    """Return the clipped sums of a chunk; `gradients` is emptied to free memory."""
    parts = [torch.square(norms(value.flatten(2))).T for value in gradients.values()]
    squares = torch.stack(parts + [product.squares() for product in products]).sum(0)
    factors = clip_factors(squares, included, clip, task.count_values())
    all_included, result = bool(factors.all()), Tensors()
    for name in list(gradients):
        value = gradients.pop(name)  # to free memory
        flat = value.flatten(2) if all_included else value.flatten(2).masked_fill((factors.T == 0).unsqueeze(2), 0.0)
        result[name] = torch.einsum("kr,rkp->kp", factors, flat.double()).view(value.shape[1:])
    for product in products:
        result |= product.sums(factors, all_included)
    return result


def _chunks(
    task: RecordGradients, inputs: Inputs, targets: Tensor, included: Tensor, memory: int
) -> Iterator[tuple[slice, GradientParts]]:
    """Yield chunks of records whose gradients need at most `memory` bytes."""
    records = count(inputs)
    mode = choose_vmap(task, inputs, targets) if records else None
    if mode is not None and mode.outputs is not None:
        targets = dense_targets(task.loss, task.head, mode.outputs.expand(records, -1), targets)
    size = _chunk_size(task, mode.layers if mode else [], memory)
    for start in range(0, records, size):
        rows = slice(start, min(start + size, records))
        chunk, row_targets = _take(inputs, rows), targets[rows]
        chunk_included = included[rows]
        with keep_attributes(task.model):
            result = (
                _run_vmap(task, mode, chunk, row_targets, chunk_included)
                if mode
                else (_run_loop(task, chunk, row_targets, chunk_included), [])
            )
        yield rows, result


class VmapMode(NamedTuple):
    """The use of vmap: layers whose gradients are products, and outputs if vmap also computes the loss gradients."""

    layers: list[RowLayer]
    outputs: Tensor | None


def choose_vmap(task: RecordGradients, inputs: Inputs, targets: Tensor) -> VmapMode | None:
    """Choose how to compute per-record gradients; return None if records must be processed one at a time.

    The choice is made with zeros instead of records, because it affects rounding for all records. A model that changes
    its parameters is refused, because each record would then affect the next.
    """
    zeros, target = each(lambda tensor: torch.zeros_like(tensor[:2]), inputs), torch.zeros_like(targets[:2])
    versions = {name: value._version for name, value in task.values.items()}
    with keep_attributes(task.model):
        mode = None if needs_loop(task) else attempt(partial(_try_vmap, task, zeros, target))
        if mode is None:
            attempt(lambda: task.compute_single(_take(zeros, slice(1)), target[:1]))  # zeros may not be valid inputs
    if changed := [name for name, value in task.values.items() if value._version != versions[name]]:
        raise BadArgument(
            "privacy", f"forward changes {changed[0]}, so records affect one another", "remove the code that changes it"
        )
    return mode


def _try_vmap(task: RecordGradients, zeros: Inputs, target: Tensor) -> VmapMode:
    """Return how vmap computes gradients, tested on zeros; raise an error if it does not support the model."""
    included = torch.ones(len(target), dtype=torch.bool)
    layers, outputs = find_row_layers(task, zeros)
    loss_inside = outputs.dim() == 2 and not isinstance(task.loss, AUTOGRAD_LOSSES)
    dense = dense_targets(task.loss, task.head, outputs.expand(len(target), -1), target) if loss_inside else target
    mode = VmapMode(layers, outputs if loss_inside else None)
    try:
        _run_vmap(task, mode, zeros, dense, included)
    except ForwardVaries:
        mode = VmapMode([], mode.outputs)
        _run_vmap(task, mode, zeros, dense, included)
    return mode


def separate_loss_gradients(task: RecordGradients, outputs: Tensor, targets: Tensor, included: Tensor) -> Tensor:
    """Return `task.loss_gradients`, computed one record at a time if the loss may mix records.

    Such a loss may fail for records that are not included, such as zeros.
    """
    if not isinstance(task.loss, AUTOGRAD_LOSSES):
        return task.loss_gradients(outputs, targets)
    result = []
    for index, is_included in enumerate(included.tolist()):
        row = slice(index, index + 1)
        compute = partial(task.loss_gradients, outputs[row], targets[row])
        value = compute() if is_included else attempt(compute)
        result.append(
            torch.zeros_like(outputs[row]).expand(task.candidates, *outputs[row].shape) if value is None else value
        )
    return torch.cat(result, dim=1)


def _chunk_size(task: RecordGradients, layers: list[RowLayer], memory: int) -> int:
    """Return the number of records per chunk; their gradients, one of them in float64, need at most `memory` bytes."""
    sizes = [task.values[name].numel() for name in set(task.trainable) - {layer.weight for layer in layers}]
    row_values = sum(task.values[layer.weight].shape[1] + layer.tap.numel() for layer in layers)
    copies = min(2, task.candidates)  # stacking several candidates copies them
    itemsize = copies * max(value.dtype.itemsize for value in task.values.values())
    bytes_per_record = task.candidates * (itemsize * (sum(sizes) + row_values) + 16 * max(sizes, default=0))
    return max(1, min(CHUNK_RECORDS, memory // bytes_per_record), min(CHUNK_BYTES, memory) // bytes_per_record)


def _take(inputs: Inputs, rows: slice) -> Inputs:
    return each(lambda tensor: tensor[rows], inputs)


def needs_loop(task: RecordGradients) -> bool:
    """Return whether the layers after a veiled head run separately for each candidate."""
    return task.head is not None and task.head.tail != "alike"


def _run_vmap(
    task: RecordGradients, mode: VmapMode, inputs: Inputs, targets: Tensor, included: Tensor
) -> GradientParts:
    """Compute the gradients of records with vmap, and products for layers with one row per record."""
    layers, loss_inside = mode.layers, mode.outputs is not None
    product_names = {name for layer in layers for name in (layer.weight, layer.bias)}
    leaves = {name: task.values[name] for name in task.trainable if name not in product_names}
    taps = {layer.weight: layer.tap for layer in layers}
    if not loss_inside:
        device = targets.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):  # dropout drops the same units again
            run_all = torch.func.vmap(lambda record: run_with_taps(task, {}, {}, record)[0], randomness="different")
            outputs = run_all(inputs)
        targets = separate_loss_gradients(task, outputs, targets, included).movedim(1, 0)

    def gradients(record: Inputs, target: Tensor) -> tuple[Tensors, Tensors, Tensors]:
        run = torch.func.vjp(lambda value, taps: run_with_taps(task, value, taps, record), leaves, taps, has_aux=True)
        outputs, backward, layer_inputs = cast(tuple[Tensor, Backward, Tensors], run)
        loss_gradients = (
            task.loss_gradients(outputs.unsqueeze(0), target.unsqueeze(0)).squeeze(1) if loss_inside else target
        )
        rows = [backward(row) for row in loss_gradients]
        join_rows = torch.cat if len(rows) > 1 else itemgetter(0)  # avoids a copy
        result = {
            name: join_rows([task.trim_alpha(name, row[0][name].unsqueeze(0)) for row in rows]) for name in leaves
        }
        return result, {name: join_rows([row[1][name].reshape(1, -1) for row in rows]) for name in taps}, layer_inputs

    with sdpa_kernel(SDPBackend.MATH):  # vmap does not support the other backends
        result, cotangents, layer_inputs = torch.func.vmap(gradients, randomness="different")(inputs, targets)
    pairs = [(cotangents[layer.weight].movedim(1, 0), layer_inputs[layer.weight].flatten(1)) for layer in layers]
    return result, [
        Product.from_layer(task, layer.weight, layer.bias, *pair) for layer, pair in zip(layers, pairs, strict=True)
    ]


def _run_loop(task: RecordGradients, inputs: Inputs, targets: Tensor, included: Tensor) -> Tensors:
    """Compute the gradients of one record at a time; ignore failures for records that are not included."""
    result = []
    for index, is_included in enumerate(included.tolist()):
        row = slice(index, index + 1)
        compute = partial(task.compute_single, _take(inputs, row), targets[row])
        with keep_attributes(task.model):
            value = compute() if is_included else attempt(compute)
        result.append({name: _zero_gradient(task, name) for name in task.trainable} if value is None else value)
    return {name: torch.stack([record[name] for record in result]) for name in task.trainable}


def _zero_gradient(task: RecordGradients, name: str) -> Tensor:
    """Return a zero gradient of a parameter for one record, with one row per candidate."""
    template = task.values[name].expand(task.candidates, *task.values[name].shape)
    return torch.zeros_like(task.trim_alpha(name, template))
