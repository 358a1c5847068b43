"""The same federation over Flower: `Server` in a ServerApp, `answer` or `client_app` in a ClientApp.

Nothing is imported before it is used: a Flower deployment starts a new process for every message.
"""

from typing import TYPE_CHECKING

from fedveil.lookup import lazily

if TYPE_CHECKING:
    from fedveil.flower.client import answer, client_app, prepared
    from fedveil.flower.server import Server
else:
    _HOMES = dict.fromkeys(("answer", "client_app", "prepared"), "client") | {"Server": "server"}
    __getattr__ = lazily(__name__, _HOMES, needs="flwr")

__all__ = ["Server", "answer", "client_app", "prepared"]
