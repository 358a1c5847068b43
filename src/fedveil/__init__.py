"""Fedveil: federated learning on a covered model, and attacks that measure what it hides."""

TYPE_CHECKING = False  # typing's, without an import: the working directory comes off the path in __main__ only

if TYPE_CHECKING:
    from fedveil.errors import FedveilError
    from fedveil.federation import Federation, History, Limits
    from fedveil.graph import Plan, Symmetry, analyse
    from fedveil.runs.folder import load_model
    from fedveil.scheme import (
        BatchLoss,
        Broadcast,
        CrossEntropy,
        Entropy,
        Huber,
        Recovered,
        Secret,
        Update,
        client_step,
        client_view,
        draw_secret,
        perturb,
        recover,
    )

    __version__: str

__all__ = [
    "BatchLoss",
    "Broadcast",
    "CrossEntropy",
    "Entropy",
    "Federation",
    "FedveilError",
    "History",
    "Huber",
    "Limits",
    "Plan",
    "Recovered",
    "Secret",
    "Symmetry",
    "Update",
    "analyse",
    "client_step",
    "client_view",
    "draw_secret",
    "load_model",
    "perturb",
    "recover",
]

_HOMES = {"FedveilError": "errors", "Federation": "federation", "History": "federation", "Limits": "federation"}
_HOMES |= {"Plan": "graph", "Symmetry": "graph", "analyse": "graph", "load_model": "runs.folder"}  # all others: scheme


def __getattr__(name: str) -> object:
    """Import what is asked for when it is first used: `fedveil --help` needs no torch."""
    from importlib import import_module, metadata

    if name == "__version__":
        return metadata.version("fedveil")
    if name in __all__:
        return getattr(import_module(f"fedveil.{_HOMES.get(name, 'scheme')}"), name)
    try:
        if not name.startswith("_"):
            return import_module(f"fedveil.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"fedveil.{name}":
            raise
    raise AttributeError(f"module 'fedveil' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Public names and rooms, without an import of any of them."""
    from pkgutil import iter_modules

    return sorted({*globals(), *__all__, "__version__", *(room.name for room in iter_modules(__path__) if room.ispkg)})
