"""Attacks by a client. They see what the client received and its own records, nothing else."""

from fedveil.attacks.observed import Observed, Round

__all__ = ["Observed", "Round"]
