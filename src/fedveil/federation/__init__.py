"""Who says what, round by round: server, clients, engine, checkpoints."""

from fedveil.federation.local import Federation, History

__all__ = ["Federation", "History"]
