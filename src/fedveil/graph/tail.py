"""The operations after the layer that takes additive noise."""

from collections.abc import Callable, Iterable

from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fedveil.graph import operations
from fedveil.graph.export import ModelGraph
from fedveil.graph.nodes import named_arguments, operation_name
from fedveil.graph.operations import AVERAGE_POOLS, LAYERS, MAX_POOLS, RESHAPES, UPSAMPLINGS

ONLY_IN_EVAL = {
    "dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "rrelu", "batch_norm", "instance_norm",
}  # fmt: skip
ELEMENTWISE = operations.POSITIVE | operations.ODD | operations.EVEN | operations.OTHER | {
    "hardtanh", "neg", "pow", "add", "sub", "mul", "div", "clone", "contiguous", "alias", "_to_copy", "to", "type_as",
}  # fmt: skip
SAMPLE_BY_SAMPLE = LAYERS | UPSAMPLINGS | AVERAGE_POOLS | MAX_POOLS | {
    "layer_norm", "group_norm", "rms_norm", "pixel_shuffle", "pixel_unshuffle", "prelu",
}  # fmt: skip
ALONG_DIMS = {
    "softmax", "log_softmax", "mean", "sum", "amax", "amin", "logsumexp", "norm", "linalg_vector_norm", "slice",
    "select", "narrow", "glu", "squeeze", "unsqueeze", "transpose", "flip", "cumsum", "argmax", "max", "std", "var",
}  # fmt: skip


class AtLayer(TorchFunctionMode):
    """Changes the output of the Linear or convolution with this weight, wherever forward calls it.

    Attributes:
        calls: how often forward called it.
    """

    def __init__(self, weight: Tensor, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.calls = 0
        self._weight, self._change = weight, change

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run the function; if it is the layer, change its result."""
        named = kwargs or {}
        found = func(*args, **named)
        weight = args[1] if len(args) > 1 else named.get("weight")
        if weight is not self._weight or getattr(func, "__name__", "") not in LAYERS:
            return found
        assert isinstance(found, Tensor)
        self.calls += 1
        return self._change(found)


def keeps_samples_apart(graph: ModelGraph, node: fx.Node) -> bool:
    """Return whether no operation after a node couples the samples of a batch (the first dim).

    Unknown operations count as coupling. So does a tensor that depends on the inputs by another path than the node,
    because it has the original batch size.
    """
    following = {node}
    for step in graph.graph.nodes:
        tensors = [n for n in step.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
        if step.op != "call_function" or not any(n in following for n in tensors):
            continue
        others = [n for n in tensors if n not in following]
        stored = all(n.name in graph.parameters or n.name in graph.buffers for n in others)
        if not stored or not _keeps_samples_apart(step, others):
            return False
        following.add(step)
    return True


def _keeps_samples_apart(step: fx.Node, parameters: list[fx.Node]) -> bool:
    value, first = step.meta.get("val"), step.all_input_nodes[0].meta.get("val")
    if not isinstance(value, Tensor) or not isinstance(first, Tensor) or not hasattr(step.target, "_schema"):
        return False
    name, arguments = operation_name(step), named_arguments(step)
    if name in ONLY_IN_EVAL:
        return not any(arguments.get(key) for key in ("train", "training", "use_input_stats"))
    if name in ELEMENTWISE:
        return all(t.dim() < value.dim() or t.shape[0] == 1 for t in (n.meta["val"] for n in parameters))
    dims = pytree.tree_leaves([arguments.get(key) for key in ("dim", "dims", "dim0", "dim1")])
    dims = [d % max(1, first.dim() + (name == "unsqueeze")) for d in dims if isinstance(d, int)]
    if name in ALONG_DIMS:
        return bool(dims) and 0 not in dims
    if name == "permute":
        return bool(dims[0] == 0)
    if name in RESHAPES:
        return value.dim() > 0 and value.shape[0] == first.shape[0]
    return name in SAMPLE_BY_SAMPLE
