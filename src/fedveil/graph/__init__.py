"""Analyse a model: find the axes that share noise and the symmetry of each axis, without random numbers or I/O."""

from fedveil.graph.analyse import analyse
from fedveil.graph.coverage import as_dict
from fedveil.graph.plan import Plan
from fedveil.graph.units import Symmetry

__all__ = ["Plan", "Symmetry", "analyse", "as_dict"]
