"""Names and arguments of the operations in an exported graph."""

from torch import fx
from torch.fx.node import Argument


def operation_name(node: fx.Node) -> str:
    """Return the name of a call without namespace, overload and in-place underscore: "linear"."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet is None:
        return str(getattr(node.target, "__name__", node.target))
    name = str(packet).rpartition(".")[2]
    return name.rstrip("_") if is_in_place(node) else name


def is_in_place(node: fx.Node) -> bool:
    """Return whether a call writes into one of its arguments."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def named_arguments(node: fx.Node) -> dict[str, Argument]:
    """Return the arguments of an ATen call by their names in its schema, with defaults."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    passed = dict(zip([argument.name for argument in schema], node.args, strict=False)) | node.kwargs
    return {argument.name: passed.get(argument.name, argument.default_value) for argument in schema}


def innermost_module(node: fx.Node) -> tuple[str, str]:
    """Return path and class name of the innermost module whose forward contains a node."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return "", ""
    path, kind = list(stack.values())[-1]
    return path, kind if isinstance(kind, str) else kind.__qualname__


def describe_location(node: fx.Node) -> str:
    """Name an operation in messages: the module's path and, if it is one of PyTorch's, its class."""
    path, kind = innermost_module(node)
    what = kind.rpartition(".")[2] if kind.startswith("torch.nn.modules") else operation_name(node).rstrip("_")
    return f"{path} ({what})" if path else what
