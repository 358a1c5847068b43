"""Attacks by a client. They see what the client received and its own records, nothing else.

Hostile clients, which do not follow the protocol, also see the others' uploads (`poisoning`). A curious server sees
updates, or sums of them (`sums`).
"""

from fedveil.attacks.observed import Observed, Round

__all__ = ["Observed", "Round"]
