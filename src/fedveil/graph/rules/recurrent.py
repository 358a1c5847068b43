"""Rules for LSTM, GRU and RNN: each unit may change sign and position, together with the rows of all its gates.

The gates' sigmoids allow no factors, but their inputs carry none. If the state changes sign, so do the rows of
the gate that computes the new state (an odd function) and all columns that read the state, but no other rows.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedveil.graph.calls import Call, NoRule, Operand, Outcome, StateTensor, as_state, as_tensor, rule
from fedveil.graph.units import Symmetry, Units, align, split_first_dim


class Cell(NamedTuple):
    """A recurrent cell: the number of gates, the index of the gate that computes the state, and the allowed factors."""

    gates: int
    state: int
    symmetry: Symmetry


CELLS = {
    "lstm": Cell(4, 2, Symmetry.SIGN),
    "gru": Cell(3, 2, Symmetry.SIGN),
    "rnn_tanh": Cell(1, 0, Symmetry.SIGN),
    "rnn_relu": Cell(1, 0, Symmetry.POSITIVE),
}


class Parameters(NamedTuple):
    """The parameters of one layer and direction."""

    w_ih: StateTensor
    w_hh: StateTensor
    biases: Sequence[StateTensor] = ()
    w_hr: StateTensor | None = None


def _attach(weight: StateTensor, cell: Cell, rows: Units, columns: Units | None) -> None:
    """Record the noise on a weight of shape (gates x units, inputs), or on a bias."""
    if columns is not None:
        scale = [f.unsqueeze(-1) for f in rows.scale] + [-f.reshape(1, 1, -1) for f in columns.scale]
        order = [f.unsqueeze(-1) for f in rows.order] + [f.reshape(1, 1, -1) for f in columns.order]
        rows = Units(tuple(scale), tuple(order))
    weight.attach(rows, split_first_dim(weight.value, cell.gates))


def _step(
    call: Call, cell: Cell, parameters: Parameters, inputs: Units, states: Sequence[Units | None]
) -> tuple[Units, Units]:
    """Return the units of h and c. `states` are the units of the initial state, or None if it is zero."""
    ledger = call.ledger
    size = parameters.w_ih.value.shape[0] // cell.gates
    sign, order = ledger.create_scale([size], parameters.w_hh.name), ledger.create_order([size])
    call.limit([sign], cell.symmetry, "its recurrent state lets no other factors through")
    c = Units((sign,), (order,))
    h = c
    if parameters.w_hr is not None:
        projection_size = parameters.w_hr.value.shape[0]
        h = Units(
            (ledger.create_scale([projection_size], parameters.w_hr.name),), (ledger.create_order([projection_size]),)
        )
        scale = (h.scale[0].unsqueeze(1), -sign.unsqueeze(0))
        parameters.w_hr.attach(Units(scale, (h.order[0].unsqueeze(1), order.unsqueeze(0))))
    gates = torch.zeros((cell.gates, size), dtype=torch.int64)
    gates[cell.state] = sign
    # all rows of a unit are permuted, but only those of the state gate change sign
    rows = Units((gates,), (order.expand(cell.gates, -1),))
    for state, initial in zip((h, c), states, strict=False):
        if initial is not None:
            reason = "its initial state carries different factors, or none"
            ledger.reconcile_scale(state.scale, initial.scale, call.where, reason)
            ledger.reconcile_order(state.order, frozenset({0}), initial.order, frozenset({0}))
    _attach(parameters.w_ih, cell, rows, inputs)
    _attach(parameters.w_hh, cell, rows, h)
    for bias in parameters.biases:
        _attach(bias, cell, rows, None)
    return h, c


def _features(call: Call, operand: Operand, layer: int | None = None) -> Units | None:
    """Return the units along the last dim, for one layer if the first dim indexes layers; None for a zero tensor."""
    if operand.zero:
        return None
    units, rank = operand.units, operand.value.dim()
    if layer is not None:
        units = units.map(lambda f: f.narrow(0, layer if f.shape[0] > 1 else 0, 1))
    return call.merge_to_channels(units, rank - 1, rank)


def _join(call: Call, parts: Sequence[Units], join: Callable[[Sequence[Tensor]], Tensor]) -> Units:
    """Join the scale factors of all parts, and their order factors; each part has one of each."""
    return Units((join([p.scale[0] for p in parts]),), (call.ledger.move_order(join, [p.order[0] for p in parts]),))


@rule(*CELLS)
def layers(call: Call) -> Outcome:
    """Apply the layers one by one, in each direction."""
    if "batch_sizes" in call.arguments:
        raise NoRule("its input is a PackedSequence")
    x, states = call.tensor("input"), [as_tensor(state) for state in call.sequence("hx")]
    directions, biases = 2 if call["bidirectional"] else 1, 2 if call["has_biases"] else 0
    tensors = [as_state(tensor) for tensor in call.sequence("params")]
    (count,) = call.integers("num_layers")
    num_tensors = len(tensors) // (count * directions)  # number of parameters per layer and direction
    inputs, ends = _features(call, x) or Units(), []
    for layer in range(count * directions):
        layer_tensors = tensors[layer * num_tensors : (layer + 1) * num_tensors]
        parameters = Parameters(
            layer_tensors[0],
            layer_tensors[1],
            layer_tensors[2 : 2 + biases],
            layer_tensors[-1] if num_tensors > 2 + biases else None,
        )
        initial = [_features(call, state, layer) for state in states]
        ends.append(_step(call, CELLS[call.name], parameters, inputs, initial))
        if (layer + 1) % directions:
            continue
        outputs = [h for h, _ in ends[-directions:]]
        inputs = outputs[0] if directions == 1 else _join(call, outputs, lambda factors: torch.cat(list(factors)))
        for factor in inputs.order:
            call.ledger.require_equal_counts(factor)
    rank = x.value.dim()

    def stack(factors: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(factors)).reshape([len(factors)] + [1] * (rank - 2) + [-1])

    final_states = [_join(call, [end[kind] for end in ends], stack) for kind in range(len(states))]
    return [inputs.map(lambda factor: align(factor, rank)), *final_states]


@rule(*[f"{name}_cell" for name in CELLS])
def cell(call: Call) -> Outcome:
    """Apply one time step."""
    x, states = call.tensor("input"), [as_tensor(state) for state in call.sequence("hx")]
    biases = [bias for bias in (call.state("b_ih"), call.state("b_hh")) if bias is not None]
    parameters = Parameters(as_state(call["w_ih"]), as_state(call["w_hh"]), biases)
    initial = [_features(call, state) for state in states]
    kind = call.name.removesuffix("_cell")
    units_by_state = _step(call, CELLS[kind], parameters, _features(call, x) or Units(), initial)
    units = [part.map(lambda factor: align(factor, x.value.dim())) for part in units_by_state]
    return units if kind == "lstm" else units[0]
