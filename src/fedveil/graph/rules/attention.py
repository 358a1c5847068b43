"""Attention: queries and keys carry inverse factors, values any; heads trade places as a whole."""

from fedveil.graph.calls import Activation, Call, Outcome, Traced, rule, tensor
from fedveil.graph.rules.arithmetic import total
from fedveil.graph.rules.linear import contract


def _repeated(operand: Traced, times: int) -> Traced:
    """Keys or values of grouped-query attention, one per query head."""
    if times == 1:
        return operand
    value = operand.value.repeat_interleave(times, -3)
    again = lambda factor: factor.repeat_interleave(times, -3) if factor.shape[-3] > 1 else factor  # noqa: E731
    return Activation(value, operand.units.each(again))


@rule("scaled_dot_product_attention")
def attention(call: Call) -> Outcome:
    """softmax(q k^T + mask) v, composed of the rules of its parts."""
    q, k, v, mask = (call[name] for name in ("query", "key", "value", "attn_mask"))
    times = q.value.shape[-3] // k.value.shape[-3] if call["enable_gqa"] else 1
    k, v = _repeated(tensor(k), times), _repeated(tensor(v), times)
    ahead = [f"b{n}" for n in range(q.value.dim() - 2)]
    scores = contract(call, q, [*ahead, "i", "d"], k, [*ahead, "j", "d"], [*ahead, "i", "j"])
    shape = (*q.value.shape[:-1], k.value.shape[-2])
    weights = Activation(q.value.new_empty(shape), scores)
    if mask is not None:
        part = Call(call.name, call.where, {}, weights.value, call.run, call.ledger)
        weights.units = total(part, weights, tensor(mask))
    weights.units = call.unscaled(weights.units)
    for factor in weights.units.order:
        call.ledger.fold(factor, frozenset({len(shape) - 1}))
    return contract(call, weights, [*ahead, "i", "j"], v, [*ahead, "j", "e"], [*ahead, "i", "e"])
