"""Names of ATen operations by kind, without overload and in-place underscore."""

SPATIAL_DIMS = (1, 2, 3)
CONVOLUTIONS = frozenset(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in SPATIAL_DIMS)
LAYERS = CONVOLUTIONS | {"linear"}

AVERAGE_POOLS = frozenset(f"{kind}avg_pool{n}d" for kind in ("", "adaptive_", "_adaptive_") for n in SPATIAL_DIMS)
MAX_POOLS = frozenset(f"{kind}max_pool{n}d" for kind in ("", "adaptive_") for n in SPATIAL_DIMS)
UPSAMPLINGS = {
    "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d",
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
    *[f"{kind}{n}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for n in SPATIAL_DIMS],
}  # fmt: skip
RESHAPES = {"view", "reshape", "flatten", "unflatten", "_unsafe_view"}

# Functions of one number, by the factors that they commute with.
POSITIVE = {"relu", "leaky_relu", "abs", "rrelu"}
ODD = {
    "tanh", "sin", "asinh", "atan", "erf", "sign", "softshrink", "hardshrink", "sinh", "tan", "asin", "atanh",
    "erfinv",
}  # fmt: skip
EVEN = {"square", "cos", "cosh"}
OTHER = {
    "gelu", "silu", "sigmoid", "log_sigmoid", "softplus", "elu", "selu", "celu", "mish", "relu6", "hardswish",
    "hardsigmoid", "exp", "expm1", "log", "log1p", "log2", "sqrt", "rsqrt", "clamp", "clamp_min", "clamp_max",
    "threshold", "alpha_dropout", "feature_alpha_dropout", "erfc", "exp2", "logit", "round", "floor", "ceil",
    "trunc", "nan_to_num", "sinc",
}  # fmt: skip


def count_spatial_dims(name: str) -> int:
    """Return how many dims an operation such as conv2d or upsample_bilinear2d works on."""
    return next(n for n in SPATIAL_DIMS if f"{n}d" in name)
