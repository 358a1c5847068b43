"""Federated training: the server, its clients, and the engines that connect them."""

from fedveil.federation.history import History
from fedveil.federation.limits import Limits
from fedveil.federation.local import Federation
from fedveil.federation.user_metrics import Probabilities

__all__ = ["Federation", "History", "Limits", "Probabilities"]
