"""The same federation over Flower: `Server` in a ServerApp, `answer` or `client_app` in a ClientApp.

Nothing is imported before it is used: a Flower deployment starts a new process for every message.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedveil.flower.client import answer, client_app, prepared
    from fedveil.flower.server import Server

__all__ = ["Server", "answer", "client_app", "prepared"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{'server' if name == 'Server' else 'client'}"), name)
