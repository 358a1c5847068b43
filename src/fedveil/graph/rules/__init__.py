"""The symmetry table: one small rule an operation. Importing this package registers them all."""

from fedveil.graph.rules import arithmetic, elementwise, linear, norm, pool, shape

__all__ = ["arithmetic", "elementwise", "linear", "norm", "pool", "shape"]
