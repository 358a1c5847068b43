"""Ways to train together: one interface, one module each. Names are imported when they are first used."""

from typing import TYPE_CHECKING

from fedveil.lookup import lazily

if TYPE_CHECKING:
    from fedveil.defences.dbcl import DBCL
    from fedveil.defences.interface import Codec, Defence, DefenceClient, DefenceRound, DefenceServer, Ranges, Samples
    from fedveil.defences.plain import Plain
    from fedveil.defences.ppdl import PPDL
    from fedveil.defences.private import Private
    from fedveil.defences.spn import SPN
    from fedveil.defences.veil import Veil
else:
    _HOMES = {name: name.lower() for name in ("DBCL", "PPDL", "SPN", "Plain", "Private", "Veil")}
    _INTERFACE = ("Codec", "Defence", "DefenceClient", "DefenceRound", "DefenceServer", "Ranges", "Samples")
    __getattr__ = lazily(__name__, _HOMES | dict.fromkeys(_INTERFACE, "interface"))

__all__ = [
    "DBCL",
    "PPDL",
    "SPN",
    "Codec",
    "Defence",
    "DefenceClient",
    "DefenceRound",
    "DefenceServer",
    "Plain",
    "Private",
    "Ranges",
    "Samples",
    "Veil",
]
