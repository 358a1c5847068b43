"""Defences: one interface, and one module for each. Names are imported when they are first used."""

from typing import TYPE_CHECKING

from fedveil.lookup import lazy_getattr

__all__ = ["DBCL", "PPDL", "SPN", "Plain", "Private", "Veil"]  # each in the module of its name
_HOMES = {name: name.lower() for name in __all__}
__all__ += ["Codec", "Defence", "DefenceClient", "DefenceRound", "DefenceServer", "Ranges", "Samples"]

if TYPE_CHECKING:
    from fedveil.defences.dbcl import DBCL
    from fedveil.defences.interface import Codec, Defence, DefenceClient, DefenceRound, DefenceServer, Ranges, Samples
    from fedveil.defences.plain import Plain
    from fedveil.defences.ppdl import PPDL
    from fedveil.defences.private import Private
    from fedveil.defences.spn import SPN
    from fedveil.defences.veil import Veil
else:
    __getattr__ = lazy_getattr(__name__, {name: _HOMES.get(name, "interface") for name in __all__})
