"""Attacks on a federation.

An honest-but-curious client sees only the messages it receives and its own records. Hostile clients, which do not
follow the protocol, also see the uploads of other clients (`poisoning`). A curious server sees updates or their sums
(`leaked_gradients`).
"""

from fedveil.attacks.observation import Observation, Round

__all__ = ["Observation", "Round"]
