"""The rules for ATen operations. Importing this package registers all of them."""

from fedveil.graph.rules import elementwise, linear, recurrent, reduce, shape

__all__ = ["elementwise", "linear", "recurrent", "reduce", "shape"]
