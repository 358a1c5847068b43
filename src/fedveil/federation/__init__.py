"""Federated training: the server, its clients, and the engines that connect them."""

from typing import TYPE_CHECKING

from fedveil.lookup import lazy_getattr

if TYPE_CHECKING:
    from fedveil.federation.history import History
    from fedveil.federation.limits import Limits
    from fedveil.federation.local import Federation
    from fedveil.federation.user_metrics import Probabilities

__all__ = ["Federation", "History", "Limits", "Probabilities"]
__getattr__ = lazy_getattr(
    __name__, {"Federation": "local", "History": "history", "Limits": "limits", "Probabilities": "user_metrics"}
)
