"""The operations after the layer that is masked additively."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fedveil.graph.export import Exported, short_name

LAYERS = {"linear", *[f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)]}
ELEMENTWISE = {
    "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus", "softsign", "sigmoid",
    "log_sigmoid", "tanh", "hardtanh", "hardswish", "hardsigmoid", "hardshrink", "softshrink", "tanhshrink",
    "threshold", "clamp", "clamp_min", "clamp_max", "abs", "neg", "exp", "log", "log1p", "sqrt", "rsqrt", "square",
    "pow", "sin", "cos", "add", "sub", "mul", "div", "clone", "contiguous", "alias", "_to_copy", "to", "type_as",
}  # fmt: skip
UPSAMPLED = {
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d",
    "upsample_bicubic2d", "upsample_trilinear3d",
}  # fmt: skip
OF_A_SAMPLE = {
    *LAYERS, *UPSAMPLED, "layer_norm", "group_norm", "rms_norm", "pixel_shuffle", "pixel_unshuffle", "prelu",
    *[f"{kind}{way}_pool{n}d" for kind in ("", "adaptive_") for way in ("avg", "max") for n in (1, 2, 3)],
}  # fmt: skip
ALONG_DIMS = {
    "softmax", "log_softmax", "mean", "sum", "amax", "amin", "logsumexp", "norm", "linalg_vector_norm", "slice",
    "select", "narrow", "glu", "squeeze", "unsqueeze", "transpose", "flip", "cumsum", "argmax", "max", "std", "var",
}  # fmt: skip
RESHAPED = {"view", "reshape", "flatten", "unflatten", "_unsafe_view"}
ONLY_IN_EVAL = {"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "batch_norm", "instance_norm"}


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
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function; if it is the layer, change its result."""
        given = kwargs or {}
        found = func(*args, **given)
        weight = args[1] if len(args) > 1 else given.get("weight")
        if weight is not self._weight or getattr(func, "__name__", "") not in LAYERS:
            return found
        self.calls += 1
        return self._change(found)


def keeps_samples_apart(exported: Exported, node: fx.Node) -> bool:
    """Whether no operation after a node couples the samples of a batch (the first dim).

    Unknown operations count as coupling. So does a tensor that depends on the inputs by another path than the node,
    because it has the original batch size.
    """
    following = {node}
    for step in exported.graph.nodes:
        tensors = [n for n in step.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
        if step.op != "call_function" or not any(n in following for n in tensors):
            continue
        others = [n for n in tensors if n not in following]
        stored = all(n.name in exported.parameters or n.name in exported.buffers for n in others)
        if not stored or not _keeps_samples_apart(step, others):
            return False
        following.add(step)
    return True


def _keeps_samples_apart(step: fx.Node, parameters: list[fx.Node]) -> bool:
    value, first = step.meta.get("val"), step.all_input_nodes[0].meta.get("val")
    if not isinstance(value, Tensor) or not isinstance(first, Tensor) or not hasattr(step.target, "_schema"):
        return False
    name = short_name(step.target).rstrip("_")
    given = dict(zip([a.name for a in step.target._schema.arguments], step.args, strict=False)) | step.kwargs
    if name in ELEMENTWISE:
        return all(t.dim() < value.dim() or t.shape[0] == 1 for t in (n.meta["val"] for n in parameters))
    if name in ONLY_IN_EVAL:
        return not any(given.get(key) for key in ("train", "training", "use_input_stats"))
    if name in ALONG_DIMS:
        keys = [key for key in ("dim", "dims", "dim0", "dim1") if key in given]
        dims = [d % max(1, first.dim() + (name == "unsqueeze")) for key in keys for d in pytree.tree_leaves(given[key])]
        return bool(dims) and 0 not in dims
    if name == "permute":
        return bool(given["dims"][0] % first.dim() == 0)
    if name in RESHAPED:
        return value.dim() > 0 and value.shape[0] == first.shape[0]
    return name in OF_A_SAMPLE
