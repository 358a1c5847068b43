"""Analyse a model: find which axes share noise, and the symmetry of each. Uses no random numbers and no I/O."""

from fedveil.graph.analyse import analyse
from fedveil.graph.coverage import as_dict
from fedveil.graph.plan import Plan
from fedveil.graph.units import Symmetry

__all__ = ["Plan", "Symmetry", "analyse", "as_dict"]
