"""Ways to train together: one small interface, one file each."""

from fedveil.defences.dbcl import DBCL
from fedveil.defences.interface import Aggregate, Defence, Stateless
from fedveil.defences.plain import Plain
from fedveil.defences.ppdl import PPDL
from fedveil.defences.private import Private, innermost
from fedveil.defences.spn import SPN
from fedveil.defences.veil import Veil

__all__ = ["DBCL", "PPDL", "SPN", "Aggregate", "Defence", "Plain", "Private", "Stateless", "Veil", "innermost"]
