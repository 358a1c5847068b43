"""Federations over Flower: `Server` for the ServerApp, `answer` or `client_app` for the ClientApp.

Names are imported when they are first used, because a Flower deployment starts a new process for every message.
"""

from typing import TYPE_CHECKING

from fedveil.lookup import lazy_getattr

if TYPE_CHECKING:
    from fedveil.flower.client import answer, client_app
    from fedveil.flower.records import cache_records
    from fedveil.flower.server import Server
else:
    _MODULES = {"answer": "client", "client_app": "client", "cache_records": "records", "Server": "server"}
    __getattr__ = lazy_getattr(__name__, _MODULES, dependency="flwr")

__all__ = ["Server", "answer", "cache_records", "client_app"]
