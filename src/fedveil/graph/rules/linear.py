"""Sums of products: Linear, convolutions, Embedding, matrix products.

Dims are named by labels, as in torch.einsum. `project` is a product with a weight of the model: new units begin at its
output, those of its input are divided out by the weight. `contract` is a product of two activations: what is summed
over must carry inverse factors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.graph.calls import Activation, Call, NoRule, Outcome, Stored, Traced, differing, rule, stored, tensor
from fedveil.graph.rules.arithmetic import total
from fedveil.graph.symmetry import Symmetry
from fedveil.graph.units import Units, reshaped, varying

Labels = Sequence[str]


def arranged(factor: Tensor, own: Labels, wanted: Labels) -> Tensor:
    """A factor over dims `own` as one over dims `wanted`, constant along those that it lacks."""
    kept = [own.index(label) for label in wanted if label in own]
    sizes = [factor.shape[own.index(label)] if label in own else 1 for label in wanted]
    return factor.permute(kept + [d for d in range(len(own)) if d not in kept]).reshape(sizes)


def changing(factor: Tensor, labels: Labels) -> set[str]:
    """The labels along which a factor changes."""
    return {labels[d] for d in varying(factor)}


def numbers(labels: Labels, chosen: set[str]) -> frozenset[int]:
    """The dims of these labels."""
    return frozenset(d for d, label in enumerate(labels) if label in chosen)


@dataclass(frozen=True)
class Weight:
    """A parameter as an operand of a product: labels, sizes and strides of its dims."""

    tensor: Stored
    labels: tuple[str, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def plain(cls, weight: Stored, labels: Labels) -> "Weight":
        """With its own dims."""
        return cls(weight, tuple(labels), tuple(weight.value.shape), tuple(weight.value.stride()))

    def grouped(self, groups: int, label: str) -> "Weight":
        """With its first dim in `groups` groups."""
        size = self.shape[0] // groups
        shape, strides = (groups, size, *self.shape[1:]), (size * self.strides[0], *self.strides)
        return Weight(self.tensor, (label, *self.labels), shape, strides)

    def attach(self, units: Units) -> None:
        """Record its noise."""
        self.tensor.attach(units, self.shape, self.strides)

    def size(self, label: str) -> int:
        """The size of a dim."""
        return self.shape[self.labels.index(label)]


def project(
    call: Call, x: Units, labels: Labels, weight: Weight, bias: Weight | None, out: Labels, *, head: bool = False
) -> Units:
    """A product with a weight; labels that neither weight nor output has are mixed. A head starts no units."""
    ledger = call.ledger
    summed = {label for label in weight.labels if label in labels and label not in out}
    shared = {label for label in weight.labels if label in labels and label in out}
    outer = {label for label in labels if label in out and label not in weight.labels}
    mixed = numbers(labels, set(labels) - summed - shared)
    passing, columns = [], []
    for factor in x.scale:
        changes = changing(factor, labels)
        if changes and changes <= outer and bias is None and not head:
            passing.append(arranged(factor, labels, out))
        else:
            one = ledger.merge_scale(factor, mixed, call.where)
            columns.append(-arranged(one, labels, weight.labels))
    staying, moving, above = _places(call, x.order, labels, summed, shared, outer)
    orders = [arranged(factor, labels, weight.labels) for factor in moving]
    new = [label for label in weight.labels if label in out and label not in shared]
    if head:
        weight.attach(Units(tuple(columns), tuple(orders)))
        return Units(tuple(passing), tuple(arranged(factor, labels, out) for factor in staying))
    shape = [weight.size(label) if label in out else 1 for label in weight.labels]
    rows = ledger.fresh_scale(shape, weight.tensor.name)
    above = [arranged(factor, labels, weight.labels) for factor in above]
    if shared and all(weight.size(label) == 1 for label in summed):  # depthwise: outputs are in the inputs' order
        order = above[0].expand(shape) if above else torch.zeros_like(rows)
    else:
        order = ledger.fresh_order(shape)
        _put_below(call, order, numbers(weight.labels, set(new)), above)
    if order.numel() > 1:
        ledger.count(order)
    weight.attach(Units((rows, *columns), (order, *orders)))
    if bias is not None:
        own = Units((arranged(rows, weight.labels, bias.labels),), (arranged(order, weight.labels, bias.labels),))
        bias.attach(own)
    scale = (*passing, arranged(rows, weight.labels, out))
    return Units(scale, (*[arranged(f, labels, out) for f in staying], arranged(order, weight.labels, out)))


def _put_below(call: Call, order: Tensor, inner: frozenset[int], above: Sequence[Tensor]) -> None:
    """Outputs of a group move only with the group's inputs."""
    if not varying(order) - inner:
        return
    own = call.ledger.fold(order, inner)
    assert own is not None
    for other in above:
        call.ledger.unite_order(own, other)
    if not above:
        call.ledger.fix(own)


def _places(
    call: Call, orders: Sequence[Tensor], labels: Labels, summed: set[str], shared: set[str], outer: set[str]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Order factors that bypass the weight, those that it follows, and the ones above them along shared dims."""
    ledger = call.ledger
    staying, moving, parents = [], [], []
    inner = summed | shared
    for factor in orders:
        changes = changing(factor, labels)
        if not changes:
            continue
        if changes <= outer:
            staying.append(factor)
        elif not changes & inner or changes - inner - outer:
            ledger.fix(factor)
        else:
            one = ledger.merge_order(factor, numbers(labels, set(labels) - inner))
            ledger.count(one)
            moving.append(one)
            above = ledger.fold(one, numbers(labels, summed)) if changes & shared else None
            if above is not None:
                parents.append(above)
    return staying, moving, parents


def contract(call: Call, x: Traced, labels: Labels, y: Traced, others: Labels, out: Labels) -> Units:
    """A product of two activations, summed over the labels that the output lacks."""
    ledger = call.ledger
    summed = {label for label in labels if label in others and label not in out}
    shared = [label for label in labels if label in others and label in out]
    both = [*shared, *sorted(summed)]
    scale: list[Tensor] = []
    inside: list[list[Tensor]] = []
    for units, own in ((x.units, labels), (y.units, others)):
        found = []
        for factor in units.scale:
            if changing(factor, own) & summed:
                one = ledger.merge_scale(factor, numbers(own, set(own) - set(both)), call.where)
                found.append(arranged(one, own, both))
            else:
                scale.append(arranged(factor, own, out))
        inside.append(found)
    left, right = inside
    why = "the two tensors carry different factors along the dims that it sums over"
    if left and right:
        ledger.agree_scale(left, [-factor for factor in right], call.where, why)
    else:
        for factor in left or right:
            scale.append(arranged(ledger.merge_scale(factor, numbers(both, summed), call.where), both, out))
    return Units(tuple(scale), _contract_order(call, x, labels, y, others, out, summed, shared))


def _contract_order(
    call: Call, x: Traced, labels: Labels, y: Traced, others: Labels, out: Labels, summed: set[str], shared: list[str]
) -> tuple[Tensor, ...]:
    """Places: summed and shared labels move alike on both sides."""
    ledger = call.ledger
    both = [*shared, *sorted(summed)]
    sides: list[tuple[list[Tensor], list[Tensor]]] = []  # factors over summed labels, and over shared ones only
    kept: list[Tensor] = []
    for operand, own in ((x, labels), (y, others)):
        inner, outer = [], []
        for factor in operand.units.order:
            changes = changing(factor, own)
            if changes & summed:
                one = ledger.merge_order(factor, numbers(own, set(own) - set(both)))
                inner.append(arranged(one, own, both))
                continue
            if changes - set(shared):
                kept.append(arranged(factor, own, out))
            above = ledger.fold(factor, numbers(own, set(own) - set(shared))) if changes & set(shared) else None
            if above is not None:
                outer.append(arranged(above, own, both))
        sides.append((inner, outer))
    differs = [numbers(both, {own[d] for d in differing(operand.value)}) for operand, own in ((x, labels), (y, others))]
    (inner_x, outer_x), (inner_y, outer_y) = sides
    met = ledger.agree_order(inner_x, differs[0], inner_y, differs[1])
    folded = [ledger.fold(factor, numbers(both, summed)) for factor in met]
    tops = [factor for factor in folded if factor is not None]
    everywhere = frozenset(range(len(both)))
    blocks = ledger.agree_order(outer_x, differs[0], outer_y, differs[1])
    for factor in tops:
        blocks = ledger.agree_order([factor], everywhere, blocks, everywhere) if blocks else (factor,)
    covered = frozenset().union(*(varying(factor) for factor in kept)) if kept else frozenset()
    spare = [arranged(factor, both, out) for factor in blocks]
    return (*kept, *[factor for factor in spare if not varying(factor) & covered])


# The operations.


def _bias(call: Call, label: str, head: bool) -> Weight | None:
    return None if head or call["bias"] is None else Weight.plain(stored(call["bias"]), [label])


@rule("linear")
def linear(call: Call, head: bool = False) -> Outcome:
    """X W^T + b."""
    x, weight = tensor(call["input"]), tensor(call["weight"])
    ahead = [f"x{d}" for d in range(x.value.dim() - 1)]
    labels, out = [*ahead, "k"], [*ahead, "j"]
    if isinstance(weight, Stored):
        own = Weight.plain(weight, ["j", "k"])
        return project(call, x.units, labels, own, _bias(call, "j", head), out, head=head)
    units = contract(call, x, labels, weight, ["j", "k"], out)
    return units if call["bias"] is None else total(call, Activation(call.output, units), tensor(call["bias"]))


CONVOLUTIONS = {f"conv{kind}{n}d": n for kind in ("", "_transpose") for n in (1, 2, 3)}


@rule(*CONVOLUTIONS)
def convolution(call: Call, head: bool = False) -> Outcome:
    """The weight is (outputs, inputs / groups, ...), or (inputs, outputs / groups, ...) if transposed."""
    spatial, groups = CONVOLUTIONS[call.name], call["groups"]
    kernel, places, results = ([f"{kind}{n}" for n in range(spatial)] for kind in ("kernel", "place", "result"))
    rows = ["i", "o"] if "transpose" in call.name else ["o", "i"]
    weight = Weight.plain(stored(call["weight"]), [*rows, *kernel]).grouped(groups, "g")
    bias = _bias(call, "o", head)
    bias = bias.grouped(groups, "g") if bias else None
    x = tensor(call["input"])
    before, after = x.value.shape, call.output.shape
    channel = len(before) - spatial - 1
    split, merged = (
        (*shape[:channel], groups, shape[channel] // groups, *shape[channel + 1 :]) for shape in (before, after)
    )
    units = x.units.each(lambda factor: reshaped(factor, before, split))
    batch = ["n"] * channel
    labels, out = [*batch, "g", "i", *places], [*batch, "g", "o", *results]
    found = project(call, units, labels, weight, bias, out, head=head)
    return found.each(lambda factor: reshaped(factor, merged, after))


@rule("matmul", "bmm", "mm", "mv", "dot")
def matmul(call: Call) -> Outcome:
    """Of two activations, or of one and a parameter."""
    return _matrix_product(call, call["self"], call.get("other", "mat2", "vec", "tensor"))


@rule("addmm", "baddbmm", "addmv")
def addmm(call: Call) -> Outcome:
    """A product and a sum."""
    units = _matrix_product(call, call.get("mat1", "batch1", "mat"), call.get("mat2", "batch2", "vec"))
    return total(call, Activation(call.output, units), tensor(call["self"]))


def _matrix_product(call: Call, a: object, b: object) -> Units:
    a, b = tensor(a), tensor(b)
    most = max(a.value.dim(), b.value.dim())
    ahead = [f"b{n}" for n in range(most - 2)]
    left = [*ahead[most - a.value.dim() :], "i", "k"] if a.value.dim() > 1 else ["k"]
    right = [*ahead[most - b.value.dim() :], "k", "j"] if b.value.dim() > 1 else ["k"]
    out = [*ahead, *[label for label in (*left, *right) if label in ("i", "j")]]
    return product_of(call, a, left, b, right, out)


def product_of(call: Call, a: Traced, left: Labels, b: Traced, right: Labels, out: Labels) -> Units:
    """By `project` if one of them is a parameter itself, else by `contract`."""
    for x, own, weight, labels in ((a, left, b, right), (b, right, a, left)):
        if isinstance(weight, Stored) and weight.is_parameter and not isinstance(x, Stored):
            sizes = zip(weight.value.shape, labels, strict=True)
            if any(n == 1 and label in own and label.startswith("b") for n, label in sizes):
                break  # a weight that is broadcast over heads counts as an activation
            return project(call, x.units, own, Weight.plain(weight, labels), None, out)
    return contract(call, a, left, b, right, out)


@rule("einsum")
def einsum(call: Call) -> Outcome:
    """Of two tensors, without an ellipsis or a repeated letter."""
    equation, operands = call["equation"].replace(" ", ""), [tensor(t) for t in call["tensors"]]
    inputs, _, out = equation.partition("->")
    terms = inputs.split(",")
    plain = "->" in equation and "." not in equation and all(len(set(term)) == len(term) for term in [*terms, out])
    if len(operands) != 2 or not plain:
        raise NoRule("it is an einsum with an ellipsis, a repeated letter, or other than two tensors")
    left, right = (list(term) for term in terms)
    if any(label not in out and label not in other for own, other in ((left, right), (right, left)) for label in own):
        raise NoRule("it is an einsum that sums over a letter of one tensor only")
    return product_of(call, operands[0], left, operands[1], right, list(out))


@rule("embedding", "embedding_bag", "_embedding_bag")
def embedding(call: Call) -> Outcome:
    """A row per index, or sums and means of rows: any factor and any order of the columns; maxima: positive factors."""
    if call["sparse"]:
        raise NoRule("its gradient is sparse")
    samples = call.get("per_sample_weights")
    if isinstance(samples, Activation | Stored) and (samples.units.scale or samples.units.order):
        raise NoRule("the weights of its samples are computed")
    weight = stored(call["weight"])
    size = weight.value.shape[1]
    units = Units((call.ledger.fresh_scale((1, size), weight.name),), (call.ledger.fresh_order((1, size)),))
    weight.attach(units)
    if call.get("mode") == 2:
        call.limit(units.scale, Symmetry.POSITIVE)
    ahead = [1] * (call.rank - 1 if call.name == "embedding" else 1)
    return call.packed(units.each(lambda factor: factor.reshape([*ahead, size])))
