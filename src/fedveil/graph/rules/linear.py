"""Rules for sums of products: Linear, convolutions, Embedding, matrix products and attention.

Dims have labels, as in torch.einsum. `project` multiplies an activation by a weight of the model: the weight cancels
the factors of its input, and new units begin at its output. `contract` multiplies two activations, which must carry
inverse factors along the dims that are summed over.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.graph.calls import Activation, Call, NoRule, Outcome, StateTensor, Traced, as_state, as_tensor, rule
from fedveil.graph.operations import CONVOLUTIONS, count_spatial_dims
from fedveil.graph.rules.elementwise import add_tensors
from fedveil.graph.units import Dims, Symmetry, Units, distinct_dims, reshape_factor, split_first_dim, varying_dims

Labels = Sequence[str]


def rearrange(factor: Tensor, labels: Labels, wanted: Labels) -> Tensor:
    """Rearrange a factor with dims `labels` to dims `wanted`; it is constant along new dims."""
    kept = [labels.index(label) for label in wanted if label in labels]
    sizes = [factor.shape[labels.index(label)] if label in labels else 1 for label in wanted]
    return factor.permute(kept + [d for d in range(len(labels)) if d not in kept]).reshape(sizes)


def find_dims(labels: Labels, chosen: Collection[str]) -> Dims:
    """Return the indices of the dims that have one of the chosen labels."""
    return frozenset(d for d, label in enumerate(labels) if label in chosen)


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
    """Multiply by a weight. Input dims that are in neither weight nor output are mixed. Heads get no new units."""
    ledger, sizes = call.ledger, weight.view.shape
    space = list(dict.fromkeys([*weight.labels, *labels, *out]))
    own, inputs, outputs = (find_dims(space, names) for names in (weight.labels, labels, out))
    summed, shared, outer = (own & inputs) - outputs, own & inputs & outputs, (inputs & outputs) - own
    x = x.map(lambda factor: rearrange(factor, labels, space))
    passing, columns = [], []
    for factor in x.scale:
        dims = varying_dims(factor)
        if dims and dims <= outer and bias is None and not call.is_head:
            passing.append(factor)
        else:
            columns.append(-ledger.merge_scale(factor, inputs - own, call.where))
    staying: list[Tensor] = []  # order factors that do not affect the weight
    moving: list[Tensor] = []  # order factors that also permute the weight
    parents: list[Tensor] = []  # parents of the moving order factors, along shared dims
    for factor in x.order:
        dims = varying_dims(factor)
        if dims and dims <= outer:
            staying.append(factor)
        elif dims & own and dims <= own | outer:
            moving += call.merge_order([factor], inputs - own)
            parents += ledger.fold(moving[-1:], summed) if dims & shared else []
        elif dims:
            ledger.fix(factor)
    if call.is_head:
        weight.attach(columns, moving, space)
    else:
        shape = [sizes[d] if d in own & outputs else 1 for d in range(len(space))]
        rows = ledger.create_scale(shape, weight.tensor.name)
        if shared and all(sizes[d] == 1 for d in summed):  # depthwise: the outputs have the same order as the inputs
            order = parents[0].expand(shape) if parents else torch.zeros_like(rows)
        else:
            order = ledger.create_order(shape)
            _tie_to_parents(call, order, outputs - shared, parents)
        if order.numel() > 1:
            ledger.require_equal_counts(order)
        weight.attach([rows, *columns], [order, *moving], space)
        if bias is not None:
            bias.attach([rows], [order], space)
        passing, staying = [*passing, rows], [*staying, order]
    return Units(tuple(passing), tuple(staying)).map(lambda factor: rearrange(factor, space, out))


def _tie_to_parents(call: Call, order: Tensor, inner: Dims, parents: Sequence[Tensor]) -> None:
    """Allow the outputs of a group to move only together with the group's inputs."""
    if varying_dims(order) - inner:
        (own,) = call.ledger.fold([order], inner)
        for parent in parents:
            call.ledger.unite_order(own, parent)
        if not parents:
            call.ledger.fix(own)


def contract(call: Call, x: Traced, labels: Labels, y: Traced, others: Labels, out: Labels) -> Units:
    """Multiply two activations, and sum over the dims that are not in the output."""
    ledger = call.ledger
    shared_labels = [label for label in labels if label in others and label in out]
    summed_labels = sorted(label for label in labels if label in others and label not in out)
    space = list(dict.fromkeys([*shared_labels, *summed_labels, *labels, *others]))
    everywhere, shared, summed = (find_dims(space, names) for names in (space, shared_labels, summed_labels))
    sides = ((x, labels), (y, others))
    units = [operand.units.map(lambda f, own=own: rearrange(f, own, space)) for operand, own in sides]  # type: ignore[misc]
    distinct = [find_dims(space, [own[d] for d in distinct_dims(operand.value)]) for operand, own in sides]
    alone = everywhere - shared - summed
    scale = [f for side in units for f in side.scale if not varying_dims(f) & summed]
    left, right = (call.merge_scale([f for f in side.scale if varying_dims(f) & summed], alone) for side in units)
    if left and right:
        why = "the two tensors carry different factors along the dims that it sums over"
        ledger.reconcile_scale(left, [-factor for factor in right], call.where, why)
    else:
        scale += call.merge_scale(left or right, summed)
    free = [f for side in units for f in side.order if not varying_dims(f) & summed and varying_dims(f) - shared]
    inner = [[ledger.merge_order(f, alone) for f in side.order if varying_dims(f) & summed] for side in units]
    rest = [[f for f in side.order if varying_dims(f) & shared and not varying_dims(f) & summed] for side in units]
    outer = [ledger.fold(factors, alone) for factors in rest]
    agreed = ledger.reconcile_order(inner[0], distinct[0], inner[1], distinct[1])
    tops = ledger.fold(agreed, summed)
    blocks = ledger.reconcile_order(outer[0], distinct[0], outer[1], distinct[1])
    for factor in tops:
        blocks = ledger.reconcile_order([factor], everywhere, blocks, everywhere) if blocks else (factor,)
    used = frozenset[int]().union(*map(varying_dims, free))
    order = [*free, *[factor for factor in blocks if not varying_dims(factor) & used]]
    return Units(tuple(scale), tuple(order)).map(lambda factor: rearrange(factor, space, out))


# Operations.


def _bias(call: Call, label: str) -> Weight | None:
    bias = None if call.is_head else call.state("bias")
    return None if bias is None else Weight(bias, bias.value, (label,))


@rule("linear")
def linear(call: Call) -> Outcome:
    """Compute X W^T + b."""
    x, weight = call.tensor("input"), call.tensor("weight")
    ahead = [f"x{d}" for d in range(x.value.dim() - 1)]
    labels, out = [*ahead, "k"], [*ahead, "j"]
    bias = call["bias"]
    if isinstance(weight, StateTensor):
        own, known = Weight(weight, weight.value, ("j", "k")), bias is None or isinstance(bias, StateTensor)
        units = project(call, x.units, labels, own, _bias(call, "j") if known else None, out)
    else:
        known, units = bias is None, contract(call, x, labels, weight, ["j", "k"], out)
    return units if known else add_tensors(call, Activation(call.value, units), as_tensor(bias))


@rule(*CONVOLUTIONS)
def convolution(call: Call) -> Outcome:
    """Convolve with a weight (outputs, inputs / groups, ...), or (inputs, outputs / groups, ...) if transposed."""
    spatial, (groups,) = count_spatial_dims(call.name), call.integers("groups")
    kernel, pixels, results = ([f"{kind}{n}" for n in range(spatial)] for kind in ("kernel", "pixel", "result"))
    rows = ("i", "o") if "transpose" in call.name else ("o", "i")
    tensor, bias = as_state(call["weight"]), _bias(call, "o")
    weight = Weight(tensor, tensor.value, (*rows, *kernel)).group(groups)
    x = call.tensor("input")
    before, after = x.value.shape, call.value.shape
    channel = len(before) - spatial - 1
    split, merged = (
        (*shape[:channel], groups, shape[channel] // groups, *shape[channel + 1 :]) for shape in (before, after)
    )
    units = x.units.map(lambda factor: reshape_factor(factor, before, split))
    batch = ["n"] * channel
    labels, out = [*batch, "g", "i", *pixels], [*batch, "g", "o", *results]
    found = project(call, units, labels, weight, bias and bias.group(groups), out)
    return found.map(lambda factor: reshape_factor(factor, merged, after))


@rule("matmul", "bmm", "mm", "mv", "dot")
def matmul(call: Call) -> Outcome:
    """Multiply two activations, or an activation and a parameter, as matrices."""
    return _multiply_matrices(call, call.tensor("self"), call.tensor("other", "mat2", "vec", "tensor"))


@rule("addmm", "baddbmm", "addmv")
def addmm(call: Call) -> Outcome:
    """Multiply two matrices and add a third."""
    units = _multiply_matrices(call, call.tensor("mat1", "batch1", "mat"), call.tensor("mat2", "batch2", "vec"))
    return add_tensors(call, Activation(call.value, units), call.tensor("self"))


def _multiply_matrices(call: Call, a: Traced, b: Traced) -> Units:
    rank = max(a.value.dim(), b.value.dim())
    ahead = [f"b{n}" for n in range(rank - 2)]
    left = [*ahead[rank - a.value.dim() :], "i", "k"] if a.value.dim() > 1 else ["k"]
    right = [*ahead[rank - b.value.dim() :], "k", "j"] if b.value.dim() > 1 else ["k"]
    out = [*ahead, *[label for label in (*left, *right) if label in ("i", "j")]]
    return _multiply(call, a, left, b, right, out)


def _multiply(call: Call, a: Traced, left: Labels, b: Traced, right: Labels, out: Labels) -> Units:
    """Use `project` if one of the tensors is a parameter, otherwise `contract`."""
    for x, own, weight, labels in ((a, left, b, right), (b, right, a, left)):
        if isinstance(weight, StateTensor) and weight.is_parameter and not isinstance(x, StateTensor):
            sizes, others = zip(weight.value.shape, labels, strict=True), dict(zip(own, x.value.shape, strict=True))
            if any(n == 1 and others.get(label, 1) > 1 and label.startswith("b") for n, label in sizes):
                break  # a weight that is broadcast over heads is treated as an activation
            return project(call, x.units, own, Weight(weight, weight.value, tuple(labels)), None, out)
    return contract(call, a, left, b, right, out)


@rule("einsum")
def einsum(call: Call) -> Outcome:
    """Multiply two tensors according to an einsum equation without an ellipsis or repeated letters."""
    equation, operands = str(call["equation"]).replace(" ", ""), call.sequence("tensors")
    inputs, _, out = equation.partition("->")
    terms = inputs.split(",")
    plain = "->" in equation and "." not in equation and all(len(set(term)) == len(term) for term in [*terms, out])
    if len(operands) != 2 or not plain:
        raise NoRule("it is an einsum with an ellipsis, a repeated letter, or a number of tensors other than two")
    left, right = (list(term) for term in terms)
    if any(label not in out and label not in other for own, other in ((left, right), (right, left)) for label in own):
        raise NoRule("it is an einsum that sums over a letter that only one tensor has")
    return _multiply(call, as_tensor(operands[0]), left, as_tensor(operands[1]), right, list(out))


@rule("embedding", "embedding_bag", "_embedding_bag")
def embedding(call: Call) -> Outcome:
    """Look up rows and possibly reduce them. Columns may be permuted and scaled; "max" allows positive factors."""
    if call["sparse"]:
        raise NoRule("its gradient is sparse")
    samples = call.get("per_sample_weights")
    if isinstance(samples, Traced) and any(samples.units[:2]):
        raise NoRule("its per_sample_weights are computed")
    weight = as_state(call["weight"])
    size = weight.value.shape[1]
    units = Units((call.ledger.create_scale((1, size), weight.name),), (call.ledger.create_order((1, size)),))
    weight.attach(units)
    if call.get("mode") == 2:
        call.limit(units.scale, Symmetry.POSITIVE)
    ahead = [1] * (call.rank - 1 if call.name == "embedding" else 1)
    return call.pack(units.map(lambda factor: factor.reshape([*ahead, size])))


def _repeat_heads(operand: Traced, times: int) -> Traced:
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
    ahead = [f"b{n}" for n in range(q.value.dim() - 2)]
    scores = contract(call, q, [*ahead, "i", "d"], k, [*ahead, "j", "d"], [*ahead, "i", "j"])
    shape = (*q.value.shape[:-1], k.value.shape[-2])
    weights = Activation(q.value.new_empty(shape), scores)
    if call["attn_mask"] is not None:
        part = Call(call.name, call.where, {}, weights.value, call.run, call.ledger)
        weights.units = add_tensors(part, weights, as_tensor(call["attn_mask"]))
    weights.units = call.drop_scale(weights.units)
    call.ledger.fold(weights.units.order, frozenset({len(shape) - 1}))
    return contract(call, weights, [*ahead, "i", "j"], v, [*ahead, "j", "e"], [*ahead, "i", "e"])
