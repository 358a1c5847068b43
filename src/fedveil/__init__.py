"""Train one model across organisations on a perturbed copy, and measure how much the perturbation hides."""

TYPE_CHECKING = False  # do not import typing before __main__ has removed the working directory from sys.path

if TYPE_CHECKING:
    from fedveil.attacks.canaries import measure_epsilon
    from fedveil.defences import Veil
    from fedveil.errors import FedveilError
    from fedveil.federation import Federation, History, Limits
    from fedveil.graph import Plan, Symmetry, analyse
    from fedveil.privacy import Privacy
    from fedveil.runs.folder import load_model
    from fedveil.runs.predict import load_predictor
    from fedveil.scheme import (
        Aggregate,
        BatchLoss,
        Broadcast,
        CrossEntropy,
        Entropy,
        Huber,
        Perturbation,
        Update,
        client_step,
        client_view,
    )
    from fedveil.studies.audit.call import audit
    from fedveil.studies.model_audit import audit_model

    __version__: str

__all__ = [
    "Aggregate",
    "BatchLoss",
    "Broadcast",
    "CrossEntropy",
    "Entropy",
    "Federation",
    "FedveilError",
    "History",
    "Huber",
    "Limits",
    "Perturbation",
    "Plan",
    "Privacy",
    "Symmetry",
    "Update",
    "Veil",
    "analyse",
    "audit",
    "audit_model",
    "client_step",
    "client_view",
    "load_model",
    "load_predictor",
    "measure_epsilon",
]

# the module that defines each public name; names that are not listed are in fedveil.scheme
_MODULES = {"FedveilError": "errors", "Privacy": "privacy", "Veil": "defences"}
_MODULES |= {"load_model": "runs.folder", "load_predictor": "runs.predict"}
_MODULES |= dict.fromkeys(("Federation", "History", "Limits"), "federation")
_MODULES |= {"audit": "studies.audit.call", "audit_model": "studies.model_audit"}
_MODULES |= {"measure_epsilon": "attacks.canaries"}
_MODULES |= dict.fromkeys(("Plan", "Symmetry", "analyse"), "graph")


def __getattr__(name: str) -> object:
    """Import a public name or package on first use, so that `fedveil --help` does not import torch."""
    from importlib import import_module, metadata

    if name == "__version__":
        return metadata.version("fedveil")
    if name in __all__:
        return getattr(import_module(f"fedveil.{_MODULES.get(name, 'scheme')}"), name)
    try:
        if not name.startswith("_"):
            return import_module(f"fedveil.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"fedveil.{name}":
            raise
    raise AttributeError(f"module 'fedveil' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List public names and packages without importing them."""
    from pkgutil import iter_modules

    packages = (module.name for module in iter_modules(__path__) if module.ispkg)
    return sorted({*globals(), *__all__, "__version__", *packages})
