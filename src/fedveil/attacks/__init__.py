"""Attacks by a participant. They see what a client was sent and the client's own records, nothing else."""

from fedveil.attacks.observed import Observed, Round

__all__ = ["Observed", "Round"]
