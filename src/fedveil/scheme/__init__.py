"""The paper, a section a file: entropy, secret, perturb, client, recover; losses and the anchor beside them."""

from fedveil.scheme.client import client_step
from fedveil.scheme.entropy import Entropy
from fedveil.scheme.messages import Broadcast, Update
from fedveil.scheme.perturb import client_view, perturb
from fedveil.scheme.recover import Recovered, recover
from fedveil.scheme.secret import Secret, draw_secret

__all__ = [
    "Broadcast",
    "Entropy",
    "Recovered",
    "Secret",
    "Update",
    "client_step",
    "client_view",
    "draw_secret",
    "perturb",
    "recover",
]
