"""Who says what, round by round: server, clients, engine, checkpoints."""

from fedveil.federation.limits import Limits
from fedveil.federation.local import Federation, History

__all__ = ["Federation", "History", "Limits"]
