"""The symmetry table: one small rule per ATen operation. Importing this package registers them all."""

from fedveil.graph.rules import arithmetic, attention, elementwise, linear, norm, recurrent, reduce, shape

__all__ = ["arithmetic", "attention", "elementwise", "linear", "norm", "recurrent", "reduce", "shape"]
