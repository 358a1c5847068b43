"""Defences, each in its own module, and the interface that they share. Names are imported on first use."""

from typing import TYPE_CHECKING

from fedveil.lookup import lazy_getattr

__all__ = ["DBCL", "PPDL", "SPN", "Plain", "Private", "Veil"]  # each is defined in the module of the same name
_MODULES = {name: name.lower() for name in __all__}
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
    __getattr__ = lazy_getattr(__name__, {name: _MODULES.get(name, "interface") for name in __all__})
