"""Rules for sums of products: Linear, convolutions, Embedding, matrix products and attention.

Dims have labels, as in torch.einsum. `project` multiplies an activation by a weight of the model: the weight cancels
the factors of its input, and new units begin at its output. `contract` multiplies two activations, which must carry
inverse factors along the dims that are summed over.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.graph.calls import Activation, Call, NoRule, Operand, Outcome, StateTensor, as_state, as_tensor, rule
from fedveil.graph.operations import CONVOLUTIONS, count_spatial_dims
from fedveil.graph.rules.elementwise import add_tensors
from fedveil.graph.units import Dims, Symmetry, Units, distinct_dims, reshape_factor, split_first_dim, varying_dims

Labels = Sequence[str]


def rearrange(factor: Tensor, labels: Labels, target: Labels) -> Tensor:
    """Rearrange a factor with dims `labels` to dims `target`; the factor is constant along new dims."""
    kept_dims = [labels.index(label) for label in target if label in labels]
    sizes = [factor.shape[labels.index(label)] if label in labels else 1 for label in target]
    return factor.permute(kept_dims + [d for d in range(len(labels)) if d not in kept_dims]).reshape(sizes)


def find_dims(labels: Labels, names: Collection[str]) -> Dims:
    """Return the indices of the dims whose labels are in `names`."""
    return frozenset(d for d, label in enumerate(labels) if label in names)


@dataclass(frozen=True)
class Weight:
    """A parameter as an operand of a product: a view of it, with a label for each dim."""

    tensor: StateTensor
    view: Tensor
    labels: tuple[str, ...]

    def group(self, groups: int) -> "Weight":
        """Return the weight with its first dim split into groups."""
        return Weight(self.tensor, split_first_dim(self.view, groups), ("g", *self.labels))

    def attach(self, scale: Sequence[Tensor], order: Sequence[Tensor], space: Labels) -> None:
        """Record the noise on the weight; the dims of the factors have the labels `space`."""
        units = Units(tuple(scale), tuple(order))
        self.tensor.attach(units.map(lambda factor: rearrange(factor, space, self.labels)), self.view)


def project(call: Call, x: Units, labels: Labels, weight: Weight, bias: Weight | None, out: Labels) -> Units:
    """Multiply by a weight. Input dims in neither the weight nor the output are mixed. Heads get no new units."""
    ledger, sizes = call.ledger, weight.view.shape
    space = list(dict.fromkeys([*weight.labels, *labels, *out]))
    weight_dims, inputs, outputs = (find_dims(space, names) for names in (weight.labels, labels, out))
    summed, shared, outer = (
        (weight_dims & inputs) - outputs,
        weight_dims & inputs & outputs,
        (inputs & outputs) - weight_dims,
    )
    x = x.map(lambda factor: rearrange(factor, labels, space))
    output_scale, columns = [], []
    for factor in x.scale:
        dims = varying_dims(factor)
        if dims and dims <= outer and bias is None and not call.is_head:
            output_scale.append(factor)
        else:
            columns.append(-ledger.merge_scale(factor, inputs - weight_dims, call.where))
    output_order: list[Tensor] = []  # order factors that do not affect the weight
    weight_order: list[Tensor] = []  # order factors that also permute the weight
    parents: list[Tensor] = []  # parents of the moving order factors, along shared dims
    for factor in x.order:
        dims = varying_dims(factor)
        if dims and dims <= outer:
            output_order.append(factor)
        elif dims & weight_dims and dims <= weight_dims | outer:
            weight_order += call.merge_order([factor], inputs - weight_dims)
            parents += ledger.fold(weight_order[-1:], summed) if dims & shared else []
        elif dims:
            ledger.fix(factor)
    if call.is_head:
        weight.attach(columns, weight_order, space)
    else:
        shape = [sizes[d] if d in weight_dims & outputs else 1 for d in range(len(space))]
        rows = ledger.create_scale(shape, weight.tensor.name)
        if shared and all(sizes[d] == 1 for d in summed):  # depthwise: the outputs have the same order as the inputs
            order = parents[0].expand(shape) if parents else torch.zeros_like(rows)
        else:
            order = ledger.create_order(shape)
            _tie_to_parents(call, order, outputs - shared, parents)
        if order.numel() > 1:
            ledger.require_equal_counts(order)
        weight.attach([rows, *columns], [order, *weight_order], space)
        if bias is not None:
            bias.attach([rows], [order], space)
        output_scale, output_order = [*output_scale, rows], [*output_order, order]
    return Units(tuple(output_scale), tuple(output_order)).map(lambda factor: rearrange(factor, space, out))


def _tie_to_parents(call: Call, order: Tensor, inner: Dims, parents: Sequence[Tensor]) -> None:
    """Allow the outputs of a group to move only together with the group's inputs."""
    if varying_dims(order) - inner:
        (outer_order,) = call.ledger.fold([order], inner)
        for parent in parents:
            call.ledger.unite_order(outer_order, parent)
        if not parents:
            call.ledger.fix(outer_order)


def contract(call: Call, x: Operand, labels: Labels, y: Operand, other_labels: Labels, out: Labels) -> Units:
    """Multiply two activations, and sum over the dims that are not in the output."""
    ledger = call.ledger
    shared_labels = [label for label in labels if label in other_labels and label in out]
    summed_labels = sorted(label for label in labels if label in other_labels and label not in out)
    space = list(dict.fromkeys([*shared_labels, *summed_labels, *labels, *other_labels]))
    all_dims, shared, summed = (find_dims(space, names) for names in (space, shared_labels, summed_labels))
    sides = ((x, labels), (y, other_labels))
    units = [operand.units.map(lambda f, names=names: rearrange(f, names, space)) for operand, names in sides]  # type: ignore[misc]
    distinct = [find_dims(space, [names[d] for d in distinct_dims(operand.value)]) for operand, names in sides]
    unshared = all_dims - shared - summed
    scale = [f for side in units for f in side.scale if not varying_dims(f) & summed]
    x_scale, y_scale = (
        call.merge_scale([f for f in side.scale if varying_dims(f) & summed], unshared) for side in units
    )
    if x_scale and y_scale:
        reason = "the two tensors carry different factors along the dims that it sums over"
        ledger.reconcile_scale(x_scale, [-factor for factor in y_scale], call.where, reason)
    else:
        scale += call.merge_scale(x_scale or y_scale, summed)
    free = [f for side in units for f in side.order if not varying_dims(f) & summed and varying_dims(f) - shared]
    inner_factors = [
        [ledger.merge_order(f, unshared) for f in side.order if varying_dims(f) & summed] for side in units
    ]
    outer_factors = [
        [f for f in side.order if varying_dims(f) & shared and not varying_dims(f) & summed] for side in units
    ]
    outer_order = [ledger.fold(factors, unshared) for factors in outer_factors]
    inner_order = ledger.reconcile_order(inner_factors[0], distinct[0], inner_factors[1], distinct[1])
    parents = ledger.fold(inner_order, summed)
    blocks = ledger.reconcile_order(outer_order[0], distinct[0], outer_order[1], distinct[1])
    for factor in parents:
        blocks = ledger.reconcile_order([factor], all_dims, blocks, all_dims) if blocks else (factor,)
    used_dims = frozenset[int]().union(*map(varying_dims, free))
    order = [*free, *[factor for factor in blocks if not varying_dims(factor) & used_dims]]
    return Units(tuple(scale), tuple(order)).map(lambda factor: rearrange(factor, space, out))


# Operations.


def _bias(call: Call, label: str) -> Weight | None:
    bias = None if call.is_head else call.state("bias")
    return None if bias is None else Weight(bias, bias.value, (label,))


@rule("linear")
def linear(call: Call) -> Outcome:
    """Compute X W^T + b."""
    x, weight = call.tensor("input"), call.tensor("weight")
    batch_labels = [f"x{d}" for d in range(x.value.dim() - 1)]
    labels, out = [*batch_labels, "k"], [*batch_labels, "j"]
    bias = call["bias"]
    if isinstance(weight, StateTensor):
        weight_view, has_state_bias = (
            Weight(weight, weight.value, ("j", "k")),
            bias is None or isinstance(bias, StateTensor),
        )
        units = project(call, x.units, labels, weight_view, _bias(call, "j") if has_state_bias else None, out)
    else:
        has_state_bias, units = bias is None, contract(call, x, labels, weight, ["j", "k"], out)
    return units if has_state_bias else add_tensors(call, Activation(call.value, units), as_tensor(bias))


@rule(*CONVOLUTIONS)
def convolution(call: Call) -> Outcome:
    """Convolve with a weight (outputs, inputs / groups, ...), or (inputs, outputs / groups, ...) if transposed."""
    spatial, (groups,) = count_spatial_dims(call.name), call.integers("groups")
    kernel, pixels, results = ([f"{kind}{n}" for n in range(spatial)] for kind in ("kernel", "pixel", "result"))
    rows = ("i", "o") if "transpose" in call.name else ("o", "i")
    tensor, bias = as_state(call["weight"]), _bias(call, "o")
    weight = Weight(tensor, tensor.value, (*rows, *kernel)).group(groups)
    x = call.tensor("input")
    input_shape, output_shape = x.value.shape, call.value.shape
    channel = len(input_shape) - spatial - 1
    split, merged = (
        (*shape[:channel], groups, shape[channel] // groups, *shape[channel + 1 :])
        for shape in (input_shape, output_shape)
    )
    units = x.units.map(lambda factor: reshape_factor(factor, input_shape, split))
    batch = ["n"] * channel
    labels, out = [*batch, "g", "i", *pixels], [*batch, "g", "o", *results]
    result = project(call, units, labels, weight, bias and bias.group(groups), out)
    return result.map(lambda factor: reshape_factor(factor, merged, output_shape))


@rule("matmul", "bmm", "mm", "mv", "dot")
def matmul(call: Call) -> Outcome:
    """Multiply two activations, or an activation and a parameter, as matrices."""
    return _multiply_matrices(call, call.tensor("self"), call.tensor("other", "mat2", "vec", "tensor"))


@rule("addmm", "baddbmm", "addmv")
def addmm(call: Call) -> Outcome:
    """Multiply two matrices and add a third."""
    units = _multiply_matrices(call, call.tensor("mat1", "batch1", "mat"), call.tensor("mat2", "batch2", "vec"))
    return add_tensors(call, Activation(call.value, units), call.tensor("self"))


def _multiply_matrices(call: Call, a: Operand, b: Operand) -> Units:
    rank = max(a.value.dim(), b.value.dim())
    batch_labels = [f"b{n}" for n in range(rank - 2)]
    a_labels = [*batch_labels[rank - a.value.dim() :], "i", "k"] if a.value.dim() > 1 else ["k"]
    b_labels = [*batch_labels[rank - b.value.dim() :], "k", "j"] if b.value.dim() > 1 else ["k"]
    out = [*batch_labels, *[label for label in (*a_labels, *b_labels) if label in ("i", "j")]]
    return _multiply(call, a, a_labels, b, b_labels, out)


def _multiply(call: Call, a: Operand, a_labels: Labels, b: Operand, b_labels: Labels, out: Labels) -> Units:
    """Use `project` if one of the tensors is a parameter, otherwise `contract`."""
    for x, x_labels, weight, labels in ((a, a_labels, b, b_labels), (b, b_labels, a, a_labels)):
        if isinstance(weight, StateTensor) and weight.is_parameter and not isinstance(x, StateTensor):
            sizes, x_sizes = (
                zip(weight.value.shape, labels, strict=True),
                dict(zip(x_labels, x.value.shape, strict=True)),
            )
            if any(n == 1 and x_sizes.get(label, 1) > 1 and label.startswith("b") for n, label in sizes):
                break  # a weight that is broadcast over heads is treated as an activation
            return project(call, x.units, x_labels, Weight(weight, weight.value, tuple(labels)), None, out)
    return contract(call, a, a_labels, b, b_labels, out)


@rule("einsum")
def einsum(call: Call) -> Outcome:
    """Multiply two tensors according to an einsum equation without an ellipsis or repeated letters."""
    equation, operands = str(call["equation"]).replace(" ", ""), call.sequence("tensors")
    inputs, _, out = equation.partition("->")
    terms = inputs.split(",")
    is_supported = (
        "->" in equation and "." not in equation and all(len(set(term)) == len(term) for term in [*terms, out])
    )
    if len(operands) != 2 or not is_supported:
        raise NoRule("it is an einsum with an ellipsis, a repeated letter, or a number of tensors other than two")
    a_labels, b_labels = (list(term) for term in terms)
    if any(
        label not in out and label not in other_labels
        for term_labels, other_labels in ((a_labels, b_labels), (b_labels, a_labels))
        for label in term_labels
    ):
        raise NoRule("it is an einsum that sums over a letter that only one tensor has")
    return _multiply(call, as_tensor(operands[0]), a_labels, as_tensor(operands[1]), b_labels, list(out))


@rule("embedding", "embedding_bag", "_embedding_bag")
def embedding(call: Call) -> Outcome:
    """Look up rows and possibly reduce them. Columns may be permuted and scaled; "max" allows only positive factors."""
    if call["sparse"]:
        raise NoRule("its gradient is sparse")
    samples = call.get("per_sample_weights")
    if isinstance(samples, Operand) and any(samples.units[:2]):
        raise NoRule("its per_sample_weights are computed")
    weight = as_state(call["weight"])
    size = weight.value.shape[1]
    units = Units((call.ledger.create_scale((1, size), weight.name),), (call.ledger.create_order((1, size)),))
    weight.attach(units)
    if call.get("mode") == 2:
        call.limit(units.scale, Symmetry.POSITIVE)
    leading = [1] * (call.rank - 1 if call.name == "embedding" else 1)
    return call.pack(units.map(lambda factor: factor.reshape([*leading, size])))


def _repeat_heads(operand: Operand, times: int) -> Operand:
    """Repeat the heads of keys or values in grouped-query attention, so that there is one for each query head."""
    if times == 1:
        return operand
    units = operand.units.map(lambda f: f.repeat_interleave(times, -3) if f.shape[-3] > 1 else f)
    return Activation(operand.value.repeat_interleave(times, -3), units)


@rule("scaled_dot_product_attention")
def attention(call: Call) -> Outcome:
    """Compute softmax(q k^T + mask) v with the rules for its parts; queries and keys carry inverse factors."""
    q, k, v = (call.tensor(name) for name in ("query", "key", "value"))
    times = q.value.shape[-3] // k.value.shape[-3] if call["enable_gqa"] else 1
    k, v = _repeat_heads(k, times), _repeat_heads(v, times)
    batch_labels = [f"b{n}" for n in range(q.value.dim() - 2)]
    scores = contract(call, q, [*batch_labels, "i", "d"], k, [*batch_labels, "j", "d"], [*batch_labels, "i", "j"])
    shape = (*q.value.shape[:-1], k.value.shape[-2])
    weights = Activation(q.value.new_empty(shape), scores)
    if call["attn_mask"] is not None:
        addition = Call(call.name, call.where, {}, weights.value, call.run, call.ledger)
        weights.units = add_tensors(addition, weights, as_tensor(call["attn_mask"]))
    weights.units = call.drop_scale(weights.units)
    call.ledger.fold(weights.units.order, frozenset({len(shape) - 1}))
    return contract(call, weights, [*batch_labels, "i", "j"], v, [*batch_labels, "j", "e"], [*batch_labels, "i", "e"])
