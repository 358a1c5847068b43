"""Names of ATen operations by kind, and functions that read an operation's name, arguments and location.

Names include neither the overload nor the in-place underscore.
"""

from torch import fx
from torch.fx.node import Argument

SPATIAL_DIMS = (1, 2, 3)
CONVOLUTIONS = frozenset(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in SPATIAL_DIMS)
LAYERS = CONVOLUTIONS | {"linear"}
ADDMM = "addmm"  # computes a Linear whose weight is transposed, as in GPT-2
MATMUL = "matmul"  # computes a Linear if the second matrix is a parameter or its transpose, as in Falcon
TRANSPOSES = {"numpy_T", "t", "mT", "transpose", "permute"}

AVERAGE_POOLS = frozenset(f"{kind}avg_pool{n}d" for kind in ("", "adaptive_", "_adaptive_") for n in SPATIAL_DIMS)
MAX_POOLS = frozenset(f"{kind}max_pool{n}d" for kind in ("", "adaptive_") for n in SPATIAL_DIMS)
UPSAMPLINGS = {
    "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d",
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
    *[f"{kind}{n}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for n in SPATIAL_DIMS],
}  # fmt: skip
RESHAPES = {"view", "reshape", "flatten", "unflatten", "_unsafe_view"}

# Operations that may follow a head: linear ones that treat every output in the same way. SAME_ELEMENTS only reshape.
SAME_ELEMENTS = RESHAPES | {"squeeze", "unsqueeze", "contiguous", "clone", "alias"}
UNIFORM_LINEAR = SAME_ELEMENTS | UPSAMPLINGS | AVERAGE_POOLS | {
    "permute", "transpose", "movedim", "t", "mean", "sum", "slice", "narrow",
}  # fmt: skip

# Operations that do not couple samples: always (also ELEMENTWISE in rules/elementwise.py), only in evaluation mode,
# or along dims other than the first.
SAMPLE_BY_SAMPLE = LAYERS | UPSAMPLINGS | AVERAGE_POOLS | MAX_POOLS | {
    "layer_norm", "group_norm", "rms_norm", "pixel_shuffle", "pixel_unshuffle", "prelu",
}  # fmt: skip
ONLY_IN_EVAL = {
    "dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "rrelu", "batch_norm", "instance_norm",
}  # fmt: skip
ALONG_DIMS = {
    "softmax", "log_softmax", "mean", "sum", "amax", "amin", "logsumexp", "norm", "linalg_vector_norm", "slice",
    "select", "narrow", "glu", "squeeze", "unsqueeze", "transpose", "flip", "cumsum", "argmax", "max", "std", "var",
}  # fmt: skip


def count_spatial_dims(name: str) -> int:
    """Return an operation's number of spatial dims, as given in its name, such as 2 for conv2d."""
    return next(n for n in SPATIAL_DIMS if f"{n}d" in name)


def operation_name(node: fx.Node) -> str:
    """Return the name of an operation without namespace, overload or in-place underscore, such as "linear"."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet is None:
        return str(getattr(node.target, "__name__", node.target))
    name = str(packet).rpartition(".")[2]
    return name.rstrip("_") if is_in_place(node) else name


def is_in_place(node: fx.Node) -> bool:
    """Return whether an operation modifies one of its arguments in place."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def named_arguments(node: fx.Node) -> dict[str, Argument]:
    """Return the arguments of an ATen operation by name, including defaults."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    passed = dict(zip([argument.name for argument in schema], node.args, strict=False)) | node.kwargs
    return {argument.name: passed.get(argument.name, argument.default_value) for argument in schema}


def innermost_module(node: fx.Node) -> tuple[str, str]:
    """Return the path and class name of the innermost module that calls an operation."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return "", ""
    path, kind = list(stack.values())[-1]
    return path, kind if isinstance(kind, str) else kind.__qualname__


def describe_location(node: fx.Node) -> str:
    """Return an operation's location for messages: its module's path, and the PyTorch class or the operation's name."""
    path, kind = innermost_module(node)
    label = kind.rpartition(".")[2] if kind.startswith("torch.nn.modules") else operation_name(node).rstrip("_")
    return f"{path} ({label})" if path else label
