"""The rules, one for each ATen operation. Importing this package registers them all."""

from fedveil.graph.rules import elementwise, linear, recurrent, reduce, shape

__all__ = ["elementwise", "linear", "recurrent", "reduce", "shape"]
