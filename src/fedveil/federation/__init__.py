"""Federated training: the server, its clients, and the engines that connect them."""

from fedveil.federation.history import History
from fedveil.federation.limits import Limits
from fedveil.federation.local import Federation

__all__ = ["Federation", "History", "Limits"]
