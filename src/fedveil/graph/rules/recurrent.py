"""LSTM, GRU and RNN: a unit takes a sign and a place, with the rows of all its gates.

The gates' sigmoids let no factor through, but their inputs carry none: only the rows of the gate that makes the new
state (an odd function) change sign with it, and so do all columns that read it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedveil.graph.calls import Call, NoRule, Outcome, Stored, Traced, rule, stored, tensor
from fedveil.graph.symmetry import Symmetry
from fedveil.graph.units import Units, aligned


class Cell(NamedTuple):
    """A recurrent cell: how many gates, which of them makes the state, and what the state lets through."""

    gates: int
    state: int
    symmetry: Symmetry


LSTM, GRU = Cell(4, 2, Symmetry.SIGN), Cell(3, 2, Symmetry.SIGN)
TANH, RELU = Cell(1, 0, Symmetry.SIGN), Cell(1, 0, Symmetry.POSITIVE)
LAYERS = {"lstm": LSTM, "gru": GRU, "rnn_tanh": TANH, "rnn_relu": RELU}
CELLS = {"lstm_cell": LSTM, "gru_cell": GRU, "rnn_tanh_cell": TANH, "rnn_relu_cell": RELU}


class Parameters(NamedTuple):
    """The tensors of one layer and direction."""

    w_ih: Stored
    w_hh: Stored
    b_ih: Stored | None = None
    b_hh: Stored | None = None
    w_hr: Stored | None = None


def _attach(weight: Stored, cell: Cell, rows: Units, columns: Units | None) -> None:
    """Record the noise on a (gates x units, inputs) weight, or a bias."""
    (total, *inputs), (step, *steps) = weight.value.shape, weight.value.stride()
    units = total // cell.gates
    if columns is not None:
        scale = [f.unsqueeze(-1) for f in rows.scale] + [-f.reshape(1, 1, -1) for f in columns.scale]
        order = [f.unsqueeze(-1) for f in rows.order] + [f.reshape(1, 1, -1) for f in columns.order]
        rows = Units(tuple(scale), tuple(order))
    weight.attach(rows, [cell.gates, units, *inputs], [units * step, step, *steps])


def _step(
    call: Call, cell: Cell, own: Parameters, inputs: Units, states: Sequence[Units | None]
) -> tuple[Units, Units]:
    """Units of h and of c; `states` are the given ones, None for zeros."""
    ledger = call.ledger
    size = own.w_ih.value.shape[0] // cell.gates
    sign, order = ledger.fresh_scale([size], own.w_hh.name), ledger.fresh_order([size])
    call.limit([sign], cell.symmetry, "a recurrent state lets only these through")
    c = Units((sign,), (order,))
    h = c
    if own.w_hr is not None:
        narrow = own.w_hr.value.shape[0]
        h = Units((ledger.fresh_scale([narrow], own.w_hr.name),), (ledger.fresh_order([narrow]),))
        scale = (h.scale[0].unsqueeze(1), -sign.unsqueeze(0))
        own.w_hr.attach(Units(scale, (h.order[0].unsqueeze(1), order.unsqueeze(0))))
    gates = torch.zeros((cell.gates, size), dtype=torch.int64)
    gates[cell.state] = sign
    rows = Units((gates,), (order.expand(cell.gates, -1),))  # all rows of a unit move, those of the state change sign
    for state, given in zip((h, c), states, strict=False):
        if given is not None:
            why = "its first state carries other factors, or none"
            ledger.agree_scale(state.scale, given.scale, call.where, why)
            ledger.agree_order(state.order, frozenset({0}), given.order, frozenset({0}))
    _attach(own.w_ih, cell, rows, inputs)
    _attach(own.w_hh, cell, rows, h)
    for bias in (own.b_ih, own.b_hh):
        if bias is not None:
            _attach(bias, cell, rows, None)
    return h, c


def _parameters(given: Sequence[object], biases: bool, projected: bool) -> list[Parameters]:
    """Tensors of each layer and direction."""
    count = 2 + 2 * biases + projected
    found = []
    for first in range(0, len(given), count):
        own = [stored(t) for t in given[first : first + count]]
        bias = own[2:4] if biases else (None, None)
        found.append(Parameters(own[0], own[1], bias[0], bias[1], own[-1] if projected else None))
    return found


def _state(call: Call, state: Traced, place: int) -> Units | None:
    """Units of one layer's first state; None if it is zero."""
    if state.zero:
        return None
    units = state.units.each(lambda f: f.narrow(0, place if f.shape[0] > 1 else 0, 1))
    return _last(call, units, state)


def _last(call: Call, units: Units, operand: Traced) -> Units:
    return call.channels(units, operand.value.dim() - 1, operand.value.dim())


def _together(call: Call, parts: Sequence[Units], join: Callable[[Sequence[Tensor]], Tensor]) -> Units:
    """One factor of each kind, from one of each part."""
    return Units((join([p.scale[0] for p in parts]),), (call.ledger.moved(join, [p.order[0] for p in parts]),))


@rule(*LAYERS)
def layers(call: Call) -> Outcome:
    """Layers and directions one by one."""
    if "batch_sizes" in call.arguments:
        raise NoRule("its input is a PackedSequence")
    cell, x = LAYERS[call.name], tensor(call["input"])
    states = call["hx"] if isinstance(call["hx"], list | tuple) else [call["hx"]]
    directions = 2 if call["bidirectional"] else 1
    given, biases = list(call["params"]), bool(call["has_biases"])
    projected = len(given) != call["num_layers"] * directions * (2 + 2 * biases)
    inputs, ends = _last(call, x.units, x), []
    for place, own in enumerate(_parameters(given, biases, projected)):
        first = [_state(call, tensor(state), place) for state in states]
        ends.append(_step(call, cell, own, inputs, first))
        if (place + 1) % directions:
            continue
        outputs = [h for h, _ in ends[-directions:]]
        inputs = outputs[0] if directions == 1 else _together(call, outputs, lambda given: torch.cat(list(given)))
        for factor in inputs.order:
            call.ledger.count(factor)
    rank = x.value.dim()

    def stacked(factors: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(factors)).reshape([len(factors)] + [1] * (rank - 2) + [-1])

    last = [_together(call, [end[kind] for end in ends], stacked) for kind in range(len(states))]
    return [inputs.each(lambda factor: aligned(factor, rank)), *last]


@rule(*CELLS)
def cell(call: Call) -> Outcome:
    """One step in time."""
    x = tensor(call["input"])
    states = call["hx"] if isinstance(call["hx"], list | tuple) else [call["hx"]]
    own = Parameters(*[None if call[n] is None else stored(call[n]) for n in ("w_ih", "w_hh", "b_ih", "b_hh")])  # type: ignore[arg-type]
    first = [None if s.zero else _last(call, s.units, s) for s in map(tensor, states)]
    found = _step(call, CELLS[call.name], own, _last(call, x.units, x), first)
    units = [part.each(lambda factor: aligned(factor, x.value.dim())) for part in found]
    return units if call.name == "lstm_cell" else units[0]
