"""The paper's scheme, with one module per section (noise, perturbation, client, recover), and losses."""

from fedveil.scheme.broadcast import Broadcast, Update, client_view
from fedveil.scheme.client import client_step
from fedveil.scheme.losses import LOSSES, BatchLoss, CrossEntropy, Huber, Loss, SquaredError, find_loss
from fedveil.scheme.noise import Entropy, NoiseSettings
from fedveil.scheme.perturbation import Perturbation, VeilSession
from fedveil.scheme.result import Aggregate

__all__ = ["LOSSES", "BatchLoss", "CrossEntropy", "Huber", "Loss", "SquaredError", "find_loss"]
__all__ += ["Aggregate", "Broadcast", "Entropy", "NoiseSettings", "Perturbation", "Update", "VeilSession"]
__all__ += ["client_step", "client_view"]
