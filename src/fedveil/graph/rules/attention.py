"""Attention: queries and keys carry inverse factors, values any; heads are permuted as a whole."""

from fedveil.graph.calls import Activation, Call, Outcome, Traced, as_tensor, rule
from fedveil.graph.rules.arithmetic import add_tensors
from fedveil.graph.rules.linear import contract


def _repeat_heads(operand: Traced, times: int) -> Traced:
    """Repeat the keys or values of grouped-query attention, one per query head."""
    if times == 1:
        return operand
    units = operand.units.each(lambda f: f.repeat_interleave(times, -3) if f.shape[-3] > 1 else f)
    return Activation(operand.value.repeat_interleave(times, -3), units)


@rule("scaled_dot_product_attention")
def attention(call: Call) -> Outcome:
    """Compose softmax(q k^T + mask) v of the rules of its parts."""
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
