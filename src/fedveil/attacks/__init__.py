"""Attacks on a federation.

An honest-but-curious client sees what it received and its own records, nothing else. Hostile clients, which do not
follow the protocol, also see the uploads of others (`poisoning`). A curious server sees updates, or sums of them
(`sums`).
"""

from fedveil.attacks.observation import Observation, Round

__all__ = ["Observation", "Round"]
