"""LSTM, GRU and RNN: a unit takes a sign and a place, with the rows of all its gates.

The gates' sigmoids let no factor through, but their inputs carry none: only the rows of the gate that makes the new
state (an odd function) change sign with it, and so do all columns that read it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.graph.calls import Call, NoRule, Outcome, Stored, Traced, rule, stored, tensor
from fedveil.graph.symmetry import Symmetry
from fedveil.graph.units import Units, varying


@dataclass(frozen=True)
class Cell:
    """A recurrent cell: how many gates, which of them makes the state, and what the state lets through."""

    gates: int
    state: int
    symmetry: Symmetry


LSTM, GRU = Cell(4, 2, Symmetry.SIGN), Cell(3, 2, Symmetry.SIGN)
TANH, RELU = Cell(1, 0, Symmetry.SIGN), Cell(1, 0, Symmetry.POSITIVE)
LAYERS = {"lstm": LSTM, "gru": GRU, "rnn_tanh": TANH, "rnn_relu": RELU}
CELLS = {"lstm_cell": LSTM, "gru_cell": GRU, "rnn_tanh_cell": TANH, "rnn_relu_cell": RELU}


@dataclass(frozen=True)
class Parameters:
    """The tensors of one layer and direction."""

    w_ih: Stored
    w_hh: Stored
    b_ih: Stored | None = None
    b_hh: Stored | None = None
    w_hr: Stored | None = None


def _last(call: Call, units: Units) -> Units:
    """Units along the last dim, as 1-d factors; equal along all others."""
    scale, order = [], []
    for factor in units.scale:
        scale.append(call.ledger.merge_scale(factor, frozenset(range(factor.dim() - 1)), call.where).flatten())
    for factor in units.order:
        if factor.shape[-1] > 1:
            order.append(call.ledger.merge_order(factor, frozenset(range(factor.dim() - 1))).flatten())
            call.ledger.count(order[-1])
        elif varying(factor):
            call.ledger.fix(factor)
    return Units(tuple(scale), tuple(order))


def _gate_rows(cell: Cell, sign: Tensor, order: Tensor) -> Units:
    """Units of (gates, units): all rows of a unit move together, those of the state change sign."""
    scale = torch.zeros((cell.gates, len(sign)), dtype=torch.int64)
    scale[cell.state] = sign
    return Units((scale,), (order.expand(cell.gates, -1),))


def _attach(weight: Stored, cell: Cell, rows: Units, columns: Units | None) -> None:
    """Record the noise on a (gates x units, inputs) weight, or a bias."""
    units, step = weight.value.shape[0] // cell.gates, weight.value.stride(0)
    shape: list[int] = [cell.gates, units]
    strides = [units * step, step]
    if columns is None:
        weight.attach(rows, shape, strides)
        return
    shape, strides = [*shape, weight.value.shape[1]], [*strides, weight.value.stride(1)]
    scale = [f.unsqueeze(-1) for f in rows.scale] + [-f.reshape(1, 1, -1) for f in columns.scale]
    order = [f.unsqueeze(-1) for f in rows.order] + [f.reshape(1, 1, -1) for f in columns.order]
    weight.attach(Units(tuple(scale), tuple(order)), shape, strides)


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
    rows = _gate_rows(cell, sign, order)
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
        hr = own[-1] if projected else None
        found.append(Parameters(own[0], own[1], own[2] if biases else None, own[3] if biases else None, hr))
    return found


def _state(call: Call, state: Traced, place: int) -> Units | None:
    """Units of one layer's first state; None if it is zero."""
    if state.zero:
        return None
    units = state.units.each(lambda f: f.narrow(0, place if f.shape[0] > 1 else 0, 1))
    return _last(call, units)


def _beside(call: Call, parts: Sequence[Units]) -> Units:
    """The outputs of both directions, concatenated."""
    if len(parts) == 1:
        return parts[0]

    def join(factors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(factors))

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
    inputs, ends = _last(call, x.units), []
    for layer, own in enumerate(_pairs(_parameters(given, biases, projected), directions)):
        outputs = []
        for direction, parameters in enumerate(own):
            place = layer * directions + direction
            first = [_state(call, tensor(state), place) for state in states]
            ends.append(_step(call, cell, parameters, inputs, first))
            outputs.append(ends[-1][0])
        inputs = _beside(call, outputs)
        for factor in inputs.order:
            call.ledger.count(factor)
    rank = x.value.dim()
    output = inputs.each(lambda factor: factor.reshape([1] * (rank - 1) + [-1]))
    last = [_stacked(call, [end[kind] for end in ends], rank) for kind in range(len(states))]
    return [output, *last]


def _pairs(parameters: Sequence[Parameters], directions: int) -> list[Sequence[Parameters]]:
    return [parameters[n : n + directions] for n in range(0, len(parameters), directions)]


def _stacked(call: Call, parts: Sequence[Units], rank: int) -> Units:
    """Final states of all layers and directions, along dim 0."""

    def join(factors: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(factors)).reshape([len(parts)] + [1] * (rank - 2) + [-1])

    return Units((join([p.scale[0] for p in parts]),), (call.ledger.moved(join, [p.order[0] for p in parts]),))


@rule(*CELLS)
def cell(call: Call) -> Outcome:
    """One step in time."""
    kind, x = CELLS[call.name], tensor(call["input"])
    states = call["hx"] if isinstance(call["hx"], list | tuple) else [call["hx"]]
    own = Parameters(*[None if call[n] is None else stored(call[n]) for n in ("w_ih", "w_hh", "b_ih", "b_hh")])  # type: ignore[arg-type]
    first = [None if tensor(s).zero else _last(call, tensor(s).units) for s in states]
    found = _step(call, kind, own, _last(call, x.units), first)
    rank = x.value.dim()
    units = [part.each(lambda factor: factor.reshape([1] * (rank - 1) + [-1])) for part in found]
    return units if call.name == "lstm_cell" else units[0]
