"""Federated training: the server's loop, its clients, and the engines between them."""

from fedveil.federation.history import History
from fedveil.federation.limits import Limits
from fedveil.federation.local import Federation

__all__ = ["Federation", "History", "Limits"]
