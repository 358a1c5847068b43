"""The scheme of the paper, one section per module: noise, perturb, client, recover; with losses and decoys."""

from fedveil.scheme.client import client_step
from fedveil.scheme.entropy import Entropy
from fedveil.scheme.losses import (
    LOSSES,
    AbsoluteError,
    BatchLoss,
    BinaryCrossEntropy,
    CrossEntropy,
    Hinge,
    Huber,
    LogCosh,
    Loss,
    Poisson,
    SquaredError,
    find_loss,
)
from fedveil.scheme.messages import Broadcast, Update
from fedveil.scheme.noise import NoiseSettings
from fedveil.scheme.perturb import client_view
from fedveil.scheme.perturbation import Perturbation, VeilSession
from fedveil.scheme.result import Aggregate

__all__ = [
    "LOSSES",
    "AbsoluteError",
    "Aggregate",
    "BatchLoss",
    "BinaryCrossEntropy",
    "Broadcast",
    "CrossEntropy",
    "Entropy",
    "Hinge",
    "Huber",
    "LogCosh",
    "Loss",
    "NoiseSettings",
    "Perturbation",
    "Poisson",
    "SquaredError",
    "Update",
    "VeilSession",
    "client_step",
    "client_view",
    "find_loss",
]
