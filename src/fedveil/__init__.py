"""Fedveil: federated learning on a covered model, and attacks that measure what it hides."""

from fedveil.errors import FedveilError
from fedveil.federation import Federation, History
from fedveil.graph import Plan, Symmetry, analyse
from fedveil.scheme import (
    BatchLoss,
    Broadcast,
    CrossEntropy,
    Entropy,
    Huber,
    NodeCount,
    Recovered,
    Secret,
    Update,
    client_step,
    client_view,
    draw_secret,
    perturb,
    recover,
)

__all__ = [
    "BatchLoss",
    "Broadcast",
    "CrossEntropy",
    "Entropy",
    "Federation",
    "FedveilError",
    "History",
    "Huber",
    "NodeCount",
    "Plan",
    "Recovered",
    "Secret",
    "Symmetry",
    "Update",
    "analyse",
    "client_step",
    "client_view",
    "draw_secret",
    "perturb",
    "recover",
]
