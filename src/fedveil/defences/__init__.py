"""Ways to train together: one small interface, one file each. Names are imported when they are first used."""

from typing import TYPE_CHECKING

from fedveil.lookup import lazily

if TYPE_CHECKING:
    from fedveil.defences.dbcl import DBCL
    from fedveil.defences.interface import ClientSide, Defence, Samples, ServerSide
    from fedveil.defences.plain import Plain
    from fedveil.defences.ppdl import PPDL
    from fedveil.defences.private import Private, innermost
    from fedveil.defences.spn import SPN
    from fedveil.defences.veil import Veil
    from fedveil.scheme import Aggregate
else:
    _HOMES = {name: name.lower() for name in ("DBCL", "PPDL", "SPN", "Plain", "Private", "Veil")}
    _HOMES |= dict.fromkeys(("Aggregate", "ClientSide", "Defence", "Samples", "ServerSide"), "interface")
    __getattr__ = lazily(__name__, _HOMES | {"innermost": "private"})

__all__ = [
    "DBCL",
    "PPDL",
    "SPN",
    "Aggregate",
    "ClientSide",
    "Defence",
    "Plain",
    "Private",
    "Samples",
    "ServerSide",
    "Veil",
    "innermost",
]
