"""Rules for operations that write into parts of a tensor, at places given by an index tensor or a slice."""

from fedveil.graph.calls import Activation, Call, NoRule, Outcome, Traced, rule
from fedveil.graph.rules.elementwise import add_tensors
from fedveil.graph.rules.shape import concatenate, narrow, share
from fedveil.graph.units import Dims, Symmetry, Units, distinct_dims


def _index_dims(call: Call, operands: list[Traced]) -> Dims:
    """Return the dims other than `dim` along which the index of a scatter or gather operation may vary.

    Every operand has one element per element of the index along these dims.
    """
    index = call.tensor("index")
    others = frozenset(range(index.value.dim())) - {call.dim()}
    if any(index.units[:2]):
        raise NoRule("its index is computed from values that carry noise")
    if any(operand.value.shape[d] != index.value.shape[d] for operand in operands for d in others):
        raise NoRule("its index covers only a part of the other dims")
    return distinct_dims(index.value) & others


def _share_along(call: Call, operand: Traced, fixed: Dims) -> Units:
    """Make the units of an operand equal along `dim`, and forbid permutations along the dims `fixed`."""
    units = operand.units
    own = Units(units.scale, call.ledger.fix_along(units.order, fixed), units.zero)
    return share(call, own, frozenset({call.dim()}))


def _combine(call: Call, source: Traced, fixed: Dims) -> Units:
    """Return the units of a tensor into which another is written or added, at places that depend on the data."""
    written = Activation(call.value, _share_along(call, source, fixed))
    return add_tensors(call, Activation(call.value, _share_along(call, call.tensor("self"), fixed)), written)


@rule("scatter_add", "scatter", "scatter_reduce")
def scatter(call: Call) -> Outcome:
    """Write or add elements of a tensor to another; maxima and minima allow only positive factors."""
    reduction = call.get("reduce") or "sum"
    if call.get("src") is None or reduction not in ("sum", "mean", "amax", "amin"):
        raise NoRule("it multiplies, or writes a constant")
    source = call.tensor("src")
    units = _combine(call, source, _index_dims(call, [call.tensor("self"), source]))
    call.limit(units.scale, Symmetry.POSITIVE if reduction in ("amax", "amin") else Symmetry.EVERYTHING)
    return units


rule("index_add", "index_copy")(lambda call: _combine(call, call.tensor("source"), frozenset()))


@rule("gather")
def gather(call: Call) -> Outcome:
    """Select elements along one dim; any of them may be selected."""
    return _share_along(call, call.x, _index_dims(call, [call.x]))


@rule("slice_scatter", "select_scatter")
def replace_slice(call: Call) -> Outcome:
    """Replace a slice of a tensor; all other elements keep their noise."""
    dim, x, source = call.dim(), call.tensor("self"), call.tensor("src")
    if call.name == "select_scatter":
        source = Activation(source.value.unsqueeze(dim), source.units.map(lambda factor: factor.unsqueeze(dim)))
    elif call["step"] != 1:
        raise NoRule("it replaces elements that are not adjacent")
    size, width = x.value.shape[dim], source.value.shape[dim]
    start = (call.integers("start", "index") or [0])[0]
    start = min(start + size if start < 0 else start, size - width)
    pieces: list[Traced] = [
        Activation(x.value.narrow(dim, first, count), narrow(call, dim, first, count))
        for first, count in ((0, start), (start + width, size - start - width))
    ]
    return concatenate(call, [own for own in (pieces[0], source, pieces[1]) if own.value.shape[dim]], dim)


@rule("copy")
def _(call: Call) -> Outcome:
    return call.broadcast(call.tensor("src"))


@rule("fill", "full", "full_like", "new_full", "ones", "ones_like", "new_ones")
def _(call: Call) -> Outcome:
    return Units(zero=call.get("value", "fill_value") == 0)
