"""Build a plan from the constraints recorded while traversing a model."""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedveil.errors import AnalysisError, BadArgument
from fedveil.graph.head import Head
from fedveil.graph.ledger import Ledger, Region
from fedveil.graph.outputs import Output
from fedveil.graph.plan import Axis, Entry, Layout, ModelState, Plan, Pool, Reason, SlotRange, Slots, TensorPart
from fedveil.graph.solve import Orders, Scales, components, ranks, solve_orders, solve_scales
from fedveil.graph.units import Dims, Symmetry, compress, reshape_along, varying_dims
from fedveil.graph.walk import Walk

MAX_POOLED = 2**15  # maximum number of elements in a pooled tensor
LOCAL_PARAMETERS = "the frozen parameters"
Frozen = Literal["sent", "local"]


def build_plan(
    model: nn.Module,
    walk: Walk,
    head: Head | None,
    form: str,
    public: Collection[str] = (),
    frozen: Frozen = "sent",
    output: Output | None = None,
) -> Plan:
    """Build a plan from the constraints that the walk recorded.

    Args:
        model: the model.
        walk: the traversal of its graph.
        head: the layer that receives additive noise.
        form: the form of the inputs, which the plan stores.
        public: names of parameters whose values clients know.
        frozen: whether frozen parameters are sent, or are neither perturbed nor sent.
        output: the choice of the model's predictions, which the plan stores.
    """
    ledger, name, state = walk.ledger, type(model).__name__, ModelState.read(model)
    local = local_parameters(model) if frozen == "local" else {}
    for region in [region for local_name in local for region in ledger.regions.get(local_name, ())]:
        ledger.pin(region.units, LOCAL_PARAMETERS, "clients have them, so they cannot be perturbed")
    scales, orders = solve_scales(ledger), solve_orders(ledger)
    layout, builder = _build_layout(name, state, walk.used_names, local), _SlotBuilder(scales, orders)
    pieces = {e.name: [builder.add(region) for region in ledger.regions.get(e.name, ())] for e in layout.entries}
    pool = Pool.build([e for e in layout.entries if e.shape.numel() <= MAX_POOLED], pieces, layout.device)
    pins = {Reason(it.where, it.reason): None for it in ledger.limits if not it.symmetry and it.where != "output"}
    axes, known_names = _build_axes(ledger, scales), _find_known_names(state.parameters, layout, public)
    solved = scales.symmetries, orders, builder.finish()
    return Plan(name, axes, head, layout, state.modes, *solved, pieces, pool, tuple(pins), known_names, form, output)


def check_frozen(where: str, frozen: str) -> None:
    """Refuse an unknown value of `frozen`."""
    if frozen not in ("sent", "local"):
        raise BadArgument(where, f'frozen must be "sent" or "local", got {frozen!r:.40}')


def local_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that do not require gradients, by name."""
    return {name: parameter.detach() for name, parameter in model.named_parameters() if not parameter.requires_grad}


def _build_layout(model_name: str, state: ModelState, used_names: set[str], local: Collection[str]) -> Layout:
    """Choose the position of each of the model's tensors in the flat vector; local tensors have none."""
    parameters = {name: tensor for name, tensor in state.parameters.items() if name in used_names}
    groups = (
        {name: tensor for name, tensor in parameters.items() if tensor.requires_grad},
        {name: tensor for name, tensor in parameters.items() if not tensor.requires_grad and name not in local},
        {name: tensor for name, tensor in state.buffers.items() if tensor.is_floating_point()},
    )
    tensors = [*parameters.values(), *groups[2].values()]
    dtypes = {(tensor.dtype, tensor.device) for tensor in tensors}
    if len(dtypes) != 1:
        dtype_names = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in dtypes)) or "no parameters"
        fix = "call model.to(device, torch.float32) before analyse"
        raise AnalysisError(model_name, f"its tensors must share one dtype and device, got {dtype_names}", fix)
    entries: list[Entry] = []
    for name, tensor in (pair for group in groups for pair in group.items()):
        start = entries[-1].stop if entries else 0
        entries.append(Entry(name, tensor.shape, start, start + tensor.numel(), tensor.detach().to("meta")))
    trainable, frozen, buffers = (tuple(entry for entry in entries if entry.name in group) for group in groups)
    counters = tuple(name for name in state.buffers if name not in groups[2])
    unused = tuple(name for name in state.parameters if name not in used_names)
    local_tensors = [(name, tensor) for name, tensor in parameters.items() if name in local]
    local_entries = tuple(
        Entry(name, tensor.shape, 0, tensor.numel(), tensor.detach().to("meta")) for name, tensor in local_tensors
    )
    dtype, device = dtypes.pop()
    return Layout(trainable, frozen, buffers, counters, unused, dtype, device, local_entries)


class _SlotBuilder:
    """A builder that collects the slots of all tensors."""

    def __init__(self, scales: Scales, orders: Orders) -> None:
        zeros, ones = np.zeros(1, np.int64), np.ones(1, np.int64)
        self._scales, self._orders = scales, orders
        self._scale_columns = [(zeros, ones)]
        self._order_columns = [(zeros,) * 5]
        self._scale_count = self._order_count = 1

    def add(self, region: Region) -> TensorPart:
        """Create the slots of a region and return the corresponding part of a tensor."""
        scale = [slots for slots in map(self._add_scale, region.units.scale) if slots]
        order, used_dims = [], frozenset[int]()
        for factor in region.units.order:
            slots = self._add_order(factor, region.view.strides, used_dims)
            if slots:
                order.append(slots)
                used_dims |= frozenset(d for d, n in enumerate(slots.shape) if n > 1)
        shape, strides, offset = region.view
        return TensorPart(offset, shape, strides, tuple(scale), tuple(order))

    def _add_scale(self, factor: Tensor) -> SlotRange | None:
        references, scales = factor.numpy(), self._scales
        unit = scales.classes[np.abs(references)]
        unit = np.where(scales.symmetries[unit] > 0, unit, 0)
        inverse = scales.powers[np.abs(references)] * np.sign(references) < 0
        numbers = compress(torch.from_numpy(np.asarray(2 * unit + inverse * (unit > 0))))
        unit, inverse = np.divmod(numbers.numpy().ravel(), 2)
        if not unit.any():
            return None
        self._scale_columns.append((unit, 1 - 2 * inverse))
        first, self._scale_count = self._scale_count, self._scale_count + len(unit)
        return SlotRange(first, tuple(numbers.shape))

    def _add_order(self, factor: Tensor, strides: Sequence[int], used_dims: Dims) -> SlotRange | None:
        kinds, members = self._orders.kinds, self._orders.members
        label = self._orders.classes[factor.numpy()]
        compressed = compress(torch.from_numpy(np.asarray(np.where(kinds[label] > 0, label, 0))))
        dims = varying_dims(compressed) - used_dims
        if not dims or not compressed.any():
            return None
        position = torch.zeros((1,) * compressed.dim(), dtype=torch.int64)
        for d in dims:
            position = position + reshape_along(torch.arange(compressed.shape[d]) * strides[d], d, compressed.dim())
        label, flat_position = compressed.numpy().ravel(), position.expand(compressed.shape).numpy().ravel()
        count = len(label)
        rank, kind, member = ranks(label), kinds[label], members[label]
        group = np.where(kind == 0, -1 - np.arange(count), kind)  # each fixed position forms a separate group
        by_kind = np.lexsort((rank, member, group))
        starts = np.searchsorted(group[by_kind], group)
        repeat = np.where(kind == 0, 0, np.bincount(label)[label])
        origin = self._order_count + starts + np.where(kind == 0, 0, rank)
        self._order_columns.append(
            (np.where(kind == 0, 0, label), origin, repeat, flat_position, flat_position[by_kind])
        )
        first, self._order_count = self._order_count, self._order_count + count
        return SlotRange(first, tuple(compressed.shape))

    def finish(self) -> Slots:
        """Return the slots collected so far."""
        unit, power = map(np.concatenate, zip(*self._scale_columns, strict=True))
        columns = map(np.concatenate, zip(*self._order_columns, strict=True))
        return Slots(int(self._scales.classes.max()) + 1, unit, power, *columns)


def _build_axes(ledger: Ledger, scales: Scales) -> tuple[Axis, ...]:
    """Group scale units into axes, and merge axes that share a class."""
    classes = scales.classes
    origins = [(where, classes[units.numpy()]) for where, units in ledger.scale_origins]
    pairs = [(np.full_like(members, index), len(origins) + members) for index, (_, members) in enumerate(origins)]
    roots = components(len(origins) + len(scales.symmetries), pairs)  # the first origin in each node's component
    limits: dict[int, dict[Reason, None]] = {}
    for limit in ledger.limits:
        for root in np.unique(roots[len(origins) + classes[limit.members.numpy()]]):
            limits.setdefault(int(root), {})[Reason(limit.where, limit.reason)] = None
    axes = []
    for root in dict.fromkeys(roots[: len(origins)].tolist()):
        numbers = np.flatnonzero(roots[: len(origins)] == root)
        members = np.unique(np.concatenate([origins[n][1] for n in numbers]))
        symmetry = Symmetry(int(np.bitwise_and.reduce(scales.symmetries[members])))
        names = tuple(dict.fromkeys(origins[n][0] for n in numbers))
        axes.append(Axis(names, len(members), symmetry, tuple(limits.get(root, {}))))
    return tuple(axes)


def _find_known_names(parameters: Mapping[str, Tensor], layout: Layout, public: Collection[str]) -> tuple[str, ...]:
    """Return the names of constant parameters, followed by those declared public."""
    names = [entry.name for entry in layout.trainable + layout.frozen]
    declared = [name for name in names if any(name == p or name.startswith(p.rstrip(".") + ".") for p in public)]
    return tuple(dict.fromkeys([*[name for name in names if _is_constant(parameters[name])], *sorted(declared)]))


def _is_constant(value: Tensor) -> bool:
    """Return whether all elements are equal and nonzero, as in a new norm layer; false for a single element."""
    flat = value.detach().reshape(-1)
    first = flat[:1]
    return flat.numel() > 1 and bool(first != 0) and bool((flat[:64] == first).all()) and bool((flat == first).all())
