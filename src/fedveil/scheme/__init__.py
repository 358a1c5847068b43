"""The paper, one section per file: secret, perturb, client, recover; with losses, decoys and the anchor."""

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
from fedveil.scheme.perturb import client_view, perturb
from fedveil.scheme.recover import Recovered, recover
from fedveil.scheme.secret import Secret, draw_secret

__all__ = [
    "LOSSES",
    "AbsoluteError",
    "BatchLoss",
    "BinaryCrossEntropy",
    "Broadcast",
    "CrossEntropy",
    "Entropy",
    "Hinge",
    "Huber",
    "LogCosh",
    "Loss",
    "Poisson",
    "Recovered",
    "Secret",
    "SquaredError",
    "Update",
    "client_step",
    "client_view",
    "draw_secret",
    "find_loss",
    "perturb",
    "recover",
]
