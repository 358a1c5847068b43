"""Ways to train together: one small interface, one file each."""

from fedveil.defences.interface import Aggregate, Defence, Stateless
from fedveil.defences.plain import Plain
from fedveil.defences.veil import Veil

__all__ = ["Aggregate", "Defence", "Plain", "Stateless", "Veil"]
